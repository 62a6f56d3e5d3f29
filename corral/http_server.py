"""What Corral's HTTP servers have in common: listening, a bearer token, bounded bodies, refusals in words, an end by
signal, and metrics in Prometheus' text format. Needs FastAPI and uvicorn, and imports nothing of Corral but its errors.
"""

import hmac
import ipaddress
import json
import os
import signal
import socket
import stat
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from corral.recipe.errors import UserError, install_command

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from pydantic import ValidationError
    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_BYTES = 32
MIN_CHARACTERS = 16
"""Of a token."""
RETRY_AFTER_S = 1
CLOSING_S = 5
"""Time for requests that are being answered when the server ends."""
REQUEST_S = 20.0
"""Time for a new connection to send its first request."""
KEEP_ALIVE_S = 75
"""Time between an answer and the whole of the next request. Who has come so far has the token, if there is one: a
connection without it is closed after the first answer."""
CHECK_S = 5.0
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def check_installed(command: str) -> None:
    """Raises, with what to install for `command`, where the libraries of a server are missing."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"{command} needs an extra: {install_command('serve')}") from error


def read_token(path: Path) -> str:
    """The token in a file, which other users of the machine must not be able to read."""
    try:
        with path.open() as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise UserError(f"the token file {path} cannot be read: {error.strerror}") from error
    if mode & stat.S_IROTH:
        raise UserError(f"every user of the machine can read the token file {path}: `chmod 600` it")
    return check_token(token, f"the token file {path}")


def check_token(token: str, source: str) -> str:
    if len(token) < MIN_CHARACTERS:
        length = f"has {len(token)} characters" if token else "is empty"
        raise UserError(
            f"{source} {length}, and a token that nobody guesses has {MIN_CHARACTERS} or more: "
            f"`openssl rand -hex {TOKEN_BYTES}` makes one"
        )
    return token


def token_for(host: str, token_file: Path | None, is_insecure: bool) -> str | None:
    """The token of a server on this address, which is needed where other machines reach it (`--insecure`: not even
    there)."""
    if token_file is not None:
        return read_token(token_file)
    if not is_insecure and not is_loopback(host):
        raise UserError(
            f"on {host} other machines could send requests too: give --token-file, or --insecure if all of them may"
        )
    return None


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
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)


class HostMiddleware:
    """Where there is no token: refuses requests of pages in a browser, which ask as if they were programs here. A page
    says where it is from, or has a name of its own stand for 127.0.0.1."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD") and is_other_page(headers):
            return await reply(403, {"error": "a page of another server asks"})(scope, receive, send)
        if not is_loopback(str(scope["server"][0])):
            return await self.app(scope, receive, send)
        given = headers.get("host", "localhost")
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = given
        if is_loopback(name):
            return await self.app(scope, receive, send)
        refusal = reply(403, {"error": f"this server is localhost, not {name}"})
        await refusal(scope, receive, send)


def is_other_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another server has made the request. Programs say nothing of it."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    return "origin" in headers and urlsplit(headers["origin"]).netloc != headers.get("host")


def is_loopback(address: str) -> bool:
    """Whether an address, or the name `localhost`, is one that only this machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, or what is none
        return address == "localhost"


def protect(app: "FastAPI", token: str | None) -> None:
    """Requests need the token or, where there is none, come from programs and not from pages in a browser."""
    if token is None:
        app.add_middleware(HostMiddleware)
    else:
        app.add_middleware(TokenMiddleware, token=token)


def reply(status: int, answer: Mapping[str, object]) -> "Response":
    from fastapi import Response

    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(json.dumps(answer), status, headers, "application/json")


async def read_body(request: "Request", limit: int) -> bytes:
    """The body, and no more of it than is allowed, whatever its header has."""
    from starlette.requests import ClientDisconnect

    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise RequestRefused(413, "limit", f"the body is larger than {limit} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise RequestRefused(499, "gone", "the client has hung up within its body") from None
    return b"".join(parts)


async def client_disconnected(request: "Request") -> None:
    """Returns when the client is gone. Only after the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def format_validation_error(error: "ValidationError") -> str:
    problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    answer = "; ".join(f"{where}: {what}" if where else what for where, what in problems[:3])
    return answer if len(problems) <= 3 else f"{answer}; and {len(problems) - 3} more"


def listen(host: str, port: int, settings: str = "--host, --port") -> socket.socket:
    """Its protocol is named, because asyncio looks at that before it turns Nagle's algorithm off: with it, an answer
    that is written in two pieces waits 40 ms. `settings`: where a user sets the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}; see {settings}") from error
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
        http=guarded_protocol(max_connections // 2),
        log_config=None,
        access_log=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return Server(config)


def guarded_protocol(max_silent: int) -> Any:
    """The protocol of a connection, as uvicorn has it, with an end for those that send nothing: each has REQUEST_S for
    its first request, and of more than `max_silent` that have sent none the oldest of the peer with the most of them is
    closed. Otherwise idle connections, for which nobody needs a token, use up all that the server accepts."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # type: ignore[assignment]

    silent: dict[Any, str] = {}  # connections that have not sent a request yet, oldest first, and their peers

    class GuardedProtocol(Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.waits_since, self.watch = self.loop.time(), self.loop.call_later(CHECK_S, self.check)
            silent[self] = str((transport.get_extra_info("peername") or ("",))[0])
            if len(silent) > max_silent:
                [(peer, _)] = Counter(silent.values()).most_common(1)
                oldest = next(one for one, own in silent.items() if own == peer)
                del silent[oldest]
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            self.watch.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.more_body:
                silent.pop(self, None)

        def check(self) -> None:
            """Closes the connection if its next request takes too long to come, however little of it arrives."""
            now = self.loop.time()
            if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
                self.waits_since = now  # it is being answered, which may take long
            elif now - self.waits_since > (REQUEST_S if self in silent else KEEP_ALIVE_S):
                self.transport.abort()
                return
            self.watch = self.loop.call_later(CHECK_S, self.check)

    return GuardedProtocol


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
        self.lines.extend(f"{name}{own} {value:.15g}" for own, value in by_label.items())

    def by(self, label: str, counts: Mapping[Any, int]) -> dict[str, float]:
        return {labels(**{label: key}): count for key, count in sorted(counts.items())}

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def labels(**values: Any) -> str:
    """Labels as Prometheus has them, such as `{code="200"}`."""
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{str(value).translate(escape)}"' for name, value in values.items()) + "}"


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
