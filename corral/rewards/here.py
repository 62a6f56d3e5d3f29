"""The reward function in this process, for a debugger. Nothing bounds a call: who looks at it may take their time."""

import dataclasses
from collections.abc import Callable

from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.recipe.schema import Reward
from corral.rewards.calling import call_here, load_function
from corral.rewards.pool import Counts, Score


class RewardsHere:
    """In place of a `ScorerPool`. `on_error` sees what the function raises, before that counts as a failed sample."""

    def __init__(self, reward: Reward, on_error: Callable[[BaseException], None] = lambda error: None) -> None:
        self._reward, self._on_error = reward, on_error
        self._function = load_function(reward.name, reward.options)
        self.counts = Counts()

    async def score(self, response: str, row: Row) -> Score:
        try:
            result = await call_here(self._function, response, row, self._reward.options)
        except (Exception, SystemExit) as error:
            self._on_error(error)
            self.counts = dataclasses.replace(self.counts, raised=self.counts.raised + 1)
            return Score(self._reward.on_error, error_line(error))
        self.counts = dataclasses.replace(self.counts, ok=self.counts.ok + 1)
        return Score(result.score, metrics=result.metrics)

    def close(self) -> None:
        """There is nothing to end."""
