"""Trains a recipe while faults hit it at random moments, and audits what became of it: `corral chaos`.

The training is a child process, as `corral train` in a shell would be. One fault after the other (`faults.py`) hits
it. The next one waits until what was lost is there again and the run has made another step; some do not even wait for
that. A run that ended is started again. At the end ledger, metrics, console, processes and files say whether anything
was lost, silent or left behind.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from corral.child_process import describe_exit, read_stat, start_child, terminate_group
from corral.cluster.chaos_report import ChaosOptions, ChaosReport, EndRecord, FaultRecord, audit_folder, explain_end
from corral.cluster.faults import (
    CUT_OFF_S,
    KINDS,
    PlannedFault,
    Reach,
    Target,
    limit_files,
    make_schedule,
    own_processes,
    send_signal,
)
from corral.cluster.node_processes import NodeProcess, all_processes
from corral.observe.run_files import write_atomically
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Recipe
from corral.runtime.membership import state_folder
from corral.runtime.presence import present

POLL_S = 0.5
TAIL_BYTES = 1 << 18
"""So much of the end of metrics.jsonl is read to see how far the run is."""
FULL_DISK_S = 20.0
"""Seconds after which a disk has space again, if the run has not noticed that it was full."""
NO_TARGET_S = 200.0
"""Seconds after which a fault is given up for which there is no process."""
LEFTOVERS_S = 150.0
"""Seconds in which everything has to go after the end of a run: Ray's helpers wait a minute for a lost head."""
CACHES = ("torchinductor_", "ray")
"""Beginnings of names in the temporary folder that are caches of libraries, one for all runs."""
KILL_S = 30.0
"""Seconds for a run that is given up to end by itself."""
ENDS_IN_A_ROW = 4
"""So many ends without a step in between, and without a fault, and the run is given up."""
ENDLESS = 1_000_000
TRAIN = (sys.executable, "-m", "corral.cli.main", "train")


