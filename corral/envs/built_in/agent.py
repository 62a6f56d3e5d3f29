"""The `agent` environment: somebody else's agent, written against the OpenAI API, is trained through its `base_url`.

The usual roles are reversed: the agent calls the model. Its first request begins the trajectory, the model's reply
answers it, and what the next request adds is the next observation. So the tokens are those that the driver has
generated and rendered; a request is never tokenized as a whole, and an agent that changes earlier messages has no
trajectory. When the agent ends, so does the trajectory.

The agent of a row is a function or a program. Either has a process for each trajectory, which is killed with all that
it started when the trajectory is over; that of a function is forked from one that has imported it
(`envs/tool_processes.py`).
"""

import asyncio
import functools
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, get_args

from corral.child_process import (
    allowed_environment,
    command_dying_with_parent,
    describe_exit,
    last_lines,
    signal_group,
)
from corral.data.images import for_api
from corral.data.plugins import blamed_on, error_line, is_users_file, load_object, place_of, with_place
from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult, final_step, without_exit
from corral.envs.built_in.tools import ToolPrompt, check_choice, with_instructions
from corral.envs.chat_endpoint import (
    HOST,
    REFUSED,
    ChangedHistory,
    ChatEndpoint,
    ChatReply,
    ChatSession,
    LoopThread,
    PendingRequest,
    assistant_message,
    calls_of,
    new_messages,
)
from corral.envs.tool_calls import Style
from corral.envs.tool_processes import ToolFailed, ToolLimits, ToolProcesses, call_in_thread
from corral.recipe.errors import UserError
from corral.rewards.reward_function import is_number, read_result
from corral.rewards.scorer_pool import RewardScorer

SETTING = "environment.options.agent"
LONGEST_S = 7 * 24 * 3600.0
"""Deadline of a function, whose requests have their own (`environment.timeout_s`)."""
AGENT_PARAMETERS = ("row", "base_url", "api_key", "model")
TRACEBACK_LINES = 100
FRAME = re.compile(r' *File "(?P<file>[^"]+)", line (?P<line>\d+)')


