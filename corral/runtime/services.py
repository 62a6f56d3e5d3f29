"""Programs that run beside the workers of a node as long as the run does, such as a retriever (`cluster.services`).

One thread for each: it starts the program, watches it, and starts it again when it has died. The program's output goes
to a log of its own. The program is ended with the thread's process, however that ends.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from corral.child_process import describe_exit, last_lines, read_stat, signal_group, start_child, terminate_group
from corral.recipe.schema import Service

POLL_EVERY_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pause before a program that died is started again: doubled each time, until one has been ready."""
END_WITHIN_S = 3.0
"""Seconds from SIGTERM to SIGKILL; and for an earlier owner of the port to release it."""
HEALTH_TIMEOUT_S = 2.0
LAST_LINES = 3


def command_of(service: Service) -> list[str]:
    if service.retriever is not None:
        index = str(Path(service.retriever).expanduser())
        return [sys.executable, "-m", "corral.cli.main", "retriever", "serve", index, "--port", str(service.port)]
    return service.command


class Services:
    """All services of a node, started at once. `folder`: their working directory; None: that of this process.
    `accelerators`: names of the GPUs that the services of this node have together, for each as many as it claims.
    `records`: folder in which a process that takes the place of this one finds what this one had started."""

    def __init__(
        self,
        services: Mapping[str, Service],
        logs: Path,
        folder: Path | None = None,
        accelerators: Sequence[str] = (),
        records: Path | None = None,
    ) -> None:
        left = iter(accelerators)
        self.all = []
        for name, service in services.items():
            own = ",".join(islice(left, service.devices))
            # One that claims none sees none: those of the others are theirs.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": own} if accelerators else None
            self.all.append(RunningService(name, service, logs, folder, environment, records))

    def wait(self) -> list[str]:
        """Wait until they are ready; returns what is wrong with those that are not in time, or cannot be."""
        return [problem for service in self.all if (problem := service.wait()) is not None]

    def close(self) -> None:
        for service in self.all:
            service.stopping.set()
        for service in self.all:
            service.thread.join(END_WITHIN_S + 2)


class RunningService:
    def __init__(
        self,
        name: str,
        service: Service,
        logs: Path,
        folder: Path | None,
        environment: Mapping[str, str] | None,
        records: Path | None,
    ) -> None:
        """`environment`: its variables; None: those of this process."""
        self.name, self.service, self.folder, self.environment = name, service, folder, environment
        self.record = None if records is None else records / f"service-{name}.pid"
        self.log = logs / f"service-{name}.log"
        self.url = f"http://127.0.0.1:{service.port}{service.health}"
        self.deadline = time.monotonic() + service.start_timeout_s
        self.ready, self.stopping = threading.Event(), threading.Event()
        self.problem: str | None = None
        self.thread = threading.Thread(target=self._supervise, name=f"service {name}", daemon=True)
        self.thread.start()

    def wait(self) -> str | None:
        while not self.ready.wait(POLL_EVERY_S):
            if self.problem is not None:
                return self.problem
            if time.monotonic() > self.deadline:
                return (
                    f"`cluster.services.{self.name}` was not ready at {self.url} within "
                    f"{self.service.start_timeout_s:g} s (`start_timeout_s`){self._end_of_log()}"
                )
        return None

    def _supervise(self) -> None:
        """The thread's loop: start the program, wait for its end, start it again. Unblocked by `stopping`."""
        deadline = time.monotonic() + END_WITHIN_S
        while self._health() is not None and time.monotonic() < deadline:
            self.stopping.wait(POLL_EVERY_S)
        self._end_earlier()
        if self._health() is not None:
            self.problem = (
                f"`cluster.services.{self.name}`: something else answers at {self.url} already; end it, choose another "
                "port, or leave the service out of the recipe"
            )
            return
        pause_s, num_starts = FIRST_PAUSE_S, 0
        while not self.stopping.is_set():
            num_starts += 1
            try:
                process = self._start()
            except OSError as error:
                self.problem = f"`cluster.services.{self.name}` could not be started: {error}"
                if not self.ready.is_set():
                    return
                with suppress(OSError), self.log.open("a") as log:
                    print(self.problem, file=log)
                self.stopping.wait(LONGEST_PAUSE_S)  # the node may have memory and disk for it then
                continue
            was_ready = self._watch(process)
            code = terminate_group(process, END_WITHIN_S if process.returncode is None else 0)
            if not self.ready.is_set() and num_starts > 1 and not self.stopping.is_set():
                self.problem = f"`cluster.services.{self.name}` {describe_exit(code)}{self._end_of_log()}"
                return
            pause_s = FIRST_PAUSE_S if was_ready else min(2 * pause_s, LONGEST_PAUSE_S)
            self.stopping.wait(pause_s)

    def _end_earlier(self) -> None:
        """Ends what is left of a program that was started by a process which died: SIGTERM, which it got then, may not
        be enough, and reaches none of its children."""
        if self.record is None:
            return
        try:
            pid, started = map(int, self.record.read_text().split())
        except (OSError, ValueError):  # there is none, or the disk was full
            return
        stat = read_stat(pid)
        if stat is None or stat.started == started:
            signal_group(pid)
        deadline = time.monotonic() + END_WITHIN_S
        while self._health() is not None and time.monotonic() < deadline:
            self.stopping.wait(POLL_EVERY_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = start_child(
                command_of(self.service),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                death_signal=signal.SIGTERM,
            )
        if self.record is not None and (stat := read_stat(process.pid)) is not None:
            with suppress(OSError):  # a full disk ends no program that runs
                self.record.write_text(f"{process.pid} {stat.started}")
        return process

    def _watch(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until the program ends or is to end; returns whether it was ever ready."""
        was_ready = False
        while process.poll() is None and not self.stopping.wait(POLL_EVERY_S):
            if not was_ready and self._health() == 200:
                was_ready = True
                self.ready.set()
        return was_ready

    def _health(self) -> int | None:
        """The status of the answer to a health check; None: nobody listens there."""
        try:
            no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with no_proxy.open(self.url, timeout=HEALTH_TIMEOUT_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except http.client.HTTPException:
            return 0  # an answer, but not in HTTP
        except OSError:
            return None

    def _end_of_log(self) -> str:
        lines = last_lines(self.log, LAST_LINES)
        return f"; the last lines of {self.log}: {' | '.join(lines)}" if lines else ""
