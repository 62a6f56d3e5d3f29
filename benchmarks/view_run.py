"""`corral view` on a large run: seconds until the list, a run, a step and a trajectory are answered, and memory.

    python benchmarks/view_run.py            # 1,000 steps of 1,024 trajectories of 1,000 tokens
    python benchmarks/view_run.py --smoke    # a small run, to see whether it works

The run is synthetic and written by the parts that a run writes with. One file of trajectories is written; those of the
other steps are hard links to it, so it fits on any disk, and what is measured is the server and not the disk: the
files are in the page cache. The server is a process of its own; CPU seconds are those that it used for the answer,
which other load on the machine changes less than the time on the clock.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
from common import RESULTS, temporary_folder

from corral.bench.comparison import BenchmarkReport
from corral.observe.ledger import Ledger
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter

TARGETS = {"list": 0.5, "run": 1.0, "step": 1.0, "trajectory": 0.3}
"""Seconds."""
MAX_MEMORY = 500e6
GROUP = 8
NUM_METRICS = 45
REPEATS = 7


def main() -> None:
    options = parse_options()
    report = BenchmarkReport("view_run", "`corral view` on a large run", options.results, ["pyarrow", "fastapi"])
    with temporary_folder() as name:
        sizes = write_run(Path(name) / "large", options)
        with served(Path(name)) as server:
            answers = measure(server, options)
            memory = server.peak_memory()
    add(report, options, sizes, answers, memory)
    print(f"wrote {report.path}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--trajectories", type=int, default=1024, help="of each step")
    parser.add_argument("--tokens", type=int, default=1000, help="of each trajectory")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.trajectories, options.tokens = 20, 16, 50
    return options


def write_run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    num_prompts = options.trajectories // GROUP
    with RunFolder(path) as run:
        run.write_recipe(f"name: large\nalgorithm: {{name: grpo}}\nschedule: {{steps: {options.steps}}}\n")
        metrics, ledger = MetricsFile(run.metrics), Ledger(run.ledger)
        for step in range(1, options.steps + 1):
            prompts = list(range((step - 1) * num_prompts, step * num_prompts))
            ledger.issue(step, prompts)
            ledger.generated(step, prompts)
            ledger.trained(step, prompts)
            numbers = {f"metric/{i}": float(value) for i, value in enumerate(rng.random(NUM_METRICS))}
            metrics.log(step, {"reward/mean": float(rng.random()), "time/step_s": 3.0, **numbers})
        records = (record(rng, index, options.tokens) for index in range(options.trajectories))
        first = TrajectoryWriter(run.trajectories).write(1, records)
        for step in range(2, options.steps + 1):
            os.link(first, run.trajectories / f"step_{step:06d}.parquet")
        sizes = {"step": first.stat().st_size, "metrics": run.metrics.stat().st_size}
        return {**sizes, "ledger": run.ledger.stat().st_size}


def record(rng: np.random.Generator, index: int, num_tokens: int) -> dict[str, Any]:
    """A trajectory of random tokens, a fifth of which are the prompt."""
    num_prompt = num_tokens // 5
    num_response = num_tokens - num_prompt
    letters = rng.integers(97, 123, 4 * num_tokens).astype(np.uint8).tobytes().decode()
    names = ("logprobs", "advantages", "entropies")
    floats = {name: rng.normal(size=num_response).astype(np.float32) for name in names}
    return {
        "prompt_id": index // GROUP,
        "sample": index % GROUP,
        "row": index // GROUP,
        "tag": "",
        "reward": float(rng.random()),
        "rewards": {},
        "metrics": {},
        "stop": "length",
        "parent": None if index % GROUP == 0 else index - 1,
        "num_shared": num_prompt,
        "turn_rewards": [1.0],
        "turn_starts": [0],
        "turn_ends": [num_response],
        "prompt": letters[: 4 * num_prompt],
        "response": letters[4 * num_prompt :],
        "prompt_tokens": rng.integers(0, 50_000, num_prompt),
        "prompt_chars": np.full(num_prompt, 4),
        "response_tokens": rng.integers(0, 50_000, num_response),
        "response_chars": np.full(num_response, 4),
        "generated": np.ones(num_response, np.int8),
        "versions": np.zeros(num_response, np.int32),
        **floats,
    }


@dataclass
class ViewServer:
    url: str
    pid: int

    def ask(self, path: str) -> dict[str, float]:
        """Seconds, CPU seconds and bytes of an answer."""
        cpu, start = self.cpu_s(), time.perf_counter()
        with urlopen(f"{self.url}/api/{path}", timeout=120) as answer:
            size = len(answer.read())
        return {"seconds": time.perf_counter() - start, "cpu_s": self.cpu_s() - cpu, "bytes": size}

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_memory(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return 1024 * int(found[1])


@contextmanager
def served(folder: Path) -> Iterator[ViewServer]:
    command = [sys.executable, "-m", "corral.cli.main", "view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        yield ViewServer(url, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


def measure(server: ViewServer, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Answers of each kind; the first of each is the first that the server gives. Steps and trajectories are others
    each time."""
    steps = [1 + i * (options.steps - 1) // REPEATS for i in range(REPEATS)]
    indices = [i * (options.trajectories - 1) // REPEATS for i in range(REPEATS)]
    return {
        "list": [server.ask("runs.json") for _ in range(REPEATS)],
        "run": [server.ask("run/large/run.json") for _ in range(REPEATS)],
        "step": [server.ask(f"run/large/step/{step}.json") for step in steps],
        "trajectory": [
            server.ask(f"run/large/step/{step}/{index}.json") for step, index in zip(steps, indices, strict=True)
        ],
    }


def add(
    report: BenchmarkReport,
    options: argparse.Namespace,
    sizes: dict[str, Any],
    answers: dict[str, list[dict[str, float]]],
    memory: int,
) -> None:
    rows = []
    for kind, own in answers.items():
        later = [median(one[name] for one in own[1:]) for name in ("seconds", "cpu_s")]
        cells = [f"{value:.3f}" for value in (own[0]["seconds"], own[0]["cpu_s"], *later)]
        rows.append([kind, *cells, f"{TARGETS[kind]:g}", f"{own[0]['bytes'] / 1e6:.2f}"])
    heading = (
        f"{options.steps:,} steps of {options.trajectories:,} trajectories of {options.tokens:,} tokens "
        f"({sizes['step'] / 1e6:.0f} MB a step), server {memory / 1e6:.0f} MB of at most {MAX_MEMORY / 1e6:.0f}"
    )
    columns = ["page", "first s", "first CPU s", "later s", "later CPU s", "target s", "MB"]
    numbers = {"steps": options.steps, "trajectories": options.trajectories, "tokens": options.tokens}
    report.add("view", heading, columns, rows, {**numbers, "sizes": sizes, "answers": answers, "peak_memory": memory})


if __name__ == "__main__":
    main()