class AgentEnv(Env):
    bounds_itself = True
    """The agent has `environment.timeout_s` from each answer to its next request; the reward has its own deadline."""

    def __init__(
        self,
        pool: RewardScorer,
        shared: "AgentRunner",
        timeout_s: float,
        style: Style = "hermes",
        tool_prompt: ToolPrompt = "template",
        in_process: bool = False,
    ) -> None:
        """`style`: how the model calls tools. `tool_prompt`: where they are described, as in `tools`. `in_process`: an
        agent that is a function runs in this process, for a debugger."""
        check_choice("style", style, get_args(Style))
        check_choice("tool_prompt", tool_prompt, get_args(ToolPrompt))
        self.tools: list[dict[str, Any]] = []
        self._pool, self._agents, self._timeout_s = pool, shared, timeout_s
        self._style, self._tool_prompt, self._in_process = style, tool_prompt, in_process
        self._events: asyncio.Queue[PendingRequest | Future[Any]] = asyncio.Queue()
        self._row: Row | None = None
        self._session: ChatSession | None = None
        self._run: Future[Any] | None = None
        self._pending: PendingRequest | None = None
        self._counts = (0, 0, False)
        self._turns = self._tool_calls = 0

    @classmethod
    def open_shared(
        cls,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        model: str = "corral",
        ignore: Collection[str] = (),
        passed_variables: Sequence[str] = (),
    ) -> "AgentRunner":
        """`ignore`: fields of a request that are ignored, though they cannot be honored."""
        if (agent is None) is (command is None):
            raise UserError("environment.options must have either `agent` (module:function) or `command` (a program)")
        for name in ignore:
            check_choice("ignore", name, tuple(REFUSED))
        return AgentRunner(agent, command, model, ignore, passed_variables)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        loop = asyncio.get_running_loop()

        def deliver(event: "PendingRequest | Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._session = ChatSession(self._agents.endpoint, deliver)
        self._run = self._agents.start(row, self._session, self._in_process)
        self._run.add_done_callback(deliver)
        event = await self._next()
        if not isinstance(event, PendingRequest):
            result_of(event)
            raise RuntimeError("the agent ended without a request")
        self._pending = event
        request = event.request
        if self._tool_prompt == "system" and request.tools:
            return with_instructions(request.messages, request.tools, self._style)
        self.tools = request.tools
        return request.messages

    def count_turn(self, num_before: int, num_generated: int, is_cut: bool) -> None:
        """Keeps the counts for the `usage` and `finish_reason` that the agent reads."""
        self._counts = (num_before, num_generated, is_cut)

    async def step(self, reply: str) -> StepResult:
        assert self._pending is not None, "step before reset"
        assert self._row is not None
        last = self._pending.request
        message = assistant_message(reply, last, self._style, self._turns)
        self._turns += 1
        self._tool_calls += len(calls_of(message))
        num_before, num_generated, is_cut = self._counts
        finish = "length" if is_cut else "tool_calls" if calls_of(message) else "stop"
        self._pending.answer.set_result(ChatReply(message, finish, num_before, num_generated))
        event = await self._next()
        if not isinstance(event, PendingRequest):
            return await self._end(result_of(event), reply)
        self._pending = event
        try:
            added = new_messages([*last.messages, message], event.request)
            if event.request.tools != last.tools:
                raise ChangedHistory("the request has other `tools` than the one before")
        except ChangedHistory as error:
            event.refuse(str(error))
            raise
        return StepResult(added, 0.0, done=False)

    async def close(self) -> None:
        self._row = None
        if self._run is not None:
            self._run.cancel()
        if self._session is not None:
            self._session.close()

    def summary(self) -> dict[str, float]:
        return {"turns": float(self._turns), "tool_calls": float(self._tool_calls)}

    async def _next(self) -> "PendingRequest | Future[Any]":
        """The agent's next request, or its end."""
        try:
            return await asyncio.wait_for(self._events.get(), self._timeout_s)
        except TimeoutError:
            late = f"the agent neither sent a request nor ended within {self._timeout_s:g} s"
            raise TimeoutError(with_place(late, place_of(self._agents.function))) from None

    async def _end(self, result: Any, reply: str) -> StepResult:
        """The reward that the agent returned, or else the reward function's for the last reply."""
        if is_number(result) or (isinstance(result, Mapping) and "score" in result):
            with blamed_on(self._agents.function):
                return final_step(read_result(result))
        assert self._row is not None
        return final_step(await self._pool.score(reply, self._row))


def result_of(run: "Future[Any]") -> Any:
    try:
        return run.result(timeout=0)
    except ToolFailed as error:  # whose text is that of the error in its process
        raise RuntimeError(f"the agent failed: {error}") from error
    except Exception as error:
        raise RuntimeError(f"the agent failed: {error_line(error)}") from error


# --- running agents


class AgentRunner:
    """Shared by the trajectories of a worker: the endpoint, and the processes in which agents run."""

    def __init__(
        self,
        agent: str | None,
        command: Sequence[str] | None,
        model: str,
        ignored: Collection[str] = (),
        variables: Sequence[str] = (),
    ) -> None:
        """`variables`: names of environment variables that an agent gets besides those that are no secret."""
        self.function = load_agent(agent) if agent is not None else None
        self._command = checked_command(command) if command is not None else []
        self._model = model
        bypass_proxies(HOST)
        self._variables = allowed_environment(variables)
        limits = ToolLimits(False, True, (), None, 0, tuple(variables))
        self._processes = None if agent is None else ToolProcesses([agent], limits, setting=SETTING)
        self.endpoint = ChatEndpoint(model, ignored)
        self._loop = LoopThread("agents")

    def start(self, row: Row, session: ChatSession, in_process: bool) -> "Future[Any]":
        """The agent's result, to come. Cancelling it ends the agent's process."""
        values: dict[str, Any] = {
            "row": row,
            "base_url": self.endpoint.base_url,
            "api_key": session.key,
            "model": self._model,
        }
        if self.function is None:
            names = {"OPENAI_BASE_URL": "base_url", "OPENAI_API_KEY": "api_key", "OPENAI_MODEL": "model"}
            variables = self._variables | {variable: values[name] for variable, name in names.items()}
            return self._loop.submit(run_program(self._command, row, variables))
        parameters = inspect.signature(self.function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments = {name: value for name, value in values.items() if takes_all or name in parameters}
        if not in_process:
            return self._loop.submit(self._run_function(arguments))
        if inspect.iscoroutinefunction(self.function):
            return self._loop.submit(without_exit(self.function(**arguments)))
        return call_in_thread(functools.partial(self.function, **arguments), "agent")

    async def _run_function(self, arguments: Mapping[str, Any]) -> Any:
        """Runs the function in a process of its own, which ends with it."""
        assert self._processes is not None
        process = await self._processes.fork_async()
        running = call_in_thread(functools.partial(process.request, LONGEST_S, "run", 0, dict(arguments)), "agent")
        try:
            return await asyncio.wrap_future(running)
        finally:
            call_in_thread(process.end if running.done() else process.kill, "agent process")

    def close(self) -> None:
        self.endpoint.close()
        self._loop.close()
        if self._processes is not None:
            self._processes.close()


def load_agent(spec: str) -> Callable[..., Any]:
    function = load_object(spec, SETTING)
    if not callable(function):
        raise UserError(f"{SETTING}: `{spec}` is not a function")
    for parameter in inspect.signature(function).parameters.values():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variable and parameter.name not in AGENT_PARAMETERS:
            raise UserError(
                f"{SETTING}: `{spec}` needs `{parameter.name}`; an agent is given {', '.join(AGENT_PARAMETERS)}"
            )
    return function  # type: ignore[no-any-return]


def checked_command(command: Sequence[str]) -> list[str]:
    setting = "environment.options.command"
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise UserError(f"{setting} must be a list of words, such as [python, agent.py]")
    program, *rest = command
    if program == "python":  # the one that runs Corral, whatever PATH says
        program = sys.executable
    if shutil.which(program) is None:
        raise UserError(f"{setting}: there is no program `{program}`")
    return [program, *rest]


def bypass_proxies(host: str) -> None:
    """Requests to the endpoint must not go through a proxy, which would look for it on its own machine and learn the
    key. Agents that are functions read this process's environment, programs inherit these variables of it."""
    names = ("no_proxy", "NO_PROXY")  # where there is the first, many do not look at the second
    bypassed = [one.strip() for name in names for one in os.environ.get(name, "").split(",") if one.strip()]
    for name in names:
        os.environ[name] = "*" if "*" in bypassed else ",".join(dict.fromkeys([*bypassed, host]))


async def run_program(command: Sequence[str], row: Row, variables: Mapping[str, str]) -> Any:
    """The last line of its output, if that is JSON with `score`. RuntimeError if it ends with another code than 0."""
    # Files, because a pipe is open until everything that the program started has ended, too.
    with TemporaryFile() as row_file, TemporaryFile() as output, TemporaryFile() as errors:
        fields = {"prompt": for_api(row.prompt), "answer": row.answer, "source": row.source, "extra": row.extra}
        row_file.write(json.dumps(fields, default=str).encode() + b"\n")
        row_file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command_dying_with_parent(command),
            stdin=row_file,
            stdout=output,
            stderr=errors,
            env=variables,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            signal_group(process.pid)
            await process.wait()
        if code:
            raise RuntimeError(with_place(f"it {describe_exit(code)}: {last_line(errors)}", place_in_traceback(errors)))
        try:
            result = json.loads(last_line(output))
        except ValueError:
            return None
        return result if isinstance(result, dict) and "score" in result else None


def place_in_traceback(errors: IO[bytes]) -> str | None:
    """The innermost place in a file of the user's, where a Python program printed a traceback."""
    frames = [FRAME.match(line) for line in last_lines(errors, TRACEBACK_LINES)]
    found = [frame for frame in frames if frame is not None and is_users_file(frame["file"])]
    return f"{Path(found[-1]['file']).name}:{found[-1]['line']}" if found else None


def last_line(file: IO[bytes]) -> str:
    lines = last_lines(file, 1)
    return lines[0].strip() if lines else "(it printed nothing)"
