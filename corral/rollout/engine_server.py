"""`corral serve`: the native engine behind HTTP, for people and for programs that want tokens.

- `POST /v1/chat/completions`, `POST /v1/completions`, `GET /v1/models`: the OpenAI API, with streaming.
- `POST /inference/v1/generate`: tokens in, tokens and their log-probs out, as vLLM has it.
- `GET /health`, `GET /metrics` (Prometheus).

It listens at once and loads meanwhile; until it is ready it answers 503. A request whose client hangs up is dropped.
What would make an answer another thing than what was asked for is refused with its name.
"""

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from corral.data.images import images_by_id
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs.chat_endpoint import (
    BadRequest,
    ChatRequest,
    read_message,
    read_tools,
)
from corral.http_server import (
    Histogram,
    PrometheusText,
    RequestRefused,
    check_installed,
    client_disconnected,
    listen,
    make_server,
    protect,
    read_body,
    reply,
    url_of,
)
from corral.model.families import check_length
from corral.model.model_loading import default_device, end_tokens, load_model, load_tokenizer
from corral.observe.console import quiet_libraries
from corral.recipe.errors import UserError, first_line
from corral.recipe.schema import MAX_PREFILL_TOKENS, MAX_SEQUENCES, Model
from corral.rollout.engine import Completion
from corral.rollout.native_engine import NativeEngine
from corral.rollout.openai_api import (
    ApiBody,
    ChatBody,
    ChatWriter,
    SamplingFields,
    TextBody,
    TextWriter,
    TokensBody,
    finish_name,
    parse,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

MAX_BODY_BYTES = 64 * 2**20
MAX_CONNECTIONS = 4096
DEFAULT_MAX_TOKENS = 16
"""Of a completion or a token-in request that does not say; a chat goes on until the model ends it."""
PREFIX = "corral_engine"
CHAT, TEXT, TOKENS, MODELS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/models"

log = logging.getLogger(__name__)


# --- answers


@dataclass
class ServedModel:
    """`max_length`: prompt and completion together, in tokens."""

    engine: NativeEngine
    tokenizer: Any
    end_tokens: frozenset[int]
    max_length: int
    chat: bool = True
    """Whether there is a chat template."""

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    async def complete(
        self,
        prompts: list[list[int]],
        asked: SamplingFields,
        max_tokens: int | None,
        images: dict[int, bytes],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Completion]:
        """`asked.n` completions of each prompt. `on_tokens` gets the number of the completion and what is new of it."""
        for tokens in prompts:
            self.check_prompt(tokens, max_tokens, images)
        seed = secrets.randbits(62) if asked.seed is None else asked.seed % 2**62

        def listener(number: int) -> Callable[[list[int]], None] | None:
            return None if on_tokens is None else lambda new: on_tokens(number, new)

        calls = [
            self.engine.generate(
                tokens,
                asked.sampling(max_tokens or self.max_length - len(tokens), self.end_tokens),
                seed + i,  # a prompt's completions are the same alone and among others
                images=images,
                on_tokens=listener(number * asked.n + i),
            )
            for number, tokens in enumerate(prompts)
            for i in range(asked.n)
        ]
        return list(await asyncio.gather(*calls))

    async def tokenize(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """In a thread: long texts take seconds. One that cannot fit, whatever its tokens are, is refused before."""
        longest = max((len(one) for one in prompts if isinstance(one, str)), default=0)
        if longest > self.max_length * self.longest_token:
            raise RequestRefused(
                400, "limit", f"{longest} characters are more than the {self.max_length} tokens of --max-length"
            )

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]

        return await asyncio.to_thread(encode)

    def check_prompt(self, tokens: list[int], max_tokens: int | None, images: dict[int, bytes]) -> None:
        """Refuses tokens that the model does not have, and more than fit."""
        if not tokens:
            raise RequestRefused(400, "invalid", "the prompt has no tokens")
        left = self.max_length - len(tokens)
        if left < 1 or (max_tokens or 1) > left:
            raise RequestRefused(
                400,
                "limit",
                f"{len(tokens)} prompt tokens and {max_tokens or 1} new ones are more than the {self.max_length} that "
                "this server takes (--max-length)",
            )
        vocabulary = self.engine.model.get_input_embeddings().num_embeddings
        if any(token >= vocabulary or (token < 0 and token not in images) for token in tokens):
            raise RequestRefused(400, "invalid", f"a token is outside of the vocabulary of {vocabulary}")


@dataclass
class EngineMetrics:
    requests: "Counter[tuple[str, int]]" = field(default_factory=Counter)
    """By route and status."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    latency: Histogram = field(default_factory=Histogram)

    def text(self, served: ServedModel | None) -> str:
        page = PrometheusText(PREFIX)
        requests = {f'{{route="{route}",code="{code}"}}': n for (route, code), n in sorted(self.requests.items())}
        page.add("requests_total", "counter", "Requests, by route and status.", requests)
        page.add("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens)
        page.add("generated_tokens_total", "counter", "Tokens generated for answers.", self.generated_tokens)
        page.add("ready", "gauge", "1 when the model is loaded.", int(served is not None))
        page.add("in_flight", "gauge", "Completions in progress.", served.engine.num_in_flight if served else 0)
        page.add("decode_steps_total", "counter", "Decode steps.", served.engine.num_decode_steps if served else 0)
        latency = "From a request to its answer, or to the first piece of it."
        page.add("latency_seconds", "histogram", latency, self.latency.values())
        return page.text


class EngineService:
    """What the routes share. Without a model it is still loading."""

    def __init__(self, name: str) -> None:
        self.name, self.metrics = name, EngineMetrics()
        self.served: ServedModel | None = None

    def ready(self) -> ServedModel:
        if self.served is None:
            raise RequestRefused(503, "loading", "the model is being loaded")
        return self.served

    async def chat(self, request: "Request") -> "Response":
        served = self.ready()
        body: ChatBody = parse(ChatBody, await read_body(request, MAX_BODY_BYTES))
        if not served.chat:
            raise RequestRefused(400, "unsupported", f"the model has no chat template; there is {TEXT}")
        try:
            messages = [read_message(message, number) for number, message in enumerate(body.messages)]
            tools = read_tools(body.tools)
        except BadRequest as error:
            raise RequestRefused(400, "invalid", str(error)) from error
        if messages[-1]["role"] == "assistant":
            raise RequestRefused(
                400, "invalid", "the last message is the assistant's, which this server does not continue"
            )
        asked = ChatRequest(messages, tools, body.model, bool(tools) and body.tool_choice != "none", body.stream, False)
        tokens = await asyncio.to_thread(self._render, served, messages, tools)
        limit = body.max_completion_tokens or body.max_tokens
        writer = ChatWriter(self.name, body, asked, served.tokenizer, [tokens])
        return await self._answer(request, served, [tokens], body, limit, images_by_id(messages), writer)

    def _render(self, served: ServedModel, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        try:
            row = Row(messages, None, "", {}, tools=tools, where="the request")
            return render_prompt(served.tokenizer, row, True, needs_tools=True)
        except (UserError, ValueError) as error:
            raise RequestRefused(400, "invalid", str(error)) from error

    async def text(self, request: "Request") -> "Response":
        served = self.ready()
        body: TextBody = parse(TextBody, await read_body(request, MAX_BODY_BYTES))
        limit = body.max_tokens or DEFAULT_MAX_TOKENS
        prompts = await served.tokenize(body.prompts)
        writer = TextWriter(self.name, body, served.tokenizer, prompts)
        if body.prompt_logprobs is not None:
            if body.stream:
                raise RequestRefused(400, "unsupported", "`prompt_logprobs` with `stream: true` is not supported")
            for tokens in prompts:
                served.check_prompt(tokens, limit, {})
            writer.add_prompt_logprobs([await served.engine.compute_logprobs(tokens, 1.0) for tokens in prompts])
        return await self._answer(request, served, prompts, body, limit, {}, writer)

    async def tokens(self, request: "Request") -> "Response":
        served = self.ready()
        body: TokensBody = parse(TokensBody, await read_body(request, MAX_BODY_BYTES))
        asked = body.sampling_params
        limit = asked.max_tokens or DEFAULT_MAX_TOKENS
        completions = await self._while_connected(request, served.complete([body.token_ids], asked, limit, {}))
        self._count([body.token_ids], completions)
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "finish_reason": finish_name(completion.finish_reason),
                "token_ids": completion.tokens,
                "logprobs": None
                if asked.logprobs is None
                else {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
                    ]
                },
                "versions": completion.versions,
            }
            for index, completion in enumerate(completions)
        ]
        return reply(200, {"request_id": body.request_id or secrets.token_hex(8), "choices": choices})

    async def _answer(
        self,
        request: "Request",
        served: ServedModel,
        prompts: list[list[int]],
        body: ApiBody,
        limit: int | None,
        images: dict[int, bytes],
        writer: ChatWriter | TextWriter,
    ) -> "Response":
        from fastapi.responses import StreamingResponse

        if not body.stream:
            completions = await self._while_connected(request, served.complete(prompts, body, limit, images))
            self._count(prompts, completions)
            return reply(200, writer.whole(completions))
        pieces: asyncio.Queue[tuple[int, list[int]] | None] = asyncio.Queue()
        work = asyncio.ensure_future(
            served.complete(prompts, body, limit, images, lambda number, new: pieces.put_nowait((number, new)))
        )
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        first = await pieces.get()
        if first is None:
            work.result()  # raises what is wrong before anything was sent, so that it has a status

        async def events() -> AsyncIterator[str]:
            try:
                piece = first
                while piece is not None:
                    for event in writer.piece(*piece):
                        yield f"data: {json.dumps(event)}\n\n"
                    piece = await pieces.get()
                completions = await work
                self._count(prompts, completions)
                for event in writer.end(completions):
                    yield f"data: {json.dumps(event)}\n\n"
                yield "data: [DONE]\n\n"
            finally:
                work.cancel()  # the client has hung up, if it is not done

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _while_connected(self, request: "Request", work: Awaitable[list[Completion]]) -> list[Completion]:
        """What is computed for the request; it is dropped when the client hangs up."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(client_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RequestRefused(499, "gone", "the client has hung up")
            return task.result()
        finally:
            task.cancel()
            gone.cancel()

    def _count(self, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> None:
        self.metrics.prompt_tokens += sum(map(len, prompts))
        self.metrics.generated_tokens += sum(len(completion.tokens) for completion in completions)


# --- the server


def load_served_model(spec: Model, max_length: int, max_sequences: int | None) -> ServedModel:
    device, tokenizer = default_device(), load_tokenizer(spec)
    quiet_libraries()  # transformers was imported just now
    model = load_model(spec, device)
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or 0
    if positions > 0:  # else the model names no limit
        max_length = min(max_length, positions)
    check_length(model.config, max_length, "--max-length")
    engine = NativeEngine(
        model,
        tokenizer,
        max_sequences=max_sequences or MAX_SEQUENCES[device.type],
        max_prefill_tokens=MAX_PREFILL_TOKENS[device.type],
        max_length=max_length,
    )
    engine.check(spec.path)
    return ServedModel(engine, tokenizer, end_tokens(model, tokenizer), max_length, bool(tokenizer.chat_template))


def make_app(service: EngineService, token: str | None) -> "FastAPI":
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    app = FastAPI(title="corral serve", docs_url=None, redoc_url=None, openapi_url=None)
    protect(app, token)

    async def answered(route: str, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        began = time.perf_counter()
        try:
            response = await answer(request)
        except RequestRefused as refused:
            response = error_reply(refused.status, str(refused))
        except Exception as error:
            log.exception("a request failed")
            response = error_reply(500, f"the request failed: {type(error).__name__}: {first_line(error)}")
        service.metrics.requests[route, response.status_code] += 1
        service.metrics.latency.add(time.perf_counter() - began)
        return response

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        return await answered(CHAT, request, service.chat)

    @app.post(TEXT)
    async def text(request: Request) -> Response:
        return await answered(TEXT, request, service.text)

    @app.post(TOKENS)
    async def tokens(request: Request) -> Response:
        return await answered(TOKENS, request, service.tokens)

    @app.get(MODELS)
    async def models() -> Response:
        limit = None if service.served is None else service.served.max_length
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "corral", "max_model_len": limit}
        return reply(200, {"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        served = service.served
        answer = {"ready": served is not None, "model": service.name}
        return reply(200 if served else 503, answer | ({"in_flight": served.engine.num_in_flight} if served else {}))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(service.served), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        routes = f"POST {CHAT}, {TEXT}, {TOKENS}, GET {MODELS}, /health, /metrics"
        return error_reply(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}; there are {routes}"
        )

    return app


def error_reply(status: int, message: str) -> "Response":
    kind = "invalid_request_error" if status < 500 else "server_error"
    return reply(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def serve(
    load: Callable[[], ServedModel],
    name: str,
    host: str,
    port: int,
    *,
    token: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises what `load` raises."""
    check_installed("corral serve")
    service = EngineService(name)
    failures: list[BaseException] = []
    listening = listen(host, port)
    server = make_server(make_app(service, token), MAX_CONNECTIONS)

    def open_service() -> None:
        began = time.monotonic()
        try:
            service.served = load()
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        report(f"ready after {time.monotonic() - began:.1f} s: {name}, up to {service.served.max_length} tokens")

    report(f"listening on {url_of(host, listening)}; loading {name}")
    loading = threading.Thread(target=open_service, daemon=True)
    loading.start()
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
        if service.served is not None:
            with suppress(Exception):
                service.served.engine.close()
    if failures:
        raise failures[0]
    report("ended")
