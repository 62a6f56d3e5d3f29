"""Which row comes next: an endless, reproducible sequence with a state of three integers.

Every prompt that is handed out has an id (0, 1, 2, ... over the whole run), which is its identity in the ledger. The
order of an epoch follows from (seed, epoch) alone, so nothing but the next id has to be saved.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corral.recipe.errors import UserError


@dataclass(frozen=True)
class SampledPrompt:
    prompt_id: int
    index: int
    """Index of the row in the data set."""
    epoch: int


class Sampler:
    """Hands out rows, epoch after epoch; each epoch has every row once."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise UserError("there are no rows to draw from")
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._next_prompt_id = 0
        self._order: tuple[int, NDArray[np.intp]] | None = None
        """Cache: the epoch that was sampled last, and its order."""

    def next(self, n: int) -> list[SampledPrompt]:
        """The next `n` prompts. The sequence does not depend on how many are taken at a time."""
        assert n >= 0
        prompt_ids = range(self._next_prompt_id, self._next_prompt_id + n)
        self._next_prompt_id += n
        return self.with_ids(prompt_ids)

    def with_ids(self, prompt_ids: Iterable[int]) -> list[SampledPrompt]:
        """Prompts by id, such as those that were handed out before and got lost."""
        return [self._prompt(prompt_id) for prompt_id in prompt_ids]

    def _prompt(self, prompt_id: int) -> SampledPrompt:
        epoch, position = divmod(prompt_id, self._num_rows)
        if not self._shuffle:
            return SampledPrompt(prompt_id, position, epoch)
        if self._order is None or self._order[0] != epoch:
            # Sorting raw bits, because numpy keeps those the same from version to version; permutation() it may change.
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self._num_rows)
            self._order = epoch, np.argsort(bits, kind="stable")
        return SampledPrompt(prompt_id, int(self._order[1][position]), epoch)

    def state(self) -> dict[str, int]:
        return {"seed": self._seed, "num_rows": self._num_rows, "next_prompt_id": self._next_prompt_id}

    def load_state(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken. Another seed or number of rows would repeat some rows and lose others."""
        if state["num_rows"] != self._num_rows:
            raise UserError(
                f"the checkpoint was made with {state['num_rows']} rows of data, now there are {self._num_rows}; "
                "use the same data, or start a new run"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was made with data seed {state['seed']}, now it is {self._seed}; "
                "use the same seed, or start a new run"
            )
        # Checkpoints of version 0.5 and before have it as `next_ordinal`.
        self._next_prompt_id = state["next_prompt_id"] if "next_prompt_id" in state else state["next_ordinal"]
