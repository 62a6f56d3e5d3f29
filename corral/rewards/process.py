"""A worker process as its parent sees it: start it, ask it, kill it.

What runs inside is `worker.py`, or another module with such a `main`.
"""

import json
import select
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

from corral.child_process import describe_exit, signal_group, start_child, terminate_group
from corral.rewards.messages import Inbox, framed

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"
)


class WorkerProcess:
    """A process that runs a module's `main`, and the socket to it.

    Belongs to the thread that made it: Linux kills the process when that thread ends (see `die_with_parent`).
    """

    def __init__(self, module: str) -> None:
        bootstrap = _BOOTSTRAP.format(module=module)
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._inbox, self._outbox = Inbox(self._connection), bytearray()
        with theirs:
            self._process = start_child(
                [sys.executable, "-u", "-c", bootstrap, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=2,
            )

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """TimeoutError if there is no reply in time; EOFError, OSError or ValueError if there is no sound one."""
        self.send([request])
        return self.next_reply(timeout_s)

    def send(self, requests: Iterable[bytes]) -> None:
        """To be answered one after the other. They leave while `next_reply` waits: a process that is busy with the
        first may have no room for the last."""
        for request in requests:
            self._outbox += framed(request)

    def next_reply(self, timeout_s: float) -> dict[str, Any]:
        """To the first of those sent that has none yet; raises what `ask` does."""
        deadline = time.monotonic() + timeout_s
        while not self._inbox.has_message:
            self._exchange(deadline - time.monotonic())
        reply = json.loads(self._inbox.receive())
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        return reply

    @property
    def has_reply(self) -> bool:
        """Whether `next_reply` would return at once."""
        return self._inbox.has_message

    def is_idle(self) -> bool:
        """Alive, and with nothing to say unasked."""
        try:
            self._exchange(0)
        except TimeoutError:
            return self._inbox.is_empty
        except (EOFError, OSError):
            pass
        return False

    def _exchange(self, timeout_s: float) -> None:
        """Waits until the process takes or says something."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        events = poll.poll(max(timeout_s, 0) * 1000)
        if not events:
            raise TimeoutError
        if events[0][1] == select.POLLOUT:
            del self._outbox[: self._connection.send(self._outbox)]
        else:
            self._inbox.read()  # first: what a process said before it died is heard

    def kill(self) -> None:
        signal_group(self._process.pid)

    def end(self) -> str:
        """Kill it, if it isn't dead; returns how it ended."""
        if self._process.returncode is None:
            terminate_group(self._process)
            self._connection.close()
        return describe_exit(self._process.returncode)
