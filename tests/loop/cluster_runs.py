"""`corral train` on hosts of a lab, watched from outside."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from deadlines import within
from hosts import CORRAL, Lab
from runs import num_steps, write_recipe

from corral.observe.ledger import Ledger, LedgerAudit

NODES = ("cluster.nodes=2", "cluster.devices_per_node=2")
APART = (*NODES, "cluster.placement={rollout: 0-1, actor: 2-3}")
"""Rollout on the first host, training on the second."""
ONE_ROLLOUT_WORKER = (*NODES, "cluster.placement={rollout: 0, actor: 2}")
"""The same, where one of each is enough."""
LIMIT_S = 180.0


class ClusterRun:
    """A run that the first host controls."""

    def __init__(self, lab: Lab, folder: Path, model: Path, name: str, *overrides: str) -> None:
        self.lab, self.path = lab, folder / "runs" / name
        recipe = write_recipe(folder, model)
        self.output = ""
        """Known once it has ended."""
        self.before = len(lab.errors.read_text())
        self.process: subprocess.Popen[str] = lab.begin(
            0, [*CORRAL, "train", str(recipe), f"name={name}", *overrides], OMP_NUM_THREADS="1"
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + within(LIMIT_S)
        while not condition():
            assert self.process.poll() is None, self.wait()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait(self) -> str:
        """What it output."""
        output, _ = self.process.communicate(timeout=within(LIMIT_S))
        self.output = output + self.lab.errors.read_text()[self.before :]
        return self.output

    def finish(self) -> str:
        """What it output until its good end."""
        output = self.wait()
        assert self.code == 0, output
        return output

    @property
    def code(self) -> int | None:
        return self.process.returncode

    @property
    def num_steps(self) -> int:
        return num_steps(self.path)

    def kill_workers(self, host: int, number: int = 1) -> None:
        """As the kernel does when memory runs out."""
        found = self.lab.run(host, ["pgrep", "-f", "^ray::DeviceProcess"]).stdout.split()
        self.lab.run(host, ["kill", "-9", *found[-number:]])

    def audit(self) -> LedgerAudit:
        return Ledger(self.path / "ledger.jsonl").audit()
