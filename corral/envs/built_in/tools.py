"""The `tools` environment: the model calls tools, as many turns as it likes, until it replies without a call: that is
its answer. Tools are Python functions, and classes of which each trajectory has one object. They run in processes
(`envs/tool_processes.py`)."""

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from corral.data.plugins import did_you_mean, error_line, is_broken_code, load_object
from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult, final_step, within
from corral.envs.tool_calls import Style, ToolCall, function_schema, parse_reply, problem_with
from corral.envs.tool_processes import (
    SETTING,
    ToolFailed,
    ToolLimits,
    ToolProcess,
    ToolProcesses,
    as_text,
    call_in_thread,
)
from corral.recipe.errors import UserError
from corral.rewards.scorer_pool import RewardScorer

ResultRole = Literal["tool", "user"]
ToolPrompt = Literal["template", "system"]
KeptPart = Literal["beginning", "end", "both_ends"]
CLOSING = "\n</tool_response>"

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
        kept_part: KeptPart = "beginning",
        max_calls_per_turn: int = 8,
        format_penalty: float = 0.0,
        in_process: bool = False,
    ) -> None:
        """`tool_prompt`: where the model's tools are described: by the chat template or, where that has no place for
        them, in a system message. `kept_part`: what is kept of a result that is too long. `format_penalty` is taken off
        for every reply with a call that could not be made. `in_process`: tools are called in this process, for a
        debugger."""
        check_choice("style", style, get_args(Style))
        check_choice("result_role", result_role, get_args(ResultRole))
        check_choice("tool_prompt", tool_prompt, get_args(ToolPrompt))
        check_choice("kept_part", kept_part, get_args(KeptPart))
        self.tools = shared.schemas if tool_prompt == "template" else []
        self._box, self._timeout_s = shared, tool_timeout_s
        self._pool, self._style, self._result_role, self._tool_prompt = pool, style, result_role, tool_prompt
        self._max_characters, self._max_calls, self._penalty = max_result_characters, max_calls_per_turn, format_penalty
        self._in_process, self._kept_part = in_process, kept_part
        self._sessions: dict[type, ToolSession] = {}
        self._process: ToolProcess | None = None
        """Process with the objects of this trajectory."""
        self._row: Row | None = None
        self._turns = self._calls = self._valid = self._errors = 0
        self._raised: list[ToolError] = []

    @classmethod
    def open_shared(
        cls,
        tools: Sequence[str],
        num_processes: int,
        passed_variables: Sequence[str],
        sandbox: bool = True,
        network: bool = False,
        readable: Sequence[str] = (),
        memory_mb: int = 4096,
        disk_mb: int = 64,
    ) -> "ToolBox":
        """`sandbox`: whether tools see nothing but the program, their own files, the current folder and `readable`, all
        read-only, and have no network unless `network`. `memory_mb` and `disk_mb` bound each of their processes."""
        if isinstance(readable, str):
            raise UserError("environment.options.readable must be a list of folders")
        limits = ToolLimits(sandbox, network, tuple(readable), memory_mb, disk_mb, tuple(passed_variables))
        return ToolBox(tools, limits, num_processes)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        for owner, place in self._box.owners.items():
            if self._in_process:
                session = self._sessions[owner] = ToolSession(owner)
                await self._within(session.open(row))
            else:
                if self._process is None:
                    self._process = await self._box.processes.fork_async()
                await self._request("open", place, constructor_arguments(owner, row))
        if self._tool_prompt == "template":
            return row.prompt
        return with_instructions(row.prompt, self._box.schemas, self._style)

    async def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        self._turns += 1
        parsed = parse_reply(reply, self._style)
        if not parsed.calls:
            return final_step(await self._pool.score(reply, self._row))
        valid, self._raised = self._valid, []
        results = [await self._answer(call, number) for number, call in enumerate(parsed.calls)]
        penalty = self._penalty if self._valid - valid < len(parsed.calls) else 0.0
        errors = [str(error) for error in self._raised]
        # A name or module that is missing is nothing that the model's arguments could cause: the tool itself is broken.
        broken = next(filter(is_broken_code, errors), None)
        step = functools.partial(StepResult, reward=-penalty, done=False, error=broken, tool_errors=errors)
        if self._result_role == "tool":
            return step([Message(role="tool", content=result) for result in results])
        content = "\n".join(f"<tool_response>\n{result}{CLOSING}" for result in results)
        return step([Message(role="user", content=content)], closing=CLOSING)

    async def close(self) -> None:
        """Closes all sessions, also if one cannot be closed; then its error is raised."""
        self._row = None
        sessions, self._sessions = self._sessions, {}
        process, errors = self._process, []
        for owner, place in self._box.owners.items():
            try:
                if owner in sessions:
                    await self._within(sessions[owner].close())
                elif process is not None and not process.has_ended:
                    await self._request("close", place)
            except Exception as error:
                errors.append(error)
        if process is not None:
            self._process = None
            await asyncio.wrap_future(call_in_thread(process.end, "tool process"))
        if errors:
            raise errors[0]

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
            return cut(f"Error: {error}", self._max_characters, self._kept_part)
        except ToolError as error:
            self._errors += 1
            self._raised.append(error)
            result = f"Error: {error}"
        self._valid += 1
        return cut(result, self._max_characters, self._kept_part)

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
            return as_text(await self._run(tool, call))
        except TimeoutError:
            raise ToolError(f"`{call.name}` did not answer within {self._timeout_s:g} s") from None
        except ToolFailed as error:
            raise ToolError(f"`{call.name}` failed: {error}") from error
        except Exception as error:
            raise ToolError(f"`{call.name}` failed: {error_line(error)}") from error

    def _within(self, call: Awaitable[Any]) -> Awaitable[Any]:
        return within(call, self._timeout_s, f"no answer within {self._timeout_s:g} s")

    def _run(self, tool: "Tool", call: ToolCall) -> Awaitable[Any]:
        if tool.owner is not None:
            if self._in_process:
                return self._within(self._sessions[tool.owner].call(call.name, call.arguments))
            return self._request("call", tool.place, call.name, call.arguments)
        assert tool.function is not None
        if self._in_process:
            return self._within(result_of(functools.partial(tool.function, **call.arguments)))
        waits = inspect.iscoroutinefunction(tool.function)
        bound = functools.partial(self._box.processes.call, tool.place, call.arguments, self._timeout_s, waits=waits)
        return asyncio.wrap_future(call_in_thread(bound, f"tool {call.name}"))

    def _request(self, method: str, *values: Any) -> Awaitable[Any]:
        """Awaits an answer of the trajectory's own process."""
        assert self._process is not None
        bound = functools.partial(self._process.request, self._timeout_s, method, *values)
        return asyncio.wrap_future(call_in_thread(bound, "tool process"))


