"""`corral chaos` in which controller and workers are forks of this process, not new interpreters and Ray's actors.

    python tests/chaos_in_forks.py --mode stale --faults 200 --seed 1 --report stale.json

A start takes a second then, so hundreds of faults fit into the time of a dozen. The loop, its recovery, rewards, files
and the audit are those of a run; how Ray loses and finds processes is not seen here, and no worker hangs, since
heartbeats are Ray's, too (`forked_runtime.py`). With `--ray` all of Ray is there, and only what its workers import
is not imported again (`forked_pythons.py`): a start takes about ten seconds.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent / "loop"))

import command_preload  # noqa: F401
import forked_pythons
from deadlines import within
from runs import write_recipe
from tiny import save_tiny_model

import corral.loop.train
from corral.child_process import die_with_parent, read_stat
from corral.cli.main import main as run_corral
from corral.cluster.chaos import ENDLESS, ChaosRun
from corral.cluster.chaos_report import ChaosOptions
from corral.cluster.faults import Reach
from corral.runtime.presence import Presence, processes_folder

CLUSTER = ("cluster.max_restarts=1000000", "cluster.devices_per_node=3")
APART = (*CLUSTER, "cluster.placement={rollout: 0-1, actor: 2}")
MODES = {
    "one process": (),
    "colocated": (*CLUSTER, "batch.prompts_per_step=3"),
    "apart": APART,
    "pipelined": (*APART, "schedule.pipelined=true"),
    "stale": (*APART, "schedule.max_staleness=2"),
    "replicas": (*CLUSTER, "cluster.placement={rollout: 0, actor: 1-2}", "train.parallel.replicate=2"),
}
EVERY = (
    "checkpoint.every=3",
    "checkpoint.resume=auto",
    "optimizer.learning_rate=0.0001",
    f"schedule.steps={ENDLESS}",
    "train.threads=1",
)
KINDS = ("kill-worker", "kill-reward", "kill-controller", "stop-controller", "full-disk")
ON_RAY = (*KINDS, "hang-worker", "kill-agent", "kill-raylet", "kill-gcs")
TIMEOUTS = ("cluster.worker_timeout_s=8", "cluster.node_timeout_s=8")


class Fork:
    """A child, as far as `ChaosRun` uses `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout, self.returncode = pid, stdout, None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)


class ForkedChaos(ChaosRun):
    workers: socket.socket | None = None
    """With it, workers are Ray's, and forked by a process that listens to it."""

    def _start(self) -> None:
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent()
            for descriptor in (1, 2):
                os.dup2(writable, descriptor)
            os.environ["TMPDIR"], tempfile.tempdir = str(self.temporary), None
            train_in_fork(list(self.command), self.workers)
        os.close(writable)
        self.child: Any = Fork(pid, os.fdopen(readable, "rb"))
        self.lines = [(self.now(), "")]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self._note(f"started, pid {pid}")


def train_in_fork(arguments: list[str], workers: socket.socket | None) -> None:
    """`corral train` with forked workers; does not return."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["corral", "train", *arguments]
    if workers is not None:
        if os.fork() == 0:
            die_with_parent()
            forked_pythons.serve(workers)
        workers.close()
        sys.path.append(forked_pythons.RAY_PYTHON)
    code = 0
    try:
        run_corral()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_workers() -> None:
    """Workers are forks without Ray, and can be found as those of Ray. Not imported with Ray, which reads its token
    when it is imported."""
    import forked_runtime

    class NamedRuntime(forked_runtime.ForkedRuntime):
        def _fork(self, number: int) -> Any:
            process = super()._fork(number)
            stat = read_stat(process.pid)
            roles = self._set_of(number).roles
            presence = Presence(process.pid, stat.started if stat else 0, "worker", self.recipe.name, number, roles)
            processes_folder().mkdir(exist_ok=True)
            (processes_folder() / f"{process.pid}.json").write_text(json.dumps(asdict(presence)))
            return process

    forked_runtime.ForkedRuntime = NamedRuntime  # type: ignore[misc]
    corral.loop.train.open_runtime = lambda *given, debugging=None: forked_runtime.open_forks(*given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--kinds")
    parser.add_argument("--interval", type=float, default=0.5)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    if options.ray and not MODES[options.mode]:
        parser.error("a run of one process has no Ray")
    with tempfile.TemporaryDirectory(prefix="chaos-runs-") as name:
        folder = Path(name)
        save_tiny_model(folder / "model")
        (folder / "fault.json").write_text("[]")
        recipe = write_recipe(folder, folder / "model")
        run = f"{options.mode.replace(' ', '-')}-{options.seed}"
        command = [str(recipe), f"name={run}", "environment.reward.workers=2", *EVERY, *MODES[options.mode]]
        kinds = tuple(options.kinds.split(",")) if options.kinds else ON_RAY if options.ray else KINDS
        chosen = ChaosOptions(options.faults, options.seed, kinds, options.interval, within(300), within(60))
        chaos = ForkedChaos(command, folder / "runs" / run, chosen, Reach(False), lambda _: None)
        if options.ray:
            chaos.command, chaos.workers = [*command, *TIMEOUTS], forked_pythons.prepare()
        elif MODES[options.mode]:
            fork_workers()
        report = chaos.run()
        log = (folder / "runs" / run / "logs" / "chaos.log").read_text()
    options.report.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if report.problems:
        options.report.with_suffix(".log").write_text(log)
    print(report.text())
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
