"""Which row comes next: an endless, reproducible sequence with a state of a few numbers.

Every prompt that is handed out has an id (0, 1, 2, ... over the whole run), which is its identity in the ledger. The
order of an epoch follows from (seed, epoch) alone, and so does the source of each prompt from the sources' weights, so
nothing but the next id has to be saved. What a curriculum skips has an id like any other prompt: each epoch of a source
has every row once, whatever becomes of it.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.recipe.errors import UserError
from corral.recipe.schema import Curriculum


@dataclass(frozen=True)
class SampledPrompt:
    prompt_id: int
    index: int
    """Index of the row in the data set."""
    epoch: int
    """Number of times that all rows of its source were handed out before it."""


@dataclass(frozen=True)
class SampledSource:
    """Rows of the data set that follow each other, of which a fixed part of all prompts is drawn."""

    num_rows: int
    weight: float = 1.0


class Sampler:
    """Hands out rows, epoch after epoch; each epoch has every row of its source once."""

    def __init__(
        self,
        sources: Sequence[SampledSource],
        seed: int,
        shuffle: bool,
        difficulties: Sequence[float] | None = None,
    ) -> None:
        """`difficulties`: a number for each row; epochs go from the lowest to the highest."""
        if not sources or any(source.num_rows < 1 for source in sources):
            raise UserError("there are no rows to draw from")
        self._sources, self._seed, self._shuffle = sources, seed, shuffle
        self._starts = np.cumsum([0, *(source.num_rows for source in sources)]).tolist()
        self._difficulties = None if difficulties is None else np.array(difficulties, np.float64)
        self._next_prompt_id = 0
        self._orders: dict[int, tuple[int, NDArray[np.intp]]] = {}
        """Cache: for each source the epoch that was sampled last, and its order."""
        self._drawn = [0] * len(sources)
        """Prompts that were drawn from each source, up to those that the following two arrays know."""
        self._source_of, self._number_of = array("H"), array("q")
        """Of each prompt id so far, where there are several sources: the source, and the number of prompts that were
        drawn from it before."""

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
        source, number = self._place(prompt_id)
        epoch, position = divmod(number, self._sources[source].num_rows)
        return SampledPrompt(prompt_id, self._starts[source] + int(self._order(source, epoch)[position]), epoch)

    def _place(self, prompt_id: int) -> tuple[int, int]:
        """The prompt's source, and the number of prompts that were drawn from it before. A prompt goes to the source
        that is furthest behind its part of all prompts up to this one: shares are right from the first step on, and
        not only on average."""
        if len(self._sources) == 1:
            return 0, prompt_id
        total = sum(source.weight for source in self._sources)
        while len(self._source_of) <= prompt_id:
            due = len(self._source_of) + 1
            behind = [s.weight / total * due - n for s, n in zip(self._sources, self._drawn, strict=True)]
            source = behind.index(max(behind))
            self._source_of.append(source)
            self._number_of.append(self._drawn[source])
            self._drawn[source] += 1
        return self._source_of[prompt_id], self._number_of[prompt_id]

    def _order(self, source: int, epoch: int) -> NDArray[np.intp]:
        if source not in self._orders or self._orders[source][0] != epoch:
            num_rows = self._sources[source].num_rows
            order = np.arange(num_rows)
            if self._shuffle:
                # Sorting raw bits: numpy keeps those the same from version to version; permutation() it may change.
                entropy = [self._seed, epoch, source] if source else [self._seed, epoch]
                order = np.argsort(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows), kind="stable")
            if self._difficulties is not None:
                own = self._difficulties[self._starts[source] : self._starts[source + 1]]
                order = order[np.argsort(own[order], kind="stable")]
            self._orders[source] = epoch, order
        return self._orders[source][1]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "seed": self._seed,
            "num_rows": self._starts[-1],
            "next_prompt_id": self._next_prompt_id,
        }
        if len(self._sources) > 1:
            state["sources"] = [[source.num_rows, source.weight] for source in self._sources]
        if self._difficulties is not None:
            state["difficulties"] = hashlib.sha256(self._difficulties.tobytes()).hexdigest()[:16]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Other rows, weights or orders would repeat some rows and lose others."""
        own = self.state()
        if state["num_rows"] != own["num_rows"]:
            raise UserError(
                f"the checkpoint was made with {state['num_rows']} rows of data, now there are {own['num_rows']}; "
                "use the same data, or start a new run"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"the checkpoint was made with data seed {state['seed']}, now it is {self._seed}; "
                "use the same seed, or start a new run"
            )
        for key, what in (
            ("sources", "other sources or weights (`data.train.sources`)"),
            ("difficulties", "another order of rows (`data.curriculum.order_by`)"),
        ):
            if state.get(key) != own.get(key):
                raise UserError(f"the checkpoint was made with {what}; use the same, or start a new run")
        # Checkpoints of version 0.5 and before have it as `next_ordinal`.
        self._next_prompt_id = state["next_prompt_id"] if "next_prompt_id" in state else state["next_ordinal"]


