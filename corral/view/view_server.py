"""`corral view`: run folders over HTTP, read-only, for the page in `page/`.

The page itself is the same for everybody and needs no token; the numbers under /api do, where there is one. The browser
sends it in a header and never by itself, as it would a cookie, so no other page can make it ask. Without a token only
pages of this server, under a name of this machine, are answered. Every answer is named like a file: `static_files.py`
writes the same as files.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.http_server import check_installed, is_other_page, listen, make_server, protect, reply, url_of
from corral.observe.run_files import json_line
from corral.recipe.errors import UserError, first_line
from corral.view.runs import NotFound, RunReader, Runs

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE = Path(__file__).parent / "page"
MAX_CONNECTIONS = 200
LOOK_EVERY_S = 1.0
"""Time between two looks at the files of a run that is being watched: no network file system reports changes."""
QUIET_S = 15.0
"""Time without news after which a comment is sent, so that a connection whose reader is gone is noticed."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def serve(
    folders: Sequence[Path],
    host: str,
    port: int,
    *,
    token: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    check_installed("corral view")
    runs = Runs(folders)
    listening = listen(host, port)
    server = make_server(make_app(runs, token, lambda: server.should_exit), MAX_CONNECTIONS)
    needs = "" if token is None else "; add #token=TOKEN to the address, or type the token into the page"
    num_runs = len(runs.all())
    # The metrics of a long run take a moment to read, which the first who looks need not wait for.
    threading.Thread(target=runs.overview, name="first look", daemon=True).start()
    report(f"{url_of(host, listening)} shows {num_runs} run{'s' * (num_runs != 1)}{needs}; Ctrl-C ends it")
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()


def make_app(runs: Runs, token: str | None, is_ending: Callable[[], bool] = lambda: False) -> "FastAPI":
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import StreamingResponse
    from fastapi.staticfiles import StaticFiles

    app, api = (FastAPI(docs_url=None, redoc_url=None, openapi_url=None) for _ in range(2))

    def answer(content: dict[str, Any]) -> Response:
        return Response(json_line(content), media_type="application/json")

    async def refuse(_: Request, error: Exception) -> Response:
        return reply(404 if isinstance(error, NotFound | RequestValidationError) else 422, {"error": first_line(error)})

    for kind in (NotFound, RequestValidationError, UserError, OSError, ValueError, EOFError):
        api.add_exception_handler(kind, refuse)

    @api.get("/runs.json")
    def overview() -> Response:
        return answer({**runs.overview(), "live": True})

    @api.get("/run/{run}/run.json")
    def detail(run: str) -> Response:
        return answer(runs.get(run).detail())

    @api.get("/run/{run}/metrics.json")
    def metrics(run: str) -> Response:
        return answer(runs.get(run).all_metrics())

    @api.get("/run/{run}/samples.json")
    def samples(run: str) -> Response:
        return answer(runs.get(run).samples())

    @api.get("/run/{run}/ledger.json")
    def ledger(run: str) -> Response:
        return answer(runs.get(run).audit())

    @api.get("/run/{run}/step/{name}.json")
    def step(run: str, name: str) -> Response:
        return answer(runs.get(run).step(*step_and_part(name)))

    @api.get("/run/{run}/step/{name}/{index}.json")
    def trajectory(run: str, name: str, index: int) -> Response:
        return answer(runs.get(run).trajectory(*step_and_part(name), index))

    @api.get("/run/{run}/prompt/{prompt_id}.json")
    def prompt(run: str, prompt_id: int) -> Response:
        return answer(runs.get(run).prompt(prompt_id))

    @api.get("/run/{run}/log/{name}.json")
    def log(run: str, name: str) -> Response:
        return answer(runs.get(run).log(name))

    @api.get("/run/{run}/workers.json")
    def workers(run: str) -> Response:
        return answer(runs.get(run).workers())

    @api.get("/run/{run}/stacks.json")
    def stacks(run: str) -> Response:
        return answer(runs.get(run).stacks())

    @api.get("/run/{run}/events")
    def events(run: str, position: str) -> Response:
        return StreamingResponse(run_events(runs.get(run), position, is_ending), media_type="text/event-stream")

    app.mount("/api", api)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    protect(app if token is None else api, token)
    app.add_middleware(PageMiddleware)
    return app


def step_and_part(name: str) -> tuple[int, str]:
    """`12` is the training of step 12, `12.validation` the validation after it."""
    step, _, part = name.partition(".")
    if not (step.isascii() and step.isdigit() and len(step) < 12):
        raise NotFound(f"{name} is no step")
    return int(step), part


async def run_events(run: RunReader, position: str, is_ending: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Server-sent events: the rows that are new in `metrics.jsonl`, the state, and which trajectories there are."""
    known: dict[str, Any] = {}
    quiet_s = 0.0
    while not is_ending():
        position, rows = await asyncio.to_thread(run.metrics.read_after, position)
        summary = await asyncio.to_thread(run.summary)
        now = {name: summary[name] for name in ("state", "last_line", "step", "after")}
        if rows is None or rows or now != known:
            known, quiet_s = now, 0.0
            parts = await asyncio.to_thread(run.parts)
            yield (
                b"data: "
                + json_line({"position": position, "reset": rows is None, "rows": rows or [], "parts": parts, **now})
                + b"\n"
            )
        elif (quiet_s := quiet_s + LOOK_EVERY_S) >= QUIET_S:
            quiet_s = 0.0
            yield b": nothing new\n\n"
        await asyncio.sleep(LOOK_EVERY_S)


class PageMiddleware:
    """Answers only requests that read, and numbers only to this server's own page; and tells the browser to load
    nothing from anywhere else, and to run no text as a program."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: "Message") -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal: Response | None = None
        if scope["method"] not in ("GET", "HEAD"):
            refusal = reply(405, {"error": "this server only shows"})
        elif scope["path"].startswith("/api") and is_other_page(headers):
            refusal = reply(403, {"error": "another page asks"})
        await (refusal or self.app)(scope, receive, send_with_headers)
