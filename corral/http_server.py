"""What Corral's HTTP servers have in common: listening, a bearer token, bounded bodies, refusals in words, an end by
signal, and metrics in Prometheus' text format. Needs FastAPI and uvicorn, and imports nothing of Corral but its errors.
"""

import hmac
import json
import signal
import socket
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import Request, Response
    from pydantic import ValidationError
    from starlette.types import ASGIApp, Receive, Scope, Send

RETRY_AFTER_S = 1
CLOSING_S = 5
"""Time for requests that are being answered when the server ends."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestRefused(Exception):
    """A request that is not answered, with the status and the reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class TokenMiddleware:
    """Refuses requests without the token before everything else: they learn nothing, not even whether it is loaded."""

    def __init__(self, app: "ASGIApp", token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            refusal = reply(401, {"error": "the token is missing or wrong (Authorization: Bearer TOKEN)"})
            await refusal(scope, receive, send)


def reply(status: int, answer: Mapping[str, object]) -> "Response":
    from fastapi import Response

    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(json.dumps(answer), status, headers, "application/json")


async def read_body(request: "Request", limit: int) -> bytes:
    """The body, and no more of it than is allowed, whatever its header has."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestRefused(413, "limit", f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def client_disconnected(request: "Request") -> None:
    """Returns when the client is gone. Only after the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def format_validation_error(error: "ValidationError") -> str:
    problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    answer = "; ".join(f"{where}: {what}" if where else what for where, what in problems[:3])
    return answer if len(problems) <= 3 else f"{answer}; and {len(problems) - 3} more"


def listen(host: str, port: int) -> socket.socket:
    """Its protocol is named, because asyncio looks at that before it turns Nagle's algorithm off: with it, an answer
    that is written in two pieces waits 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}; see --host, --port") from error
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def make_server(app: "ASGIApp", max_connections: int) -> "uvicorn.Server":
    """`run(sockets=[...])` serves until SIGTERM, Ctrl-C, or `should_exit`."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Like uvicorn's own, but a signal that ended it well does not kill the process afterwards."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return Server(config)


class PrometheusText:
    """Metrics in the text format of Prometheus."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.lines: list[str] = []

    def add(self, name: str, kind: str, what: str, values: Mapping[str, float] | float) -> None:
        """`values`: by their labels, such as `{code="200"}`."""
        name = f"{self.prefix}_{name}"
        self.lines.extend([f"# HELP {name} {what}", f"# TYPE {name} {kind}"])
        by_label = values if isinstance(values, Mapping) else {"": values}
        self.lines.extend(f"{name}{labels} {value:g}" for labels, value in by_label.items())

    def by(self, label: str, counts: Mapping[Any, int]) -> dict[str, float]:
        return {f'{{{label}="{key}"}}': count for key, count in sorted(counts.items())}

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Histogram:
    """Of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def values(self) -> dict[str, float]:
        bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
        sums = list(accumulate(self.counts))
        buckets: dict[str, float] = {f'_bucket{{le="{le}"}}': n for le, n in zip(bounds, sums, strict=True)}
        return buckets | {"_sum": self.sum_s, "_count": sums[-1]}
