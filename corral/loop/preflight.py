"""What can be known to be wrong before a model is loaded: trackers that are not installed, a disk that is too small,
rows that cannot be read, and rewards and environments that fail. `corral train` looks at all of it before it loads the
model; `corral plan --check` looks at it and does nothing else."""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from corral.cluster.doctor.recipe_checks import checkpoint_bytes, num_kept
from corral.data.plugins import is_broken_code
from corral.data.rows import Row
from corral.data.sources import load_part
from corral.observe.trackers import check_trackers
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.memory import human_bytes
from corral.recipe.plan import Plan
from corral.recipe.schema import Part, Recipe
from corral.rewards.scorer_pool import ScorerPools
from corral.runtime.worker import RewardWorker, environments_with_rewards

NUM_ROWS = 100
"""Rows of each source that `corral plan --check` reads."""


def check_here(plan: Plan, warn: Callable[[str], None]) -> list[str]:
    """Checks everything on this machine. Returns what was checked; raises all problems, one line for each."""
    recipe, checked, problems = plan.recipe, list[str](), list[str]()

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
    if recipe.needs_engine and rows:
        what = "environment and reward: called once with a row"
        check(what, lambda: report_trial(recipe, try_here(recipe, rows_by_tag(recipe, rows)), warn))
    if problems:
        raise RecipeError(problems)
    return checked


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


def rows_by_tag(recipe: Recipe, rows: Iterable[Row]) -> dict[str, Row]:
    """The first row of each environment."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.extra["environment"] if recipe.environments else "", row)
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
