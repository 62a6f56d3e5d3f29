"""A task of reasoning-gym with several attempts: a wrong answer gets feedback, and another attempt.

Rows are those of a `reasoning_gym:TASK` source; the score is that of the task's own scorer. The reward of a step is by
how much its score is better than all before it, so a trajectory earns the score of its best attempt. Scorers may take
long, so the methods are plain functions and run in processes.
"""

from corral.data.rows import Message, Row
from corral.envs.base import BlockingEnv, StepResult
from corral.recipe.errors import UserError
from corral.rewards.reward_function import load_function

score_reply = load_function("reasoning_gym", {})
"""Loaded here, since that raises at once if the package is missing."""
FEEDBACK = "That is not right. Attempts left: {attempts_left}."


class ReasoningGymEnv(BlockingEnv):
    def __init__(self, attempts: int = 1, feedback: str = FEEDBACK, tag: str = "answer") -> None:
        """`feedback` may have {attempts_left} and {score} in it."""
        if attempts < 1:
            raise UserError(f"environment `reasoning_gym`: attempts must be at least 1, not {attempts}")
        self._attempts, self._feedback, self._tag = attempts, feedback, tag
        self._row: Row | None = None
        self._scores: list[float] = []

    def reset(self, row: Row, seed: int) -> list[Message]:
        if "reasoning_gym" not in row.extra:
            raise UserError("the row is not from a `reasoning_gym:TASK` source")
        self._row, self._scores = row, []
        return row.prompt

    def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        score = score_reply(reply, self._row.extra, tag=self._tag)
        gain = max(score - max(self._scores, default=0.0), 0.0)
        self._scores.append(score)
        left = self._attempts - len(self._scores)
        if score >= 1 or left == 0:
            return StepResult([], gain, done=True)
        feedback = self._feedback.replace("{attempts_left}", str(left)).replace("{score}", f"{score:.2f}")
        return StepResult([Message(role="user", content=feedback)], gain, done=False)

    def close(self) -> None:
        self._row = None

    def summary(self) -> dict[str, float]:
        return {
            "success": float(max(self._scores, default=0.0) >= 1),
            "success_at_first": float(self._scores[:1] == [1.0]),
            "turns": float(len(self._scores)),
        }

    def best_reply(self) -> str | None:
        assert self._row is not None, "before reset"
        answer = self._row.extra["reasoning_gym"]["entry"]["answer"]
        return None if answer is None else f"<{self._tag}>{answer}</{self._tag}>"
