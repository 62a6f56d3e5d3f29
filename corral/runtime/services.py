"""Programs that run beside the workers of a node as long as the run does, such as a retriever (`cluster.services`).

One thread for each: it starts the program, looks after it, and starts it again when it has died. What the program says
goes to a log of its own. The program is killed with the thread's process, however that ends.
"""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from corral.recipe.schema import Service
from corral.rewards.parent import dying_with_parent

LOOK_EVERY_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a program that died is started again: doubled each time, until one has been ready."""
END_WITHIN_S = 3.0
"""After SIGTERM; and for who had the port before to let go of it."""
ANSWER_S = 2.0
LAST_LINES = 3


def command_of(service: Service) -> list[str]:
    if service.retriever is not None:
        serve = ["-m", "corral.cli.main", "retriever", "serve", service.retriever, "--port", str(service.port)]
        return [sys.executable, *serve]
    return service.command


class Services:
    """Starts all of them at once. `folder`: in which they work; None: as this process does."""

    def __init__(self, services: Mapping[str, Service], logs: Path, folder: Path | None = None) -> None:
        self.all = [RunningService(name, service, logs, folder) for name, service in services.items()]

    def wait(self) -> list[str]:
        """Until they are ready. What is wrong with those that are not in time, or cannot be."""
        return [problem for service in self.all if (problem := service.wait()) is not None]

    def close(self) -> None:
        for service in self.all:
            service.stop()
        for service in self.all:
            service.thread.join(END_WITHIN_S + 2)


class RunningService:
    def __init__(self, name: str, service: Service, logs: Path, folder: Path | None) -> None:
        self.name, self.service, self.folder = name, service, folder
        self.log = logs / f"service-{name}.log"
        self.deadline = time.monotonic() + service.start_timeout_s
        self.ready, self.stopping = threading.Event(), threading.Event()
        self.problem: str | None = None
        self.num_starts = 0
        self.thread = threading.Thread(target=self._live, name=f"service {name}", daemon=True)
        self.thread.start()

    def wait(self) -> str | None:
        while not self.ready.wait(LOOK_EVERY_S):
            if self.problem is not None:
                return self.problem
            if time.monotonic() > self.deadline:
                return (
                    f"`cluster.services.{self.name}` was not ready at {self.url} within "
                    f"{self.service.start_timeout_s:g} s (`start_timeout_s`){self._last_words()}"
                )
        return None

    def stop(self) -> None:
        self.stopping.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}{self.service.health}"

    def _live(self) -> None:
        """Waits for the program's end, looking every `LOOK_EVERY_S`; unblocked by `stop`."""
        deadline = time.monotonic() + END_WITHIN_S
        while self._answers() is not None and time.monotonic() < deadline:
            self.stopping.wait(LOOK_EVERY_S)
        if self._answers() is not None:
            self.problem = (
                f"`cluster.services.{self.name}`: something else answers at {self.url} already; end it, choose another "
                "port, or leave the service out of the recipe"
            )
            return
        pause_s = FIRST_PAUSE_S
        while not self.stopping.is_set():
            try:
                process = self._start()
            except OSError as error:
                self.problem = f"`cluster.services.{self.name}` could not be started: {error}"
                return
            was_ready = self._look_after(process)
            if self.stopping.is_set():
                end(process)
                return
            if not self.ready.is_set() and self.num_starts > 1:
                how = f"ended with exit code {process.returncode}"
                self.problem = f"`cluster.services.{self.name}` {how}{self._last_words()}"
                return
            pause_s = FIRST_PAUSE_S if was_ready else min(2 * pause_s, LONGEST_PAUSE_S)
            self.stopping.wait(pause_s)

    def _start(self) -> "subprocess.Popen[bytes]":
        self.num_starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                dying_with_parent(command_of(self.service), signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is not for it
            )

    def _look_after(self, process: "subprocess.Popen[bytes]") -> bool:
        """Until it ends or is to end; whether it was ever ready."""
        was_ready = False
        while process.poll() is None and not self.stopping.wait(LOOK_EVERY_S):
            if not was_ready and self._answers() == 200:
                was_ready = True
                self.ready.set()
        return was_ready

    def _answers(self) -> int | None:
        """The status of its answer, if there is one."""
        try:
            no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with no_proxy.open(self.url, timeout=ANSWER_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except http.client.HTTPException:
            return 0  # an answer, but not in HTTP
        except OSError:
            return None

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return f"; the last it said ({self.log}): {' | '.join(lines[-LAST_LINES:])}"
        return ""


def end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(END_WITHIN_S)
            return
        except subprocess.TimeoutExpired:
            continue