class ChaosRun:
    """A run that faults hit. `command`: trains in `folder`, and goes on there when it is called again. `echo`: called
    with each line of the run's console."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        options: ChaosOptions,
        reach: Reach,
        show: Callable[[str], None],
        echo: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.command, self.folder, self.options, self.reach = command, folder, options, reach
        self.show, self.echo = show, echo
        self.report = ChaosReport(options, folder.name)
        self.began = time.monotonic()
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.schedule: list[PlannedFault] | None = None
        """Faults to come; None: it is not known yet which ones are possible."""
        self.pending: list[FaultRecord] = []
        self.free_since = self.last_fault_at = self.full_since = 0.0
        self.step = self.highest = self.idle_ends = 0
        self.is_interrupted = False
        self.seen: dict[int, int] = {}
        """Processes of the run so far, with their start times."""
        self.ray_folders: set[str] = set()
        """Folders of the Rays that the run has started."""
        self.usual: set[str] = set()
        """Lines of the console before the first fault."""
        self.lines: list[tuple[float, str]] = []
        """Lines of the console since the last start."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.log = (folder / "logs" / "chaos.log").open("w", buffering=1)

    def now(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> ChaosReport:
        """Hits the run with all faults, ends it, and audits it. Ctrl-C or SIGTERM: no more faults; twice: at once."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        self._start()
        try:
            while not self._is_over():
                self._go_on()
            self._stop()
        finally:
            self._kill_all()
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
        self._audit()
        self.report.duration_s = self.now()
        return self.report

    def _on_signal(self, *_: object) -> None:
        if self.is_interrupted or self.schedule is None:
            raise KeyboardInterrupt
        self.is_interrupted = True

    def _go_on(self) -> None:
        time.sleep(POLL_S)
        self._look()
        if self.child.poll() is not None:
            self._note_end()
            self._start()
        self._note_recoveries()
        self._inject_if_due()

    def _is_over(self) -> bool:
        late = self.pending and self.now() - self.pending[0].at_s > self.options.recover_timeout_s
        return bool(late) or self.idle_ends >= ENDS_IN_A_ROW or (self.schedule == [] and not self.pending)

    def _start(self) -> None:
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        self.child = start_child(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            death_signal=signal.SIGTERM,
        )
        self.lines = [(self.now(), "")]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self._note(f"started, pid {self.child.pid}")

    def _read(self) -> None:
        assert self.child.stdout is not None
        lines = self.lines
        for line in self.child.stdout:
            lines.append((self.now(), line.decode(errors="replace").rstrip()))
            self.log.write(f"{lines[-1][0]:8.1f}  {lines[-1][1]}\n")
            self.echo(lines[-1][1])

    def _note(self, text: str) -> None:
        self.log.write(f"{self.now():8.1f}  == {text}\n")

    def _look(self) -> None:
        """Notes how far the run is, how long it has been silent, and which processes it has."""
        silence_s = self.now() - self.lines[-1][0]
        if silence_s > self.report.silence_s:
            self.report.silence_s, self.report.silence_at_s = silence_s, self.now()
        self.step = last_step(self.folder / "metrics.jsonl")
        if self.step > self.highest:
            self.highest, self.idle_ends = self.step, 0
        for process in self._processes():
            if process.pid not in self.seen and (stat := read_stat(process.pid)) is not None:
                self.seen[process.pid] = stat.started
                self.ray_folders |= set(re.findall(rf"{state_folder()}/run-\w+", process.command))
        for fault in self.pending:
            if fault.noticed_s is None and (times := [at for at, _ in self._complaints(fault.at_s)]):
                fault.noticed_s = times[0] - fault.at_s
        is_noticed = any(fault.kind == "full-disk" and fault.noticed_s is not None for fault in self.pending)
        if self.full_since and (is_noticed or self.now() - self.full_since > FULL_DISK_S):
            limit_files(self._processes(), -1)
            self.full_since = 0.0

    def _complaints(self, since: float) -> list[tuple[float, str]]:
        """Warnings and errors on the console, other than those that every start prints."""
        new = ((at, line) for at, line in self.lines if at >= since and line not in self.usual)
        return [(at, line) for at, line in new if line.startswith(("warning: ", "error: "))]

    def _processes(self) -> list[NodeProcess]:
        return list(own_processes(self.folder.name, self.child.pid, self.reach.in_cluster).values())

    def _note_end(self) -> None:
        self.reader.join(10.0)
        code, text = self.child.returncode, [line for _, line in self.lines]
        hits = [one for one in self.pending if one.pid == self.child.pid and KINDS[one.kind].signal == -code]
        explanation = f"ended by fault {hits[0].number}" if hits else explain_end(code, text)
        self.report.ends.append(EndRecord(self.now(), code, explanation))
        self._note(f"ended: {explanation or describe_exit(code)}")
        if any("Traceback (most recent call last)" in line for line in text):
            self.report.problems.append(f"a traceback on the console, before {self.now():.0f} s")
        if explanation is None:
            self.report.problems.append(f"an end at {self.now():.0f} s that nothing explains: it {describe_exit(code)}")
        if self.schedule is None:
            raise RunError(f"the run ended before its first step: {explanation or describe_exit(code)}")
        for fault in self.pending:
            fault.noticed_s = self.now() - fault.at_s if fault.noticed_s is None else fault.noticed_s
            fault.outcome = "started again"
        self.idle_ends += 1

    def _note_recoveries(self) -> None:
        if self.schedule is None and self.step >= self.options.after_step:
            self._make_schedule()
        if not self.pending or self.step <= min(fault.step for fault in self.pending) or self._is_ending():
            return
        names = {(one.name, one.pid) for one in self.reach.find(self.folder.name, self.child.pid)}
        for fault in list(self.pending):
            if KINDS[fault.kind].signal is None:  # a node does not come back, but the shell that cuts it off ends
                is_back = not self.full_since if fault.kind == "full-disk" else self.now() - fault.at_s > CUT_OFF_S + 1
            else:
                is_back = any(name == fault.target and pid != fault.pid for name, pid in names)
            if is_back and not fault.is_back:
                fault.is_back, fault.step = True, self.highest
            elif fault.is_back and self.step > fault.step:
                self._note_recovery(fault)

    def _is_ending(self) -> bool:
        """An error is a run's last word, unless it has started its workers again since."""
        lines = [line for _, line in self._complaints(0.0)]
        restarts = [number for number, line in enumerate(lines) if "the workers are started again" in line]
        return any(line.startswith("error: ") for line in lines[max(restarts, default=0) :])

    def _note_recovery(self, fault: FaultRecord) -> None:
        fault.recovered_s = self.now() - fault.at_s
        text = " ".join(line for at, line in self.lines if at >= fault.at_s)
        if fault.outcome != "started again":
            fault.outcome = "workers started again" if "started again, and" in text else "went on"
        self.pending.remove(fault)
        self.free_since = self.now()
        self._note(f"recovered from fault {fault.number} in {fault.recovered_s:.1f} s")

    def _make_schedule(self) -> None:
        found = {one.kind for one in self.reach.find(self.folder.name, self.child.pid)}
        kinds = [kind for kind in self.options.kinds if KINDS[kind].target in found]
        self.report.impossible = [
            f"{kind}: this run has no process of that kind here" for kind in self.options.kinds if kind not in kinds
        ]
        if not kinds:
            raise UserError(f"none of {', '.join(self.options.kinds)} is possible: this run has no such process here")
        self.schedule = make_schedule(self.options.num_faults, self.options.seed, kinds, self.options.interval_s)
        self.free_since, self.usual = self.now(), {line for _, line in self.lines}

    def _inject_if_due(self) -> None:
        if self.schedule and self.is_interrupted:
            self.report.impossible.append(f"{len(self.schedule)} faults, after a signal to stop")
            self.schedule = []
        if not self.schedule or (self.pending and not self.schedule[0].during_recovery):
            return
        planned = self.schedule[0]
        since = self.last_fault_at if self.pending else self.free_since
        if self.now() < since + planned.delay_s:
            return
        kind = KINDS[planned.kind]
        found = [one for one in self.reach.find(self.folder.name, self.child.pid) if one.kind == kind.target]
        if found:
            self.schedule.pop(0)
            self._inject(planned.kind, sorted(found, key=lambda one: (one.node, one.name, one.pid)), planned.choice)
        elif self.now() > since + planned.delay_s + NO_TARGET_S:
            self.schedule.pop(0)
            self.report.impossible.append(f"a {planned.kind}: no such process for {NO_TARGET_S:g} s")

    def _inject(self, kind: str, targets: Sequence[Target], choice: float) -> None:
        target, number = targets[int(choice * len(targets))], len(self.report.faults) + 1
        fault = FaultRecord(number, kind, target.name, target.pid, self.now(), self.highest)
        self._note(f"fault {number}: {kind}, {target.name}, pid {target.pid}")
        self.show(f"fault {number} of {self.options.num_faults} after step {self.step}: {kind}, {target.name}")
        self.report.faults.append(fault)
        self.pending.append(fault)
        self.last_fault_at, self.idle_ends = fault.at_s, 0
        deadly = KINDS[kind].signal
        if kind == "cut-off-node":
            self.reach.cut_off(target)
        elif deadly is None:
            self.full_since = self.now()
            limit_files(self._processes(), 0)
        else:
            self.reach.signal(target, deadly)

    def _stop(self) -> None:
        """Ends the run as Ctrl-C would."""
        if self.child.poll() is None and not self.pending:
            send_signal(self.child.pid, signal.SIGTERM)
            deadline = self.now() + self.options.recover_timeout_s
            while self.child.poll() is None and self.now() < deadline:
                time.sleep(POLL_S)
                self._look()
        if self.child.poll() is not None:
            self._note_end()

    def _kill_all(self) -> None:
        """After an end of its own nothing is left of the child."""
        if self.child.poll() is None:
            self.report.problems.append("the run did not end, and was killed")
            terminate_group(self.child, grace_s=KILL_S)

    def _audit(self) -> None:
        report, options = self.report, self.options
        unrecovered = [fault for fault in report.faults if fault.recovered_s is None]
        report.problems += [f"no recovery from fault {one.number}, {one.kind} of {one.target}" for one in unrecovered]
        if left := len(self.schedule or ()):
            report.problems.append(f"{left} faults were not tried any more")
        if report.silence_s > options.max_silence_s:
            report.problems.append(f"the console was silent for {report.silence_s:.0f} s")
        facts, problems = audit_folder(self.folder)
        report.facts += facts
        report.problems += problems
        deadline = self.now() + LEFTOVERS_S
        while (left_behind := self._leftovers()) and self.now() < deadline:
            time.sleep(POLL_S)
        report.problems += [f"left behind: {what}" for what in left_behind]
        if not left_behind:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _leftovers(self) -> list[str]:
        """Processes of the run, which hold its ports too, shared memory, and temporary folders."""
        stats = {pid: read_stat(pid) for pid in self.seen}
        same = {
            pid for pid, stat in stats.items() if stat and stat.started == self.seen[pid] and stat.state not in "ZX"
        }
        table = all_processes()
        processes = [str(table[pid]) for pid in same if pid in table]
        memory = [path for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in self.seen)]
        folders = [path for path in self.temporary.iterdir() if not path.name.startswith(CACHES)]
        folders += [Path(folder) for folder in self.ray_folders if Path(folder).exists()]
        return [*processes, *map(str, [*memory, *folders])]