def with_instructions(prompt: list[Message], schemas: list[dict[str, Any]], style: Style) -> list[Message]:
    """The functions' schemas in the system message."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = f"You may call these functions:\n<tools>\n{listed}\n</tools>\n\n{CALL_INSTRUCTIONS[style]}"
    if prompt and prompt[0]["role"] == "system":
        return [Message(role="system", content=f"{prompt[0]['content']}\n\n{text}"), *prompt[1:]]
    return [Message(role="system", content=text), *prompt]


def cut(text: str, limit: int, kept: KeptPart = "beginning") -> str:
    text = text.encode(errors="replace").decode()  # half a surrogate pair would be no text to a tokenizer
    if len(text) <= limit:
        return text
    if kept == "beginning":
        return f"{text[:limit]}\n... (the first {limit} of {len(text)} characters)"
    if kept == "end":
        return f"(the last {limit} of {len(text)} characters) ...\n{text[len(text) - limit :]}"
    half = limit // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[len(text) - half :]}"


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
    place: int
    """Place in the recipe's list of what it is, or of what it is a method of."""
    function: Callable[..., Any] | None
    """None: a method of `owner`."""
    owner: type | None = None


class ToolBox:
    """The tools that the recipe names, loaded once for all trajectories, and the processes that run them."""

    def __init__(self, specs: Sequence[str], limits: ToolLimits, num_processes: int) -> None:
        if isinstance(specs, str) or not specs:
            raise UserError(f"{SETTING} must be a list of `module:function`, `file.py:function` or `module:Class`")
        self.tools: dict[str, Tool] = {}
        self.owners: dict[type, int] = {}
        """Classes, with their places in the recipe's list."""
        for place, spec in enumerate(specs):
            for tool in load_tools(spec, place):
                name = tool.schema["function"]["name"]
                if name in self.tools:
                    raise UserError(f"{SETTING}: there are two tools `{name}`")
                self.tools[name] = tool
                if tool.owner is not None:
                    self.owners[tool.owner] = place
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.processes = ToolProcesses(list(specs), limits, num_processes)

    def close(self) -> None:
        self.processes.close()


def load_tools(spec: str, place: int) -> list[Tool]:
    found = load_object(spec, SETTING)
    if isinstance(found, type):
        names = public_methods(found)
        if not names:
            raise UserError(f"{SETTING}: the class `{spec}` has no public methods")
        return [Tool(function_schema(getattr(found, name), name, is_method=True), place, None, found) for name in names]
    if not callable(found):
        raise UserError(f"{SETTING}: `{spec}` is neither a function nor a class")
    return [Tool(function_schema(found, getattr(found, "__name__", spec.rpartition(":")[2])), place, found)]


def public_methods(tool_class: type) -> list[str]:
    """Public methods in the order of their definition, those of base classes first."""
    names = dict.fromkeys(name for base in reversed(tool_class.__mro__) for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_") and name != "close" and inspect.isfunction(inspect.getattr_static(tool_class, name))
    ]


def constructor_arguments(tool_class: type, row: Row) -> dict[str, Row]:
    return {"row": row} if "row" in inspect.signature(tool_class).parameters else {}


async def result_of(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


class ToolSession:
    """One object of somebody's class, in this process."""

    def __init__(self, tool_class: type) -> None:
        self._class = tool_class
        self._object: Any = None

    async def open(self, row: Row) -> None:
        self._object = await result_of(functools.partial(self._class, **constructor_arguments(self._class, row)))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return await result_of(functools.partial(getattr(self._object, name), **arguments))

    async def close(self) -> None:
        if callable(getattr(self._object, "close", None)):
            await result_of(self._object.close)
