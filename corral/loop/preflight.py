"""What can be known to be wrong before a model is loaded: trackers that are not installed, a disk that is too small,
rows that cannot be read, and rewards and environments that fail. `corral train` looks at all of it before it loads the
model; `corral plan --check` looks at it and does nothing else."""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from corral.algorithms.advantages import RewardedBatch, Turns, compute_advantages
from corral.algorithms.declarations import (
    ADVANTAGES,
    LOSSES,
    AdvantageDeclaration,
    AlgorithmPart,
    LossDeclaration,
)
from corral.algorithms.losses import PolicyTerms, policy_token_loss
from corral.cluster.doctor.recipe_checks import checkpoint_bytes, num_kept
from corral.data.plugins import error_line, is_broken_code
from corral.data.rows import Row
from corral.data.sources import load_part
from corral.observe.trackers import check_trackers
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.memory import human_bytes
from corral.recipe.plan import Plan
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Part, Recipe, WeightedReward
from corral.rewards.scorer_pool import ScorerPools
from corral.rewards.scorers import SCORER_OF_SOURCE, scorer_for_source
from corral.runtime.worker import RewardWorker, environments_with_rewards

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = 100
"""Rows of each source that `corral plan --check` reads."""


def check_here(plan: Plan, warn: Callable[[str], None]) -> list[str]:
    """Checks everything on this machine. Returns what was checked; raises all problems, one line for each."""
    recipe, algorithm, checked, problems = plan.recipe, plan.algorithm, list[str](), list[str]()

    def check(what: str, look: Callable[[], None]) -> None:
        try:
            look()
            checked.append(what)
        except UserError as error:
            problems.extend(str(error).splitlines())

    check(f"trackers: {', '.join(recipe.logging.trackers) or 'none'}", lambda: check_trackers(recipe.logging))
    check("disk: room for a checkpoint", lambda: check_disk(plan, recipe.logging.folder, warn))
    if recipe.checkpoint.upload:
        check("checkpoint.upload: the command", lambda: check_command("checkpoint.upload", recipe.checkpoint.upload[0]))
    rows: list[Row] = []
    check("data.train: the first rows", lambda: rows.extend(first_rows(recipe, "train", warn)))
    if recipe.data.validation is not None:
        check("data.validation: the first rows", lambda: rows.extend(first_rows(recipe, "validation", warn)))
    if {algorithm.advantage.name, algorithm.loss.name} - ADVANTAGES.keys() - LOSSES.keys():
        check("algorithm: called once with short trajectories", lambda: try_algorithm(algorithm))
    if recipe.needs_engine and rows:
        check("environment and reward: called once with a row", lambda: try_rewards(recipe, rows, warn))
    if problems:
        raise RecipeError(problems)
    return checked


def try_algorithm(algorithm: ResolvedAlgorithm) -> None:
    """Calls a loss and an advantage of the user's once, with four short trajectories of two prompts, and takes a
    gradient. Raises where that fails, or where what they return has another shape than it should."""
    kind = "advantage"
    try:
        if algorithm.advantage.name not in ADVANTAGES:
            try_advantage(algorithm.advantage)
        kind = "loss"
        if algorithm.loss.name not in LOSSES:
            try_loss(algorithm.loss)
    except Exception as error:
        what = f"algorithm.{kind}: called once, with four short trajectories, it failed"
        raise UserError(f"{what}: {error_line(error)}") from None


LENGTHS, PROMPT = (5, 4, 6, 3), 2
"""Tokens of each trajectory on which an algorithm is tried, and how many of them are its prompt's."""


def try_advantage(part: AlgorithmPart[AdvantageDeclaration]) -> None:
    import torch

    mask, offsets, numbers = tokens_to_try()
    ends = offsets[1:] - 1
    rewards = torch.zeros(len(mask)).index_copy(0, ends, torch.tensor([1.0, 0.0, 0.5, 0.25]))
    rows = torch.arange(len(LENGTHS))
    found = compute_advantages(
        part,
        RewardedBatch(
            token_rewards=rewards,
            mask=mask,
            offsets=offsets,
            groups=rows // 2,
            values=numbers * mask,
            baselines=torch.full((len(LENGTHS),), 0.5),
            teacher_lead=numbers * mask,
            turns=Turns(ends, rows, torch.zeros_like(rows)),
        ),
    )
    check_finite(found.advantages[mask])


