"""A worker process as its parent sees it: start it, ask it, kill it.

What runs inside is `worker.py`, or another module with such a `main`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from corral.rewards.messages import receive_message, send_message

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"
)


class WorkerProcess:
    """A process that runs a module's `main`, and the socket to it.

    Belongs to the thread that made it: Linux kills the process when that thread ends (see `worker._die_with_parent`).
    """

    def __init__(self, module: str) -> None:
        bootstrap = _BOOTSTRAP.format(module=module)
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", bootstrap, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C is not for it, and what it starts is killed with it
            )

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """TimeoutError if there is no reply in time; EOFError, OSError or ValueError if there is no sound one."""
        self._connection.settimeout(timeout_s)
        send_message(self._connection, request)
        reply = json.loads(receive_message(self._connection))
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        return reply

    def is_idle(self) -> bool:
        """Alive, and with nothing to say unasked."""
        self._connection.settimeout(0)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill it, if it isn't dead; returns how it ended."""
        if self._process.returncode is None:
            self.kill()
            self._process.wait()
            self._connection.close()
        code = self._process.returncode
        if code >= 0:
            return f"exit code {code}"
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
