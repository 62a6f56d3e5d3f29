"""The quickstart with three seeds, and a table of the held-out score before and after each.

    python recipes/three_seeds.py
    python recipes/three_seeds.py name=quickstart-ppo algorithm.name=ppo

The arguments are changes to the recipe. Runs are named after it: `quickstart-seed-0`, and so on.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from corral.cli.planning import planned
from corral.loop.train import train
from corral.observe.console import Console, held_out_score
from corral.observe.run_files import read_metrics
from corral.recipe.errors import RunError, UserError
from corral.recipe.load import load_recipe

RECIPE = Path(__file__).parent / "quickstart.yaml"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Result:
    seed: int
    before: float
    after: float
    interval: float
    """Half the width of the 95 % interval of `after`."""
    minutes: float


def main(overrides: list[str]) -> None:
    name = load_recipe(RECIPE, overrides).name
    results = [run(seed, [*overrides, f"seed={seed}", f"name={name}-seed-{seed}"]) for seed in SEEDS]
    print("\n| seed | before | after | change | minutes |\n| --- | --- | --- | --- | --- |")
    for result in results:
        change = 100 * (result.after - result.before)
        print(
            f"| {result.seed} | {result.before:.1%} | {result.after:.1%} ± {100 * result.interval:.1f} "
            f"| {change:+.1f} points | {result.minutes:.1f} |"
        )


def run(seed: int, overrides: list[str]) -> Result:
    """A run in a folder of its own. Its checkpoint (1.6 GB) is not wanted here."""
    recipe, plan = planned(RECIPE, ["checkpoint.resume=never", "checkpoint.at_end=false", *overrides])
    started = time.perf_counter()
    folder = train(recipe, plan.text(), [f"seed {seed}"], Console())
    minutes = (time.perf_counter() - started) / 60
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if held_out_score(row) is not None}
    if 0 not in rows or plan.num_steps not in rows:
        raise RunError(f"{folder} has no score before or after training; was it stopped?")
    before, after = rows[0], rows[plan.num_steps]
    return Result(seed, held_out_score(before), held_out_score(after), after["validation/ci95"], minutes)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, RunError) as error:
        sys.exit(f"error: {error}")
