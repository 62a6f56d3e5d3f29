"""A process beside the controller that makes and writes the files of trajectories, for runs on a cluster.

The records of 8,192 trajectories take seconds to make (decoding each token, finding branches, compressing), which the
controller needs for its workers. So it only sends what a step consists of: a pickle, through a socket that the process
inherits, written while it is made, so that no copy of it is held. The files are those that the controller itself would
write, one for each step, and come into place whole. They lie where the controller has the run's folder: no other node
needs to see it.
"""

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from corral.child_process import describe_exit, die_with_parent, last_lines, start_child, terminate_group
from corral.loop.trajectory_records import BackgroundWriter, StepTrajectories, writes_here
from corral.observe.run_folder import RunFolder
from corral.recipe.errors import RunError
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Model, Recipe
from corral.rewards.worker_pool import worker_command

ATTEMPTS = 2
"""A step is sent again, to a new process, where the first has ended: most often the kernel took its memory."""
BUFFER_BYTES = 1 << 20
NICENESS = 10
"""Workers on the controller's node come first."""


@contextmanager
def open_writer(recipe: Recipe, folder: RunFolder, tokenizer: Any) -> Iterator[BackgroundWriter]:
    """Opens what writes the trajectories of a run: a thread of this process, and on a cluster a process."""
    if not runs_on_ray(recipe):
        with BackgroundWriter(writes_here(folder.trajectories, tokenizer)) as writer:
            yield writer
        return
    process = WriterProcess(folder.trajectories, recipe.model, tokenizer, folder.logs / "trajectories.log")
    try:
        with BackgroundWriter(process.write) as writer:
            yield writer
    finally:
        process.close()


class WriterProcess:
    """The controller's side. The process starts with the first step, from the thread that sends it, and is killed by
    the kernel when that thread ends, however it ends."""

    def __init__(self, folder: Path, model: Model, tokenizer: Any, log: Path) -> None:
        """`tokenizer`: of the model. `log`: of the process."""
        self.settings, self.log = (folder.resolve(), model, pickled(tokenizer)), log
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Any = None

    def write(self, own: StepTrajectories) -> None:
        """Returns when the step's file is in place. Raises what writing it raised."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if self._process is None:
                    self._start()
                pickle.dump(own, self._wire, pickle.HIGHEST_PROTOCOL)
                self._wire.flush()
                error = pickle.load(self._wire)
                break
            except (EOFError, ConnectionError):
                how = self.close()
                if attempt == ATTEMPTS:
                    lines = "\n  ".join(["", *last_lines(self.log, 5)])
                    raise RunError(f"the process that writes trajectories {how}; {self.log} ends with{lines}") from None
        if error is not None:
            raise error

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with ours, theirs, self.log.open("ab") as log:
            command = worker_command(sys.executable, __name__, [theirs.fileno()])
            self._process = start_child(command, stdout=log, stderr=log, pass_fds=[theirs.fileno()])
            self._wire = ours.makefile("rwb", buffering=BUFFER_BYTES)
        pickle.dump(self.settings, self._wire, pickle.HIGHEST_PROTOCOL)

    def close(self) -> str:
        """Ends the process, which has nothing to do any more. Returns how it ended."""
        if self._process is None:
            return "was not started"
        process, self._process = self._process, None
        with suppress(OSError):  # what was in its buffer has nobody to go to
            self._wire.close()
        return describe_exit(terminate_group(process))


def pickled(tokenizer: Any) -> bytes:
    """The tokenizer, or nothing where it has code of its own that pickle does not find."""
    try:
        return pickle.dumps(tokenizer, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return b""


def unpickled(tokenizer: bytes, model: Model) -> Any:
    """Loading a tokenizer imports torch and parts of models, for six seconds of a core, which unpickling most of them
    does not."""
    try:
        return pickle.loads(tokenizer)
    except Exception:
        from corral.model.model_loading import load_tokenizer

        return load_tokenizer(model)


def main(descriptor: int) -> None:
    """Runs in the process: writes step after step, until the socket is closed."""
    die_with_parent()
    os.nice(NICENESS)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb", buffering=BUFFER_BYTES) as wire:
        folder, model, tokenizer = pickle.load(wire)
        write = None
        while True:
            try:
                own = pickle.load(wire)
            except EOFError:
                return
            error: Exception | None = None
            try:
                write = write or writes_here(folder, unpickled(tokenizer, model))
                write(own)
            except OSError as raised:
                error = raised  # a full disk is reported as such
            except Exception as raised:
                traceback.print_exc()
                error = RunError("".join(traceback.format_exception_only(raised)).strip())
            pickle.dump(error, wire, pickle.HIGHEST_PROTOCOL)
            wire.flush()
