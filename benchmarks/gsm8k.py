"""SmolLM2-135M-Instruct on GSM8K: as it comes, after supervised fine-tuning, after GRPO, with several seeds at once.

    python benchmarks/gsm8k.py run RUNS [--seeds 0,1,2] [--data FOLDER] [--sft KEY=VALUE ...] [--grpo KEY=VALUE ...]
    python benchmarks/gsm8k.py report RUNS [--results FOLDER]

`run` trains every seed in processes of its own, all seeds on the same GPU; `--data` is a folder with GSM8K's own
`train.jsonl` and `test.jsonl`, in place of the hub. `report` writes a table and a picture of what the runs measured
on the whole test set, and what these are drawn from.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import HERE, RESULTS

from corral.bench.comparison import format_table
from corral.observe.curve import GRID, QUIET, TRAIN, VALIDATION, points, smooth
from corral.observe.run_files import read_metrics

CORRAL = [sys.executable, "-c", "from corral.cli.main import main; main()"]
ACCURACY = "validation/mean@1"
KEPT = (
    *("step", "reward/mean", "reward/best", "policy/nll", "policy/entropy", "policy/mismatch_kl", "length/mean"),
    *("samples/equal_groups", "time/step_s", "validation/loss", ACCURACY, "validation/ci95"),
)
Metrics = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sft", nargs="*", default=[], help="overrides of recipes/gsm8k-sft.yaml")
    parser.add_argument("--grpo", nargs="*", default=[], help="overrides of recipes/gsm8k.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS / "h200" / "gsm8k")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.action == "run":
        with ThreadPoolExecutor(len(seeds)) as pool:
            list(pool.map(lambda seed: train(seed, options), seeds))
    else:
        report(options.runs, seeds, options.results)


def train(seed: int, options: argparse.Namespace) -> None:
    """Trains one seed: the supervised run, where it is not there yet, and GRPO from its last checkpoint."""
    source = []
    for part, file in {"train": "train", "validation": "test"}.items() if options.data else ():
        source += [
            f"data.{part}.path={options.data / file}.jsonl",
            f"data.{part}.subset=null",
            f"data.{part}.split=null",
        ]
    common = [f"seed={seed}", f"logging.runs={options.runs}", *source]
    sft = options.runs / f"sft-{seed}"
    if not (sft / "checkpoints").is_dir():
        corral(sft, "sft", "gsm8k-sft.yaml", [*common, *options.sft])
    checkpoint = max((sft / "checkpoints").glob("step_*"))
    corral(options.runs / f"grpo-{seed}", "train", "gsm8k.yaml", [f"model.path={checkpoint}", *common, *options.grpo])


def corral(run: Path, command: str, recipe: str, overrides: list[str]) -> None:
    print(f"{run.name} begins", flush=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    with open(run.parent / f"{run.name}.log", "a") as log:
        words = [*CORRAL, command, str(HERE.parent / "recipes" / recipe), f"name={run.name}", *overrides]
        subprocess.run(
            words, check=True, stdout=log, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "4", **os.environ}
        )
    print(f"{run.name} ended", flush=True)


def report(runs: Path, seeds: list[int], results: Path) -> None:
    results.mkdir(parents=True, exist_ok=True)
    rows, scores, curves = list[list[str]](), list[list[float]](), dict[int, Metrics]()
    for seed in seeds:
        sft, grpo = (read_metrics(runs / f"{stage}-{seed}" / "metrics.jsonl") for stage in ("sft", "grpo"))
        keep(sft, results / f"sft-{seed}.jsonl")
        keep(grpo, results / f"grpo-{seed}.jsonl")
        stages = [validations(sft)[0], validations(sft)[-1], validations(grpo)[-1]]
        scores.append([stage[ACCURACY] for stage in stages])
        curves[seed] = grpo
        minutes = [sum(row.get("time/step_s") or 0.0 for row in metrics) / 60 for metrics in (sft, grpo)]
        last = max(row["step"] for row in grpo)
        rows.append([str(seed), *map(percent, stages), f"{minutes[0]:.1f}", f"{minutes[1]:.1f} ({last} steps)"])
    means = [statistics.mean(column) for column in zip(*scores, strict=True)]
    rows.append(["mean", *(f"{100 * mean:.1f} %" for mean in means), "", ""])
    gains = [100 * (after - before) for _, before, after in scores]
    columns = ["seed", "as it comes", "after SFT", "after GRPO", "SFT, minutes of steps", "GRPO, minutes of steps"]
    command = "`python benchmarks/gsm8k.py run RUNS`, accuracy on the whole test set, greedy, with 95 % intervals"
    text = f"{datetime.date.today()}, {command}.\n\n{format_table([columns, *rows])}\n\n"
    text += f"Points that GRPO adds to what SFT gives, over the seeds: {interval(gains)}.\n"
    (results / "seeds.md").write_text(text)
    draw(curves, results / "seeds.png")
    print(text)


def keep(metrics: Metrics, path: Path) -> None:
    rows = [{name: row[name] for name in KEPT if name in row} for row in metrics]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def validations(metrics: Metrics) -> Metrics:
    return [row for row in metrics if ACCURACY in row]


def percent(row: dict[str, Any]) -> str:
    return f"{100 * row[ACCURACY]:.1f} % ± {100 * row['validation/ci95']:.1f}"


def interval(values: list[float]) -> str:
    """The mean over seeds with its 95 % interval by Student's t, where there are two to four seeds."""
    factor = {2: 12.71, 3: 4.30, 4: 3.18}.get(len(values))
    spread = f" ± {factor * statistics.stdev(values) / math.sqrt(len(values)):.1f}" if factor else ""
    return f"{statistics.mean(values):+.1f}{spread}"


def draw(curves: dict[int, Metrics], path: Path) -> None:
    """Draws the test accuracy of every seed with its intervals, and the smoothed training rewards."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for seed, metrics in curves.items():
        steps, rewards = points(metrics, "reward/mean")
        axes.plot(steps, smooth(rewards), color=TRAIN, alpha=0.6, label=None if seed else "training reward, smoothed")
    for seed, metrics in curves.items():
        steps, accuracies = points(metrics, ACCURACY)
        axes.errorbar(
            [step + 3 * seed for step in steps],  # side by side, so that intervals can be told apart
            accuracies,
            yerr=points(metrics, "validation/ci95")[1],
            color=VALIDATION,
            alpha=0.5 + 0.25 * seed,
            marker="os^"[seed % 3],
            capsize=3,
            label=f"test set, seed {seed}",
        )
    axes.set_title("GSM8K, SmolLM2-135M-Instruct: GRPO after SFT", loc="left", fontsize=13, fontweight="bold")
    axes.set_xlabel("step of GRPO", color=QUIET)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
