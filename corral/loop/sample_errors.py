"""Samples that fail, in a reward function, an environment, a tool or an agent: the first error of each kind is a
warning at once, and a run in which too many samples fail ends, since it would train on rewards that nobody gave."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.data.batch import Trajectory
from corral.data.plugins import error_kind
from corral.recipe.errors import RunError
from corral.recipe.schema import Environment

logger = logging.getLogger(__name__)

MAX_KINDS = 20
"""Kinds of errors that are printed; more are counted, and in the log."""


class RunStopped(RunError):
    """The run cannot go on, and its weights are those of the last step that was made: they are saved first."""


class TooManyErrors(RunStopped):
    """More samples failed than the recipe allows."""


class ErrorReport:
    """Prints the first error of each kind as soon as its sample is there, and logs all of them."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen: set[str] = set()

    def see(self, trajectories: Iterable[Trajectory]) -> None:
        for one in trajectories:
            errors = [] if one.error is None else [("a sample failed", one.error)]
            errors += [("a tool failed", error) for error in one.tool_errors if error != one.error]
            for what, error in errors:
                logger.info("prompt %d, sample %d: %s", one.prompt_id, one.sample, error)
                self._see(what, error)

    def _see(self, what: str, error: str) -> None:
        kind = error_kind(error)
        if kind in self._seen or len(self._seen) > MAX_KINDS:
            return
        self._seen.add(kind)
        if len(self._seen) > MAX_KINDS:
            self._warn(f"there are more than {MAX_KINDS} kinds of errors; further ones are only in logs/main.log")
        else:
            self._warn(f"{what}: {error}; others like it are counted and not printed")


@dataclass
class EnvironmentErrors:
    """The samples of one environment, and how they failed."""

    num_samples: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of samples that failed, by the kind of their error."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first error of each kind."""

    @property
    def num_errors(self) -> int:
        return self.kinds.total()

    def describe_most_frequent(self) -> str:
        [(kind, number)] = self.kinds.most_common(1)
        return f"{number} of them with: {self.examples[kind]}"


@dataclass
class ErrorCounts:
    """How many samples failed, by the tag of their environment."""

    by_tag: dict[str, EnvironmentErrors] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> "ErrorCounts":
        counts = cls()
        for trajectory in trajectories:
            own = counts.by_tag.setdefault(trajectory.tag, EnvironmentErrors())
            own.num_samples += 1
            if trajectory.error is not None:
                kind = error_kind(trajectory.error)
                own.kinds[kind] += 1
                own.examples.setdefault(kind, trajectory.error)
        return counts

    @classmethod
    def join(cls, several: Sequence["ErrorCounts"]) -> "ErrorCounts":
        joined = cls()
        for counts in several:
            for tag, errors in counts.by_tag.items():
                own = joined.by_tag.setdefault(tag, EnvironmentErrors())
                own.num_samples += errors.num_samples
                own.kinds += errors.kinds
                own.examples = {**errors.examples, **own.examples}
        return joined

    def describe(self) -> str:
        """Why samples have no reward."""
        failed = [errors.describe_most_frequent() for errors in self.by_tag.values() if errors.num_errors]
        return "; ".join(failed) or "the reward function returned None for all of them"

    @property
    def num_samples(self) -> int:
        return sum(errors.num_samples for errors in self.by_tag.values())

    @property
    def rate(self) -> float:
        """Fraction of all samples that failed."""
        return sum(errors.num_errors for errors in self.by_tag.values()) / max(self.num_samples, 1)

    def check(self, when: str, environments: Mapping[str, Environment], *, is_first: bool) -> None:
        """Raises `TooManyErrors` where more samples of an environment failed than its `max_error_rate`, or all of them
        in the first step or validation (`is_first`)."""
        for tag, errors in self.by_tag.items():
            limit = environments[tag].max_error_rate
            rate = errors.num_errors / errors.num_samples
            if limit is None or not (rate > limit or (rate == 1 and is_first)):
                continue
            how_many = f"all {errors.num_samples}" if rate == 1 else f"{errors.num_errors} of {errors.num_samples}"
            key = f"environments.{tag}" if tag else "environment"
            raise TooManyErrors(
                f"{when}: {how_many} samples{f' of {key}' if tag else ''} failed, {errors.describe_most_frequent()}. "
                "Nothing was trained on them. Once this is repaired, the same command goes on from what was saved. (A "
                "reward that does not apply to a sample is None; how many may fail for other reasons is "
                f"`{key}.max_error_rate`, now {limit:g})"
            )
