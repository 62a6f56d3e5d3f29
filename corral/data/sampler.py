"""Which row comes next: an endless, reproducible sequence with a state of three integers.

Every prompt that is handed out has an id (0, 1, 2, ... over the whole run), which is its identity in the ledger. The
order of an epoch follows from (seed, epoch) alone, so nothing but the next id has to be remembered.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corral.recipe.errors import UserError


@dataclass(frozen=True)
class Draw:
    prompt_id: int
    index: int
    """Of the row."""
    epoch: int


class Sampler:
    """Hands out rows, epoch after epoch; each epoch has every row once."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise UserError("there are no rows to draw from")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._next_prompt_id = 0
        self._order: tuple[int, NDArray[np.intp]] | None = None
        """The epoch drawn from last and its order; follows from the rest."""

    def draw(self, n: int) -> list[Draw]:
        """The next `n` draws. How many are asked for at a time does not change the sequence."""
        assert n >= 0
        prompt_ids = range(self._next_prompt_id, self._next_prompt_id + n)
        self._next_prompt_id += n
        return self.again(prompt_ids)

    def again(self, prompt_ids: Iterable[int]) -> list[Draw]:
        """Draws that were handed out before, or are handed out now."""
        return [self._draw(prompt_id) for prompt_id in prompt_ids]

    def state(self) -> dict[str, int]:
        return {"seed": self._seed, "num_rows": self._num_rows, "next_prompt_id": self._next_prompt_id}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken. Another seed or number of rows would repeat some rows and lose others."""
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
        self._next_prompt_id = state["next_prompt_id"]

    def _draw(self, prompt_id: int) -> Draw:
        epoch, position = divmod(prompt_id, self._num_rows)
        index = int(self._epoch_order(epoch)[position]) if self._shuffle else position
        return Draw(prompt_id, index, epoch)

    def _epoch_order(self, epoch: int) -> NDArray[np.intp]:
        if self._order is None or self._order[0] != epoch:
            # Sorting raw bits, because numpy keeps those the same from version to version; permutation() it may change.
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self._num_rows)
            self._order = epoch, np.argsort(bits, kind="stable")
        return self._order[1]
