"""A FastAPI application on a port of this machine, for as long as a test needs it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deadlines import wait_until, within

from corral.http_server import make_server

WAIT_S = within(30)


def free_port() -> int:
    """On which nobody listens yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Yields the address."""
    server = make_server(app, 100)
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(WAIT_S)