HISTORY = np.dtype([("reward", "f8"), ("samples", "i8"), ("solved", "i4"), ("failed", "i4")])
"""Of one row: the sum of its rewards and their number, and how often in a row all its samples were solved or failed."""

SOLVED, FAILED, OUTSIDE = "solved in every sample", "failed in every sample", "mean reward out of range"
SKIP_REASONS = (SOLVED, FAILED, OUTSIDE)


class RewardHistory:
    """The rewards of each row in this run, by which a curriculum skips prompts. Rewards are recorded step by step and
    in order, so what is skipped does not depend on timing."""

    file_name = "row_rewards.npy"

    def __init__(self, curriculum: Curriculum, num_rows: int, seed: int) -> None:
        self.curriculum, self.seed = curriculum, seed
        self.rows = np.zeros(num_rows, HISTORY)

    def record(self, row: int, rewards: Sequence[float], has_all: bool) -> None:
        """Adds the rewards of the samples of one prompt. `has_all`: none of them has failed. Else it is not known
        whether all would have been solved, or none: an outage of a judge is no reason to skip a row."""
        if not rewards:
            return
        known, curriculum = self.rows[row], self.curriculum
        known["reward"] += sum(rewards)
        known["samples"] += len(rewards)
        if not has_all:
            return
        known["solved"] = known["solved"] + 1 if min(rewards) >= curriculum.solved_reward else 0
        known["failed"] = known["failed"] + 1 if max(rewards) <= curriculum.failed_reward else 0

    def reason_to_skip(self, prompt: SampledPrompt) -> str | None:
        """Returns why the prompt is not to be rolled out; None: it is."""
        known, curriculum = self.rows[prompt.index], self.curriculum
        if curriculum.skip_solved is not None and known["solved"] >= curriculum.skip_solved:
            return SOLVED
        if curriculum.skip_failed is not None and known["failed"] >= curriculum.skip_failed:
            return FAILED
        if curriculum.mean_reward is not None and known["samples"]:
            low, high = curriculum.mean_reward
            if not low <= known["reward"] / known["samples"] <= high and self._chance(prompt) >= curriculum.others:
                return OUTSIDE
        return None

    @property
    def num_retired(self) -> int:
        """Number of rows that are skipped for the rest of the run."""
        return int(self._is_retired.sum())

    def bring_back_if_none_is_left(self) -> bool:
        """Forgets what was solved and failed, where every row would be skipped for the rest of the run."""
        if not self._is_retired.all():
            return False
        self.rows["solved"] = self.rows["failed"] = 0
        return True

    @property
    def _is_retired(self) -> NDArray[np.bool_]:
        is_retired = np.zeros(len(self.rows), np.bool_)
        for name, times in (("solved", self.curriculum.skip_solved), ("failed", self.curriculum.skip_failed)):
            if times is not None:
                is_retired |= self.rows[name] >= times
        return is_retired

    def _chance(self, prompt: SampledPrompt) -> float:
        """A number in [0, 1) that follows from seed and prompt id."""
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, prompt.prompt_id, 1])).random_raw()
        return int(bits) / 2**64

    def save(self, folder: Path) -> None:
        np.save(folder / self.file_name, self.rows)

    def load(self, folder: Path) -> None:
        """Continues with what a checkpoint knows. One that was made without such a curriculum knows nothing yet."""
        if (folder / self.file_name).is_file():
            rows = np.load(folder / self.file_name)
            if rows.dtype != HISTORY or rows.shape != self.rows.shape:
                raise UserError(f"{folder / self.file_name} is of other rows than these {len(self.rows)}")
            self.rows = rows
