"""The tools of a recipe, and those of one trajectory: a class among them has one object for each trajectory."""

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from corral.data.plugins import did_you_mean, error_line, load_object, without_exit
from corral.data.rows import Row
from corral.envs.threads import CallThread, call_in_thread
from corral.envs.tools.calls import Call
from corral.envs.tools.schema import function_schema, is_json, problem_with
from corral.recipe.errors import UserError

SETTING = "environment.options.tools"


class ToolError(Exception):
    """A call that came to nothing; the text is for the model."""


class InvalidCall(ToolError):
    """A call that could not even be made."""


@dataclass(frozen=True)
class Tool:
    schema: dict[str, Any]
    function: Callable[..., Any] | None
    """None: a method of `owner`."""
    owner: type | None = None


class ToolBox:
    """What the recipe names, read once for all trajectories."""

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


def public_methods(made: type) -> list[str]:
    """In the order of their definition, those of base classes first."""
    names = dict.fromkeys(name for base in reversed(made.__mro__) for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_") and name != "close" and inspect.isfunction(inspect.getattr_static(made, name))
    ]


class ToolSet:
    """The tools of one trajectory. Whatever they do costs `timeout_s` at most and raises nothing but ToolError."""

    def __init__(self, box: ToolBox, timeout_s: float) -> None:
        self._box, self._timeout_s = box, timeout_s
        self._sessions: dict[type, ToolSession] = {}

    async def open(self, row: Row) -> None:
        for owner in dict.fromkeys(tool.owner for tool in self._box.tools.values()):
            if owner is not None:
                session = self._sessions[owner] = ToolSession(owner)
                await within(session.open(row), self._timeout_s)

    async def call(self, call: Call) -> str:
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
            return as_text(await within(self._run(tool, call), self._timeout_s))
        except TimeoutError:
            raise ToolError(f"`{call.name}` did not answer within {self._timeout_s:g} s") from None
        except Exception as error:
            raise ToolError(f"`{call.name}` failed: {error_line(error)}") from error

    async def close(self) -> None:
        """All of them, also if one cannot be closed; then its error is raised."""
        sessions, self._sessions = self._sessions, {}
        closing = (within(session.close(), self._timeout_s) for session in sessions.values())
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _run(self, tool: Tool, call: Call) -> Awaitable[Any]:
        if tool.owner is not None:
            return self._sessions[tool.owner].call(call.name, call.arguments)
        assert tool.function is not None
        if inspect.iscoroutinefunction(tool.function):
            return tool.function(**call.arguments)  # type: ignore[no-any-return]
        return asyncio.wrap_future(
            call_in_thread(functools.partial(tool.function, **call.arguments), f"tool {call.name}")
        )


class ToolSession:
    """One object of somebody's class. A class with `async def` methods lives in the event loop, any other in a thread
    of its own."""

    def __init__(self, made: type) -> None:
        self._made = made
        self._object: Any = None
        methods = [getattr(made, name, None) for name in (*public_methods(made), "close")]
        is_async = any(inspect.iscoroutinefunction(method) for method in methods)
        self._thread = None if is_async else CallThread(f"tools {made.__name__}")
        self._running: Future[Any] | None = None

    async def open(self, row: Row) -> None:
        asks = "row" in inspect.signature(self._made).parameters
        self._object = await self._do(functools.partial(self._made, **({"row": row} if asks else {})))

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


async def within(call: Awaitable[Any], timeout_s: float) -> Any:
    """TimeoutError if it takes longer. A late one is not waited for: it may ignore its cancellation."""
    task = asyncio.ensure_future(without_exit(call))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return task.result()


def as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False) if is_json(result) else str(result)