def try_loss(part: AlgorithmPart[LossDeclaration]) -> None:
    import torch

    mask, offsets, numbers = tokens_to_try()
    logprobs, declared = (-1 - numbers).requires_grad_(), part.declaration
    pairs = torch.arange(len(LENGTHS)) // 2
    found = policy_token_loss(
        part,
        PolicyTerms(
            logprobs=logprobs,
            old_logprobs=-1.1 - numbers,
            advantages=numbers - 0.3,
            mask=mask,
            offsets=offsets,
            reference_logprobs=-1.2 - numbers if declared.needs_reference else None,
            pairs=pairs if declared.trains_on_pairs else None,
            is_chosen=torch.tensor([True, False, True, False]) if declared.trains_on_pairs else None,
        ),
    )
    check_finite(found.loss[mask])
    if not found.loss.requires_grad:
        raise TypeError("no gradient comes back to `terms.logprobs`, so nothing would be trained")
    check_finite(torch.autograd.grad(found.loss.sum(), logprobs)[0])


def check_finite(values: "Tensor") -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"not all numbers are finite: {values.tolist()}")


def tokens_to_try() -> tuple["Tensor", "Tensor", "Tensor"]:
    """Mask and offsets of the trajectories, and a number between 0 and 1 for each token."""
    import torch

    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.cat([torch.arange(length) >= PROMPT for length in LENGTHS])
    return mask, offsets, torch.linspace(0, 1, len(mask))


def check_disk(plan: Plan, folder: Path, warn: Callable[[str], None]) -> None:
    """Raises where not even one checkpoint fits on the disk; warns where not all fit that are kept."""
    needed, keep = checkpoint_bytes(plan), num_kept(plan)
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    one = needed // (keep + 1)
    if free < one:
        raise UserError(
            f"{there} has {human_bytes(free)} free, and a checkpoint takes {human_bytes(one)}: free some space, or set "
            "`logging.runs` to a folder on another disk"
        )
    if free < needed:
        warn(
            f"{there} has {human_bytes(free)} free, and {keep} checkpoints and one that is being written take "
            f"{human_bytes(needed)}; `checkpoint.keep` says how many are kept"
        )


def check_command(key: str, name: str) -> None:
    if shutil.which(name) is None:
        raise UserError(f"`{key}`: there is no program {name} on this machine")


def first_rows(recipe: Recipe, part: Part, warn: Callable[[str], None]) -> list[Row]:
    source = recipe.data.train if part == "train" else recipe.data.validation
    assert source is not None
    return load_part(recipe, part, source.first_rows(NUM_ROWS), warn)


def try_rewards(recipe: Recipe, rows: Sequence[Row], warn: Callable[[str], None]) -> None:
    if not recipe.trains_on_rows:
        check_sources(recipe, rows)
    report_trial(recipe, try_here(recipe, rows_by_tag(recipe, rows)), warn)


def check_sources(recipe: Recipe, rows: Iterable[Row]) -> None:
    """Raises where the reward `by_source` has no scorer for rows: every sample of them would fail."""
    rewards = [
        (tag, reward)
        for tag, environment in recipe.tagged_environments.items()
        for reward in environment.named_rewards.values()
        if reward.name == "by_source" and environment.max_error_rate is not None
    ]
    problems = list[str]()
    for tag, source in dict.fromkeys((tag_of(recipe, row), row.source) for row in rows) if rewards else ():
        for own, reward in rewards:
            if own == tag and (not isinstance(reward, WeightedReward) or reward.is_for(source)):
                try:
                    scorer_for_source(source, {**SCORER_OF_SOURCE, **(reward.options.get("sources") or {})})
                except ValueError as error:
                    problems.append(str(error))
    if problems:
        raise RecipeError(problems)


def tag_of(recipe: Recipe, row: Row) -> str:
    """The tag of a row's environment; the only one has none."""
    return str(row.extra["environment"]) if recipe.environments else ""


def rows_by_tag(recipe: Recipe, rows: Iterable[Row]) -> dict[str, Row]:
    """The first row of each environment."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(tag_of(recipe, row), row)
        if len(found) == len(recipe.tagged_environments):
            break
    return found


def try_here(recipe: Recipe, rows: Mapping[str, Row]) -> dict[str, str]:
    pools = ScorerPools.start(environments_with_rewards(recipe))
    try:
        return asyncio.run(RewardWorker(pools, recipe).try_out(rows))
    finally:
        pools.close()


def report_trial(recipe: Recipe, errors: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Warns of environments and rewards that failed when they were called once. Raises where no reply of a model could
    make a difference: the environment could not begin, or the code itself is broken."""
    for tag, error in errors.items():
        key = f"environments.{tag}" if tag else "environment"
        what = f"{key}: called once, with a row and its answer as the reply, it failed: {error}"
        is_broken = error.startswith("reset: ") or is_broken_code(error)
        if is_broken and recipe.tagged_environments[tag].max_error_rate is not None:
            raise UserError(what)
        warn(what)
