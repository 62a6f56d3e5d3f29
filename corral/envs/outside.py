"""Running somebody else's agent for one row: a function in a thread or an event loop, or a program.

An `async` function runs in an event loop that all of them share and nothing else uses, a plain one in a thread of its
own, so one that blocks keeps neither the driver nor the endpoint from their work. A program is killed with all that it
started when its trajectory is over; a thread cannot be killed: its requests are refused from then on.
"""

import asyncio
import functools
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from tempfile import TemporaryFile
from typing import IO, Any

from corral.child_process import command_dying_with_parent, describe_exit, last_lines, signal_group
from corral.data.plugins import load_object, without_exit
from corral.data.rows import Row
from corral.envs.endpoint import HOST, Endpoint, Session
from corral.envs.threads import LoopThread, call_in_thread
from corral.recipe.errors import UserError

OFFERED = ("row", "base_url", "api_key", "model")


class Agents:
    """What the trajectories of a worker share: the endpoint, and where agents run."""

    def __init__(
        self, agent: str | None, command: Sequence[str] | None, model: str, ignored: Collection[str] = ()
    ) -> None:
        self._run = load_agent(agent) if agent is not None else None
        self._command = checked_command(command) if command is not None else []
        self._model = model
        spare_from_proxies(HOST)
        self.endpoint = Endpoint(model, ignored)
        self._loop = LoopThread("agents")

    def start(self, row: Row, session: Session) -> "Future[Any]":
        """The agent's result, to come. Cancelling it ends a program or an `async` function."""
        values = {"row": row, "base_url": self.endpoint.base_url, "api_key": session.key, "model": self._model}
        if self._run is None:
            return self._loop.submit(run_program(self._command, row, program_variables(values)))
        parameters = inspect.signature(self._run).parameters
        everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        asked = {name: value for name, value in values.items() if everything or name in parameters}
        if inspect.iscoroutinefunction(self._run):
            return self._loop.submit(without_exit(self._run(**asked)))
        return call_in_thread(functools.partial(self._run, **asked), "agent")

    def close(self) -> None:
        self.endpoint.close()
        self._loop.close()


def load_agent(spec: str) -> Callable[..., Any]:
    function = load_object(spec, "environment.options.agent")
    if not callable(function):
        raise UserError(f"environment.options.agent: `{spec}` is not a function")
    for parameter in inspect.signature(function).parameters.values():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variable and parameter.name not in OFFERED:
            raise UserError(
                f"environment.options.agent: `{spec}` needs `{parameter.name}`; an agent is given {', '.join(OFFERED)}"
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


def spare_from_proxies(host: str) -> None:
    """A proxy would look for the endpoint on its own machine, and be told the key. Agents that are functions read this
    process's environment, programs inherit it."""
    names = ("no_proxy", "NO_PROXY")  # where there is the first, many do not look at the second
    spared = [one.strip() for name in names for one in os.environ.get(name, "").split(",") if one.strip()]
    for name in names:
        os.environ[name] = "*" if "*" in spared else ",".join(dict.fromkeys([*spared, host]))


def program_variables(values: Mapping[str, Any]) -> dict[str, str]:
    variables = {
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_KEY": values["api_key"],
        "OPENAI_MODEL": values["model"],
    }
    return {**os.environ, **variables}


async def run_program(command: Sequence[str], row: Row, variables: Mapping[str, str]) -> Any:
    """The last line of its output, if that is JSON with `score`. RuntimeError if it ends with another code than 0."""
    # Files, because a pipe is open until everything that the program started has ended, too.
    with TemporaryFile() as row_file, TemporaryFile() as output, TemporaryFile() as errors:
        row_file.write(row_as_json(row))
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
            raise RuntimeError(f"it {describe_exit(code)}: {last_line(errors)}")
        return result_in(last_line(output))


def last_line(file: IO[bytes]) -> str:
    lines = last_lines(file, 1)
    return lines[0].strip() if lines else "(it printed nothing)"


def row_as_json(row: Row) -> bytes:
    fields = {"prompt": row.prompt, "answer": row.answer, "source": row.source, "extra": row.extra}
    return json.dumps(fields, default=str).encode() + b"\n"


def result_in(line: str) -> Any:
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and "score" in result else None
