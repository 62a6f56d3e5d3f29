"""The quickstart with each engine, one after the other: what they learn, how far their log-probs are from those of the
trainers, and where the time goes.

    python benchmarks/engines.py [--engines native,vllm,sglang] [--steps 30] [--results FOLDER] [KEY=VALUE ...]

`--vllm-python` and `--sglang-python` name the interpreter of an environment that has the engine. More overrides of the
recipe follow: `cluster.devices_per_node=2` trains on two Ray workers.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, temporary_folder

from corral.bench.comparison import BenchmarkReport, format_table
from corral.observe.run_files import read_metrics

CORRAL = [sys.executable, "-c", "from corral.cli.main import main; main()"]
MEANS = {
    "mismatch KL": "policy/mismatch_kl",
    "probe": "transfer/probe_deviation",
    "rollout s": "time/rollout_s",
    "transfer s": "time/transfer_s",
    "step s": "time/step_s",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="native,vllm,sglang")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--results", type=Path, default=RESULTS)
    for engine in ("vllm", "sglang"):
        parser.add_argument(f"--{engine}-python")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    report = BenchmarkReport("engines", "The quickstart with each engine", options.results, ["vllm", "sglang"])
    columns, rows, measured = list[str](), list[list[str]](), dict[str, Any]()
    with temporary_folder() as folder:
        for engine in options.engines.split(","):
            python = getattr(options, f"{engine}_python", None)
            chosen = {"name": engine, **({"python": python} if python else {})}
            measured[engine] = train(Path(folder), engine, chosen, options.steps, options.overrides)
            row = row_of(engine, measured[engine])
            columns = list(row)
            rows.append(list(row.values()))
            print(format_table([columns, *rows]), flush=True)
    changes = " ".join(options.overrides)
    report.add("quickstart", f"{options.steps} steps {changes}".strip(), columns, rows, measured)


def train(folder: Path, name: str, engine: dict[str, str], steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    command = [
        *CORRAL,
        "train",
        str(HERE.parent / "recipes" / "quickstart.yaml"),
        f"name={name}",
        f"logging.runs={folder}",
        f"schedule.steps={steps}",
        f"rollout.engine={json.dumps(engine)}",
        *overrides,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return read_metrics(folder / name / "metrics.jsonl")


def row_of(engine: str, metrics: list[dict[str, Any]]) -> dict[str, str]:
    scores = [row["validation/mean@1"] for row in metrics if "validation/mean@1" in row]
    steps = [row for row in metrics if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    row = {
        "engine": engine,
        "held out": f"{100 * scores[0]:.1f} -> {100 * scores[-1]:.1f} %",
        "reward, last 5 steps": f"{statistics.mean(rewards[-5:]):.3f}",
        "largest mismatch": f"{max(row.get('policy/mismatch_max', 0.0) for row in steps):.2g}",
    }
    for title, name in MEANS.items():
        values = [row[name] for row in steps[1:] if name in row]
        row[title] = f"{statistics.mean(values):.2g}" if values else ""
    return row


if __name__ == "__main__":
    main()
