"""The `tools` environment: the model calls tools, as many turns as it likes, until it replies without a call: that is
its answer. Tools are Python functions, and classes of which each trajectory has one object."""

import asyncio
import functools
import inspect
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from corral.data.plugins import did_you_mean, error_line, load_object
from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult, final_step, within
from corral.envs.tool_calls import Style, ToolCall, function_schema, is_json, parse_reply, problem_with
from corral.recipe.errors import UserError
from corral.rewards.scorer_pool import RewardScorer

SETTING = "environment.options.tools"
ResultRole = Literal["tool", "user"]
ToolPrompt = Literal["template", "system"]
CLOSING = "\n</tool_response>"
Answer = TypeVar("Answer")

CALL_INSTRUCTIONS = {
    "hermes": (
        "For each call write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments as JSON>}\n</tool_call>'
    ),
    "openai": (
        "To call functions, reply with nothing but a JSON object:\n"
        '{"tool_calls": [{"name": <name>, "arguments": <arguments as JSON>}]}'
    ),
}


class ToolsEnv(Env):
    bounds_itself = True
    """Every call of a tool has `tool_timeout_s`; the reward function has its own deadline."""

    def __init__(
        self,
        pool: RewardScorer,
        shared: "ToolBox",
        style: Style = "hermes",
        result_role: ResultRole = "tool",
        tool_prompt: ToolPrompt = "template",
        tool_timeout_s: float = 30.0,
        max_result_characters: int = 4000,
        max_calls_per_turn: int = 8,
        format_penalty: float = 0.0,
    ) -> None:
        """`tool_prompt`: where the model's tools are described: by the chat template or, where that has no place for
        them, in a system message. `format_penalty` is taken off for every reply with a call that could not be made."""
        check_choice("style", style, get_args(Style))
        check_choice("result_role", result_role, get_args(ResultRole))
        check_choice("tool_prompt", tool_prompt, get_args(ToolPrompt))
        self.tools = shared.schemas if tool_prompt == "template" else []
        self._box, self._timeout_s = shared, tool_timeout_s
        self._pool, self._style, self._result_role, self._tool_prompt = pool, style, result_role, tool_prompt
        self._max_characters, self._max_calls, self._penalty = max_result_characters, max_calls_per_turn, format_penalty
        self._sessions: dict[type, ToolSession] = {}
        self._row: Row | None = None
        self._turns = self._calls = self._valid = self._errors = 0

    @classmethod
    def open_shared(cls, tools: Sequence[str]) -> "ToolBox":
        return ToolBox(tools)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        for owner in dict.fromkeys(tool.owner for tool in self._box.tools.values()):
            if owner is not None:
                session = self._sessions[owner] = ToolSession(owner)
                await self._within(session.open(row))
        if self._tool_prompt == "template":
            return row.prompt
        return with_instructions(row.prompt, self._box.schemas, self._style)

    async def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        self._turns += 1
        parsed = parse_reply(reply, self._style)
        if not parsed.calls:
            return final_step(await self._pool.score(reply, self._row))
        valid = self._valid
        results = [await self._answer(call, number) for number, call in enumerate(parsed.calls)]
        penalty = self._penalty if self._valid - valid < len(parsed.calls) else 0.0
        if self._result_role == "tool":
            return StepResult([Message(role="tool", content=result) for result in results], -penalty, done=False)
        content = "\n".join(f"<tool_response>\n{result}{CLOSING}" for result in results)
        return StepResult([Message(role="user", content=content)], -penalty, done=False, closing=CLOSING)

    async def close(self) -> None:
        """Closes all sessions, also if one cannot be closed; then its error is raised."""
        self._row = None
        sessions, self._sessions = self._sessions, {}
        closing = (self._within(session.close()) for session in sessions.values())
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def summary(self) -> dict[str, float]:
        numbers = {"turns": float(self._turns), "tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        return {**numbers, "valid_calls": self._valid / self._calls} if self._calls else numbers

    async def _answer(self, call: ToolCall, number: int) -> str:
        """The tool's result, or what went wrong, for the model."""
        self._calls += 1
        try:
            if number >= self._max_calls:
                raise InvalidCall(f"not called: there may be {self._max_calls} calls in a turn")
            result = await self._call(call)
        except InvalidCall as error:
            return cut(f"Error: {error}", self._max_characters)
        except ToolError as error:
            self._errors += 1
            result = f"Error: {error}"
        self._valid += 1
        return cut(result, self._max_characters)

    async def _call(self, call: ToolCall) -> str:
        """Whatever a tool does costs `tool_timeout_s` at most and raises nothing but ToolError."""
        if call.problem is not None:
            raise InvalidCall(call.problem)
        tool = self._box.tools.get(call.name)
        if tool is None:
            known = ", ".join(self._box.tools)
            guess = did_you_mean(call.name, self._box.tools)
            raise InvalidCall(f"there is no tool `{call.name}`{guess}; there are {known}")
        problem = problem_with(call.arguments, tool.schema["function"]["parameters"])
        if problem is not None:
            raise InvalidCall(f"`{call.name}` was not called: {problem}")
        try:
            return as_text(await self._within(self._run(tool, call)))
        except TimeoutError:
            raise ToolError(f"`{call.name}` did not answer within {self._timeout_s:g} s") from None
        except Exception as error:
            raise ToolError(f"`{call.name}` failed: {error_line(error)}") from error

    def _within(self, call: Awaitable[Any]) -> Awaitable[Any]:
        return within(call, self._timeout_s, f"no answer within {self._timeout_s:g} s")

    def _run(self, tool: "Tool", call: ToolCall) -> Awaitable[Any]:
        if tool.owner is not None:
            return self._sessions[tool.owner].call(call.name, call.arguments)
        assert tool.function is not None
        if inspect.iscoroutinefunction(tool.function):
            return tool.function(**call.arguments)  # type: ignore[no-any-return]
        bound = functools.partial(tool.function, **call.arguments)
        return asyncio.wrap_future(call_in_thread(bound, f"tool {call.name}"))


def with_instructions(prompt: list[Message], schemas: list[dict[str, Any]], style: Style) -> list[Message]:
    """The functions' schemas in the system message."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = f"You may call these functions:\n<tools>\n{listed}\n</tools>\n\n{CALL_INSTRUCTIONS[style]}"
    if prompt and prompt[0]["role"] == "system":
        return [Message(role="system", content=f"{prompt[0]['content']}\n\n{text}"), *prompt[1:]]
    return [Message(role="system", content=text), *prompt]


def cut(text: str, limit: int) -> str:
    text = text.encode(errors="replace").decode()  # half a surrogate pair would be no text to a tokenizer
    return text if len(text) <= limit else f"{text[:limit]}\n... (the first {limit} of {len(text)} characters)"


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"environment.options.{option} must be {' or '.join(allowed)}, not {value!r}")


# --- the tools of a recipe, and objects of their classes


class ToolError(Exception):
    """A call that failed; the text is for the model."""


class InvalidCall(ToolError):
    """A call that could not even be made."""


@dataclass(frozen=True)
class Tool:
    schema: dict[str, Any]
    function: Callable[..., Any] | None
    """None: a method of `owner`."""
    owner: type | None = None


class ToolBox:
    """The tools that the recipe names, loaded once for all trajectories."""

    def __init__(self, specs: Sequence[str]) -> None:
        if isinstance(specs, str) or not specs:
            raise UserError(f"{SETTING} must be a list of `module:function`, `file.py:function` or `module:Class`")
        self.tools: dict[str, Tool] = {}
        for spec in specs:
            for tool in load_tools(spec):
                name = tool.schema["function"]["name"]
                if name in self.tools:
                    raise UserError(f"{SETTING}: there are two tools `{name}`")
                self.tools[name] = tool
        self.schemas = [tool.schema for tool in self.tools.values()]

    def close(self) -> None:
        """Nothing is open: sessions belong to their trajectories."""


def load_tools(spec: str) -> list[Tool]:
    found = load_object(spec, SETTING)
    if isinstance(found, type):
        names = public_methods(found)
        if not names:
            raise UserError(f"{SETTING}: the class `{spec}` has no public methods")
        return [Tool(function_schema(getattr(found, name), name, is_method=True), None, found) for name in names]
    if not callable(found):
        raise UserError(f"{SETTING}: `{spec}` is neither a function nor a class")
    return [Tool(function_schema(found, getattr(found, "__name__", spec.rpartition(":")[2])), found)]


def public_methods(tool_class: type) -> list[str]:
    """Public methods in the order of their definition, those of base classes first."""
    names = dict.fromkeys(name for base in reversed(tool_class.__mro__) for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_") and name != "close" and inspect.isfunction(inspect.getattr_static(tool_class, name))
    ]


class ToolSession:
    """One object of somebody's class. A class with `async def` methods lives in the event loop, any other in a thread
    of its own."""

    def __init__(self, tool_class: type) -> None:
        self._class = tool_class
        self._object: Any = None
        methods = [getattr(tool_class, name, None) for name in (*public_methods(tool_class), "close")]
        is_async = any(inspect.iscoroutinefunction(method) for method in methods)
        self._thread = None if is_async else CallThread(f"tools {tool_class.__name__}")
        self._running: Future[Any] | None = None

    async def open(self, row: Row) -> None:
        arguments = {"row": row} if "row" in inspect.signature(self._class).parameters else {}
        self._object = await self._do(functools.partial(self._class, **arguments))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return await self._do(functools.partial(getattr(self._object, name), **arguments))

    async def close(self) -> None:
        try:
            if callable(getattr(self._object, "close", None)) and not self._is_busy():
                await self._do(self._object.close)
        finally:
            if self._thread is not None:
                self._thread.close()

    async def _do(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            result = call()
            return await result if inspect.isawaitable(result) else result
        if self._is_busy():
            raise RuntimeError("an earlier call that took too long is still running")
        self._running = self._thread.submit(call)
        return await asyncio.wrap_future(self._running)

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done()


def as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False) if is_json(result) else str(result)


# --- threads for people's code that may block or never return. All are daemons, so that none keeps a run alive


class CallThread:
    """Runs one call after the other, all in the same thread: what one opens (SQLite, say) the next may use."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Answer]) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self._jobs.put((future, call))
        return future

    def close(self) -> None:
        """The thread ends after what it was given so far; a call that hangs is left behind."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = call()
            except BaseException as error:  # also SystemExit: the call failed, nothing else
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(answer)


def call_in_thread(call: Callable[[], Answer], name: str) -> "Future[Answer]":
    """One call in a thread of its own. A pool's threads would be used up by calls that hang."""
    thread = CallThread(name)
    future = thread.submit(call)
    thread.close()
    return future