def last_step(metrics: Path) -> int:
    """The step of the last row of metrics.jsonl; 0 where there is none."""
    with suppress(OSError, ValueError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    return 0


def free_name(runs: Path, name: str) -> str:
    """Returns the name, or the first one with a number behind it, that no run has or had."""
    used = {one.run for one in present()}
    names = (f"{name}{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    return next(name for name in names if name not in used and not (runs / name).exists())


def running_cluster(recipe: Recipe) -> str | None:
    """Address of the Ray cluster that runs already, and that the recipe would use."""
    from corral.runtime.connection import find_cluster

    if not runs_on_ray(recipe) or recipe.cluster.is_here:
        return None
    return find_cluster(None if recipe.cluster.address == "auto" else recipe.cluster.address)


def chaos(
    recipe: Path, overrides: Sequence[str], options: ChaosOptions, show: Callable[[str], None], file: Path | None = None
) -> ChaosReport:
    """Trains the recipe in a run folder of its own, and returns what became of it. `file`: the report as JSON, if not
    `chaos.json` in that folder."""
    from corral.cluster.gcs import attached
    from corral.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    runs, name = loaded.logging.folder, free_name(loaded.logging.folder, f"{loaded.name}-chaos")
    own = [f"name={name}", "checkpoint.resume=auto", f"schedule.steps={ENDLESS}"]
    if (cluster := running_cluster(loaded)) is not None:
        own.append(f"cluster.address={cluster}")  # the child has a temporary folder of its own, where Ray would look
    command = [*TRAIN, str(recipe), *overrides, *own]
    with nullcontext() if cluster is None else attached(cluster):
        report = ChaosRun(command, runs / name, options, Reach(cluster is not None), show).run()
    write_atomically(file or runs / name / "chaos.json", json.dumps(report.as_dict(), indent=2) + "\n")
    return report
