"""Worker processes of one kind: started until one has loaded what it is to run, ended one by one or all at once."""

import threading

from corral.recipe.errors import UserError
from corral.rewards.process import WorkerProcess

START_TIMEOUT_S = 120.0
"""For importing what it runs and all that this imports."""
START_ATTEMPTS = 3


class Workers:
    """`what` they run, for errors; `module`: that of their `main`; `load`: their first message."""

    def __init__(self, what: str, module: str, load: bytes) -> None:
        self.what, self.module, self.load = what, module, load
        self.unusable: Exception | None = None
        """Why no more are started."""
        self.lock = threading.RLock()
        self._alive: set[WorkerProcess] = set()

    def start(self) -> WorkerProcess:
        """One that has loaded."""
        ended = ""
        for _ in range(START_ATTEMPTS):
            with self.lock:
                if self.unusable is not None:
                    raise self.unusable
                worker = WorkerProcess(self.module)
                self._alive.add(worker)
            try:
                reply = worker.ask(self.load, START_TIMEOUT_S)
            except TimeoutError as error:
                self.end(worker)
                raise UserError(f"{self.what}: loading it took longer than {START_TIMEOUT_S:g} s") from error
            except (EOFError, OSError, ValueError):
                ended = self.end(worker)
                continue
            if "unusable" in reply:
                self.end(worker)
                raise UserError(reply["unusable"])
            return worker
        raise UserError(f"{self.what}: its process died {START_ATTEMPTS} times while loading it: it {ended}")

    def end(self, worker: WorkerProcess) -> str:
        """How it ended."""
        with self.lock:
            self._alive.discard(worker)  # first, so that `kill` signals no process that is gone
        return worker.end()

    def kill(self) -> None:
        with self.lock:
            for worker in self._alive:
                worker.kill()
