"""The `question` environment: a question, answered in one step and scored by the reward function."""

from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult, final_step
from corral.rewards.scorer_pool import RewardScorer


class QuestionEnv(Env):
    bounds_itself = True
    """Each call of the reward function has its own deadline in the pool; waiting for a free worker has none."""

    def __init__(self, pool: RewardScorer) -> None:
        self._pool = pool
        self._row: Row | None = None

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        return row.prompt

    async def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        return final_step(await self._pool.score(reply, self._row))

    async def close(self) -> None:
        self._row = None
