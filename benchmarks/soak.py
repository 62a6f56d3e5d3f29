"""A run that goes on for hours: what its processes hold, and whether that grows.

    python benchmarks/soak.py              # two hours
    python benchmarks/soak.py --smoke      # two minutes, to see whether it works

A tiny model is trained with Ray, rollout and trainer apart, with environments, trajectories, checkpoints and
validation; its reward waits, so that it needs little of the machine. Every half minute all processes of the run are
looked at: memory that is their own, open files, threads, and what lies in shared memory and in the run's temporary
folder. Growth is that of the mean of the last quarter over the mean of the second: the first is warming up. A second
table has the growth of each process.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, temporary_folder
from runs import VALIDATION, write_recipe
from tiny import save_tiny_model

from corral.bench.comparison import BenchmarkReport
from corral.cluster.faults import own_processes
from corral.cluster.node_processes import NodeProcess
from corral.cluster.stacks import MARKS
from corral.observe.run_files import read_metrics

INTERVAL_S = 30.0
MAX_GROWTH = 0.1
"""Of memory; files, threads and processes may not grow by a whole one."""
OVERRIDES = (
    "cluster.devices_per_node=2",
    "cluster.placement={rollout: [0], actor: [1]}",
    "cluster.start_timeout_s=300",
    "schedule.max_staleness=1",
    "schedule.steps=1000000",
    "optimizer.learning_rate=0.0001",
    "checkpoint.every=20",
    "checkpoint.keep=2",
    "validation.every=10",
    "logging.trajectories=true",
    *VALIDATION,
)
UNITS = {"memory": "MB", "shared memory": "MB", "temporary files": "", "open files": "", "threads": "", "processes": ""}


def main() -> None:
    options = parse_options()
    report = BenchmarkReport("soak", "A run that goes on for hours", options.results, ["ray"])
    with temporary_folder() as name:
        samples, steps = soak(Path(name), options.hours * 3600)
    each = [sample.pop("each") for sample in samples]
    growth = {key: growth_of([sample[key] for sample in samples]) for key in UNITS}
    rows = [
        [key, *(f"{value:,.0f} {unit}".strip() for value in growth[key][:2]), f"{growth[key][2]:+.1%}"]
        for key, unit in UNITS.items()
    ]
    heading = f"{options.hours:g} h, {steps} steps"
    quarters = ["second quarter", "last quarter"]
    report.add("soak", heading, ["", *quarters, "growth"], rows, {"samples": samples, "steps": steps})
    columns = ["", *(f"MB, {quarter}" for quarter in quarters), "MB an hour"]
    columns += [f"threads, {quarter}" for quarter in quarters]
    rows = rows_of_processes(each, options.hours)
    report.add("each process", "memory and threads", columns, rows, {"columns": columns, "rows": rows})
    print(f"wrote {report.path}.json and .md")
    grown = [key for key in ("memory", "shared memory") if growth[key][2] > MAX_GROWTH]
    grown += [key for key in list(UNITS)[2:] if growth[key][1] - growth[key][0] >= 1]
    sys.exit(f"grows: {', '.join(grown)}" if grown else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.smoke:
        options.hours = 2 / 60
    return options


def soak(folder: Path, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Trains for so long. Returns what was seen every half minute since the first step, and the number of steps."""
    save_tiny_model(folder / "model")
    temporary = folder / "temporary"
    temporary.mkdir()
    recipe = write_recipe(folder, folder / "model")
    options = f'{{calls: "{os.devnull}", seconds: 0.2}}'
    reward = f'environment.reward={{name: "{folder}/vowels.py:slowly", workers: 2, options: {options}}}'
    command = [sys.executable, "-m", "corral.cli.main", "train", str(recipe), reward, *OVERRIDES]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    metrics, samples = folder / "runs" / "tiny" / "metrics.jsonl", list[dict[str, Any]]()
    with (folder / "console.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            while not metrics.exists() and child.poll() is None:
                time.sleep(1.0)
            end = time.monotonic() + seconds
            while time.monotonic() < end and child.poll() is None:
                samples.append(look(child.pid, temporary))
                time.sleep(min(INTERVAL_S, seconds / 20))
            if child.poll() is not None:
                sys.exit(f"the run ended:\n{(folder / 'console.log').read_text()[-2000:]}")
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            child.wait(300)
    return samples, max(int(row["step"]) for row in read_metrics(metrics))


def look(controller: int, temporary: Path) -> dict[str, Any]:
    pids = own_processes("tiny", controller, in_cluster=False)
    memory = {pid: private_bytes(pid) / 1e6 for pid in pids}
    threads = {pid: count(Path(f"/proc/{pid}/task")) for pid in pids}
    shared = sum(file.stat().st_size for file in files_of(Path("/dev/shm")) if file.name.startswith("corral"))
    return {
        "memory": sum(memory.values()),
        "shared memory": shared / 1e6,
        "temporary files": float(sum(1 for _ in files_of(temporary))),
        "open files": float(sum(count(Path(f"/proc/{pid}/fd")) for pid in pids)),
        "threads": float(sum(threads.values())),
        "processes": float(len(pids)),
        "each": {f"{name_of(process)} {pid}": [memory[pid], threads[pid]] for pid, process in pids.items()},
    }


def name_of(process: NodeProcess) -> str:
    """Ray's name of a process, or what Python was started with: a module, or the first line of a program."""
    role = next((role for role, mark in MARKS.items() if mark in process.command), None)
    if role is None and process.is_rays:
        return process.name.partition(".")[0]  # behind it is what it does
    return role or " ".join(process.command.split()[1:4])


def rows_of_processes(samples: list[dict[str, Any]], hours: float) -> list[list[str]]:
    """Memory and threads of the processes that were there from the second quarter on, those that grow most first."""
    last, rows = samples[-1], []
    for name in (name for name in last if all(name in sample for sample in samples[len(samples) // 4 :])):
        memory, threads = (growth_of([sample.get(name, last[name])[at] for sample in samples])[:2] for at in (0, 1))
        rows.append((name, *memory, (memory[1] - memory[0]) / (hours / 2), *threads))
    return [
        [name, *(f"{value:,.1f}" for value in values)] for name, *values in sorted(rows, key=lambda row: -float(row[3]))
    ]


def private_bytes(pid: int) -> int:
    """Resident memory that is no file's: what a process has allocated."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def count(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def files_of(folder: Path) -> Iterable[Path]:
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def growth_of(values: list[float]) -> Any:
    """Mean of the second quarter, of the last, and how much larger that is."""
    quarters = np.array_split(np.array(values), 4)
    before, after = float(quarters[1].mean()), float(quarters[3].mean())
    return before, after, after / before - 1 if before else 0.0


if __name__ == "__main__":
    main()
