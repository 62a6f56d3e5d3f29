"""The tools environment: what the model is told of its tools, and what becomes of its calls, sound or not."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from deadlines import wait_until, within
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from torch import Tensor

from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs import tool_processes
from corral.envs.base import EnvSet, StepResult
from corral.envs.tool_calls import Style, function_schema, parse_reply, problem_with
from corral.envs.tool_processes import ToolFailed, ToolTemplate
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards import code
from corral.rewards.scorer_pool import InProcessScorer
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Completion, FinishReason, Sampling

TOOLS = '''
import asyncio
import enum
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b (int): The second,
            or one.
    """
    return a + b


async def echo(text: str) -> str:
    await asyncio.sleep(0)
    return text


def person() -> dict:
    return {"name": "Ada", "age": 36}


def fail():
    raise ValueError("no such thing")


def leave():
    sys.exit(3)


def sleep(seconds: float):
    time.sleep(seconds)


async def doze():
    await asyncio.sleep(3600)


def match(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def variable(of: str) -> str | None:
    return os.environ.get(of)


def process() -> int:
    return os.getpid()


def connect(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        return connection.recv(100).decode()


def read_file(path: str) -> str:
    with open(path) as file:
        return file.read()


def write_file(path: str) -> str:
    with open(os.path.join(tempfile.gettempdir(), path), "w") as file:
        file.write("x")
    return file.name


def take(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


def crash():
    os.abort()


def stop_all(again: bool):
    os.kill(-1, signal.SIGSTOP)
    while again:
        os.kill(-1, signal.SIGSTOP)


def cpu_seconds() -> int:
    return int(subprocess.check_output(["sh", "-c", "ulimit -t"]))


def fill() -> str:
    try:
        for number in range(5000):
            open(os.path.join(tempfile.gettempdir(), str(number)), "w").close()
    except OSError as error:
        return error.strerror


def start(seconds: int) -> int:
    return subprocess.Popen(["sleep", str(seconds)]).pid


class Notes:
    """SQLite connections may be used in the thread that made them only."""

    def __init__(self, row):
        self.table = sqlite3.connect(":memory:")
        self.table.execute("create table notes (note text)")
        self.table.execute("insert into notes values (?)", [row.answer])

    def write(self, note: str) -> str:
        self.table.execute("insert into notes values (?)", [note])
        return "written"

    def read(self) -> list[str]:
        return [note for note, in self.table.execute("select note from notes")]

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def close(self):
        self.table.close()
        print("notes are closed")


class Starter:
    def start(self, seconds: int) -> int:
        return start(seconds)


async def together(number: int) -> int:
    folder = os.path.dirname(tempfile.gettempdir())
    open(os.path.join(folder, f"here-{os.getpid()}"), "w").close()
    while sum(name.startswith("here-") for name in os.listdir(folder)) < number:
        await asyncio.sleep(0.01)
    return os.getpid()


async def compute() -> None:
    while True:
        pass


async def secret(port: int) -> list:
    try:
        await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return [os.environ.get("HF_TOKEN"), type(error).__name__]


class Clock:
    async def now(self) -> int:
        self.loop = asyncio.get_running_loop()
        return 12

    async def same_loop(self) -> bool:
        return self.loop is asyncio.get_running_loop()

    async def close(self):
        await asyncio.sleep(0)
        print("clock is closed")


class Broken:
    def __init__(self):
        raise ValueError("no session today")

    def use(self):
        pass


def path(where: "pathlib.Path"):
    pass


def many(*numbers: int):
    pass


def enumerated(colour: frozenset):
    pass


class Colour(enum.Enum):
    RED = 1


def paint(colour: Literal[Colour.RED]):
    pass


class Stubborn:
    def use(self):
        pass

    def close(self):
        raise ValueError("cannot let go")


class Tidy:
    def put(self):
        pass

    def close(self):
        print("tidied up")


class Nothing:
    pass
'''
ROW = Row([Message(role="user", content="2 + 3?")], "5", "", {})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tools") / "some_tools.py"
    file.write_text(TOOLS)
    return file


Play = Callable[..., tuple[list[StepResult], dict[str, float]]]


@pytest.fixture
def play(file: Path) -> Play:
    def play(
        replies: Sequence[str], *names: str, late_s: float | None = None, **options: Any
    ) -> tuple[list[StepResult], dict[str, float]]:
        """`late_s`: the seconds of the first reply, whose call hangs; those of the others are not changed."""

        async def play() -> tuple[list[StepResult], dict[str, float]]:
            env: Any = envs.factory_for(ROW).make()
            await env.reset(ROW, 0)
            results, usual_s = [], env._timeout_s
            try:
                for reply in replies:
                    env._timeout_s = usual_s if results or late_s is None else late_s
                    results.append(await env.step(reply))
                return results, env.summary()
            finally:
                await env.close()

        envs = environments(file, *names, **options)
        try:
            return asyncio.run(play())
        finally:
            envs.close()

    return play


def environments(file: Path, *names: str, **options: Any) -> EnvSet:
    tools = [f"{file}:{name}" for name in names or ("add",)]
    environment = Environment(name="tools", env=options.pop("env", []), options={"tools": tools, **options})
    return EnvSet({"": environment}, {"": InProcessScorer(Reward(name="exact"))}, Rollout())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def content(result: StepResult) -> str:
    [message] = result.messages
    return message["content"]


# What the model is told.


def test_a_function_becomes_a_json_schema(file: Path) -> None:
    with closing(environments(file, "add")) as envs:
        [tool] = envs.factory_for(ROW).make().tools  # type: ignore[attr-defined]
    assert tool == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second, or one.", "default": 1},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_type_hints_become_types_of_json() -> None:
    def tool(
        text: str,
        number: float | None,
        unit: Literal["C", "F"],
        words: list[str],
        table: dict[str, int],
        anything,  # type: ignore[no-untyped-def]
        *,
        flag: bool = False,
    ) -> None: ...

    schema = function_schema(tool, "tool")["function"]
    assert schema["description"] == ""
    assert schema["parameters"]["properties"] == {
        "text": {"type": "string"},
        "number": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {},
        "flag": {"type": "boolean", "default": False},
    }
    assert schema["parameters"]["required"] == ["text", "number", "unit", "words", "table", "anything"]


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (["add", "add"], {}, "there are two tools `add`"),
        (["path"], {}, "tool `path`: its type hints can't be read"),
        (["many"], {}, "the model can't name its parameter"),
        (["enumerated"], {}, "its parameter `colour` is .*frozenset.*, which a model cannot write"),
        (["paint"], {}, "its parameter `colour` may be `<Colour.RED: 1>`, which a model cannot write"),
        (["Nothing"], {}, "has no public methods"),
        (["ad"], {}, "did you mean `add`"),
        (["add"], {"style": "yaml"}, "environment.options.style must be hermes or openai, not 'yaml'"),
        (["add"], {"result_role": "robot"}, "environment.options.result_role must be tool or user"),
        (["add"], {"readable": "/usr"}, "environment.options.readable must be a list of folders"),
        (["add"], {"readable": ["/no/such"]}, "environment.options.readable: /no/such is not a folder"),
        (["echo"], {"kept_part": "all"}, r"options\.kept_part must be beginning or end or both_ends, not 'all'"),
        (["add"], {"told_by": "system"}, "'told_by'; `told_by` is now `tool_prompt`"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused_before_training(
    file: Path, names: list[str], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        environments(file, *names, **options)


def test_where_the_template_knows_no_tools_a_system_message_describes_them(file: Path) -> None:
    with closing(environments(file, "add", tool_prompt="system")) as envs:
        env: Any = envs.factory_for(ROW).make()
        system, question = asyncio.run(env.reset(ROW, 0))
    assert env.tools == []
    assert '"name": "add"' in system["content"]
    assert "<tool_call>" in system["content"]
    assert question == ROW.prompt[0]


# What becomes of its calls.


def test_a_call_is_answered_and_a_reply_without_one_is_the_answer(play: Play) -> None:
    (first, last), summary = play([f"Let me see. {call('add', a=2, b=3)}", "5"])
    assert first == StepResult([Message(role="tool", content="5")], 0.0, done=False)
    assert last == StepResult([], 1.0, done=True)
    assert summary == {"turns": 2, "tool_calls": 1, "valid_calls": 1, "tool_errors": 0}


def test_several_calls_in_a_turn_are_answered_in_order(play: Play) -> None:
    [result], _ = play([call("add", a=2) + call("echo", text="hello") + call("person")], "add", "echo", "person")
    assert [message["content"] for message in result.messages] == ["3", "hello", '{"name": "Ada", "age": 36}']


def test_results_can_come_as_a_users_message(play: Play) -> None:
    [result], _ = play([call("add", a=2) + call("add", a=3)], result_role="user")
    assert result.messages == [
        Message(
            role="user",
            content="<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>",
        )
    ]
    assert result.closing == "\n</tool_response>"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "Error: not valid JSON: Expecting property name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "Error: the call has no name"),
        ("<tool_call>[1]</tool_call>", "Error: a call is an object"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "Error: its arguments must be an object"),
        ("<tool_call>", "Error: not valid JSON"),
        (call("ad", a=1), "Error: there is no tool `ad`; did you mean `add`?; there are add"),
        (call("add"), "Error: `add` was not called: a is missing"),
        (call("add", a="1"), 'Error: `add` was not called: a must be an integer, not "1"'),
        (call("add", a=True), "Error: `add` was not called: a must be an integer, not true"),
        (call("add", a=1, c=2), "Error: `add` was not called: there is no argument c; it takes a, b"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model_and_costs_the_penalty(
    play: Play, reply: str, expected: str
) -> None:
    (first, last), summary = play([reply, "5"], format_penalty=0.25)
    assert content(first).startswith(expected)
    assert (first.reward, first.done, first.error) == (-0.25, False, None)
    assert last.reward == 1.0
    assert (summary["tool_calls"], summary["valid_calls"], summary["tool_errors"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (call("fail"), "Error: `fail` failed: ValueError: no such thing (some_tools.py:"),
        (call("leave"), "Error: `leave` failed: RuntimeError: it called sys.exit(3)"),
        (call("sleep", seconds=30), "Error: `sleep` did not answer within 0.2 s"),
        (call("doze"), "Error: `doze` did not answer within 0.2 s"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_model_and_costs_nothing(play: Play, reply: str, expected: str) -> None:
    names, timeout_s = ("fail", "leave", "sleep", "doze"), 0.2 if "within" in expected else within(20)
    (first, last), summary = play([reply, "5"], *names, format_penalty=0.25, tool_timeout_s=timeout_s)
    assert content(first).startswith(expected)
    assert (first.reward, first.done, first.error) == (0.0, False, None)
    assert last.reward == 1.0
    assert (summary["valid_calls"], summary["tool_errors"]) == (1, 1)


def test_long_results_and_too_many_calls_are_cut(play: Play) -> None:
    replies = [call("echo", text="x" * 100), call("echo", text="y") * 3]
    (long, many), _ = play(replies, "echo", max_result_characters=10, max_calls_per_turn=2)
    assert content(long) == "x" * 10 + "\n... (the first 10 of 100 characters)"
    assert [message["content"] for message in many.messages][:2] == ["y", "y"]
    assert many.messages[2]["content"].startswith("Error: not")


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ("beginning", "abcde\n... (the first 5 of 10 characters)"),
        ("end", "(the last 5 of 10 characters) ...\nfghij"),
        ("both_ends", "ab\n... (6 characters are left out) ...\nij"),
    ],
)
def test_the_part_of_a_long_result_that_is_kept_can_be_chosen(play: Play, kept: str, shown: str) -> None:
    replies = [call("echo", text="abcdefghij"), call("echo", text="abcde")]
    (long, short), _ = play(replies, "echo", max_result_characters=5, kept_part=kept)
    assert (content(long), content(short)) == (shown, "abcde")


def test_half_a_character_from_the_model_is_no_problem(play: Play) -> None:
    [result], _ = play(['<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>'], "echo")
    assert content(result) == "?"


# Sessions.


@pytest.mark.slow
def test_a_class_has_one_object_for_each_trajectory(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def play() -> tuple[str, str]:
        first, second = (envs.factory_for(ROW).make() for _ in range(2))
        await asyncio.gather(first.reset(ROW, 0), second.reset(ROW, 1))
        await first.step(call("write", note="mine"))
        results = [content(await env.step(call("read"))) for env in (first, second)]
        await asyncio.gather(first.close(), second.close())
        return results[0], results[1]

    envs = environments(file, "Notes")
    assert [tool["function"]["name"] for tool in envs.factory_for(ROW).make().tools] == ["write", "read", "nap"]  # type: ignore[attr-defined]
    before = threading.active_count()
    assert asyncio.run(play()) == ('["5", "mine"]', '["5"]')
    envs.close()
    assert capfd.readouterr().err.count("notes are closed") == 2
    for thread in threading.enumerate():
        if thread.name.startswith("tool"):
            thread.join(within(5))
    assert threading.active_count() < before


def test_a_session_that_is_stuck_is_killed_and_says_so(file: Path) -> None:
    async def play() -> list[str]:
        env: Any = envs.factory_for(ROW).make()
        await env.reset(ROW, 0)
        env._timeout_s = 0.2
        said = [content(await env.step(call("nap", seconds=600))), content(await env.step(call("read")))]
        await env.close()
        return said

    envs = environments(file, "Notes")
    late, gone = asyncio.run(play())
    assert late == "Error: `nap` did not answer within 0.2 s"
    assert gone == ("Error: `read` failed: the session has ended with an earlier call that was too late or crashed")
    wait_until(lambda: children_of_sandbox(envs) == 0)
    envs.close()


def test_a_session_that_cannot_be_closed_keeps_no_other_open(play: Play, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ToolFailed, match="ValueError: cannot let go"):
        play([], "Stubborn", "Tidy")
    assert "tidied up" in capfd.readouterr().err


def test_a_class_of_async_methods_has_an_event_loop_in_its_process(
    play: Play, capfd: pytest.CaptureFixture[str]
) -> None:
    results, _ = play([call("now"), call("same_loop")], "Clock")
    assert [content(result) for result in results] == ["12", "true"]
    assert "clock is closed" in capfd.readouterr().err


def test_an_async_tool_is_locked_in_as_any_other(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    (late, found), _ = play([call("compute"), call("secret", port=9)], "compute", "secret", late_s=1)
    assert content(late) == "Error: `compute` did not answer within 1 s"
    assert content(found) == '[null, "PermissionError"]'


def test_async_tools_of_many_trajectories_wait_at_the_same_time(file: Path) -> None:
    """Each returns when all of them have begun."""

    async def play() -> list[str]:
        games = [envs.factory_for(ROW).make() for _ in range(20)]
        await asyncio.gather(*(game.reset(ROW, 0) for game in games))
        results = await asyncio.gather(*(game.step(call("together", number=20)) for game in games))
        await asyncio.gather(*(game.close() for game in games))
        return [content(result) for result in results]

    envs = environments(file, "together")
    processes = asyncio.run(play())
    envs.close()
    assert len(set(processes)) == 20
    assert str(os.getpid()) not in processes


def test_a_session_that_cannot_be_opened_is_the_trajectorys_error(file: Path) -> None:
    [trajectory] = drive(environments(file, "Broken"), ["5"])
    assert trajectory.error is not None
    assert trajectory.error.startswith("reset: ")
    assert "ValueError: no session today (some_tools.py:" in trajectory.error


# What is contained.


def children_of_sandbox(envs: EnvSet) -> int:
    """Processes that the template has forked and not ended."""
    template = envs.factories[""].shared[0].processes._template  # type: ignore[attr-defined]
    return len(psutil.Process(template._process.pid).children(recursive=True)) - 2  # its first process, and itself


def test_a_process_of_a_template_that_died_ends_none_of_the_next_one(file: Path) -> None:
    envs = environments(file, "match")
    processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
    assert processes.call(0, {"pattern": "a", "text": "a"}, within(5)) == "true"
    old = processes.fork()
    all_of_it = psutil.Process(processes._template._process.pid).children(recursive=True)
    processes._template.kill()
    psutil.wait_procs(all_of_it, within(10))
    assert processes.call(0, {"pattern": "a", "text": "a"}, within(5)) == "true"
    new = [processes.fork() for _ in range(3)]  # within its sandbox, one of them has the process id of the old one
    assert len(processes._idle) == 1
    old.end()
    assert [one.request(within(5), "call", 0, None, {"pattern": "a", "text": "a"}) for one in new] == ["true"] * 3
    envs.close()


def test_a_process_that_dies_with_its_template_before_it_answers_is_forked_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = environments(file, "match")
    processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
    template = processes._template

    def fork(connection: socket.socket) -> int:
        pid = int(ToolTemplate.fork(template, connection))
        all_of_it = psutil.Process(template._process.pid).children(recursive=True)
        template.kill()
        psutil.wait_procs(all_of_it, within(10))
        return pid

    monkeypatch.setattr(template, "fork", fork)
    assert processes.call(0, {"pattern": "a", "text": "a"}, within(5)) == "true"
    assert processes._template is not template
    envs.close()


@pytest.mark.slow
def test_a_tool_that_fills_the_sandbox_with_files_costs_other_processes_until_it_ends(file: Path) -> None:
    with closing(environments(file, "fill")) as envs:
        processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
        full = processes.fork()
        assert full.request(within(10), "call", 0, None, {}) == "No space left on device"
        for _ in range(300):  # more than the template may have open files
            with pytest.raises(
                ToolFailed, match=r"no process for it: OSError: \[Errno 28\] No space left on device \("
            ):
                processes.fork()
        full.end()
        processes.fork()


@pytest.mark.deadline("the template has a second to fork")
@pytest.mark.slow
def test_a_process_that_hangs_as_it_is_forked_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_sandbox = 'os.environ["HOME"] == "/sandbox" and os.register_at_fork(after_in_child=lambda: time.sleep(60))'
    (tmp_path / "hangs.py").write_text(f"import os, time\n{in_sandbox}\ndef tool(): ...\n")
    with closing(environments(tmp_path / "hangs.py", "tool")) as envs:
        processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
        template, forked = processes._template, []
        monkeypatch.setattr(template, "fork", lambda one: forked.append(ToolTemplate.fork(template, one)) or forked[-1])
        monkeypatch.setattr(tool_processes, "START_TIMEOUT_S", 1.0)
        with pytest.raises(TimeoutError):
            processes.fork()
        assert len(forked) == 1


def test_a_reset_that_is_cancelled_while_its_process_is_forked_leaves_none(file: Path) -> None:
    async def cancel() -> None:
        resetting = asyncio.ensure_future(envs.factory_for(ROW).make().reset(ROW, 0))
        while processes._thread._jobs.empty():
            await asyncio.sleep(0.01)
        resetting.cancel()
        with suppress(asyncio.CancelledError):
            await resetting

    with closing(environments(file, "Notes")) as envs:
        processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
        may_fork = threading.Event()
        processes._thread.submit(may_fork.wait)
        asyncio.run(cancel())
        may_fork.set()
        for thread in threading.enumerate():
            if thread.name == "tool process":
                thread.join(within(10))
        assert children_of_sandbox(envs) == 0


def test_a_tool_that_stops_all_processes_holds_up_no_other_call(play: Play) -> None:
    began = time.monotonic()
    replies = [call("stop_all", again=True), call("stop_all", again=False), call("crash"), call("process")]
    (late, _, crashed, other), _ = play(replies, "stop_all", "crash", "process", late_s=1)
    assert "killed by signal 6 (SIGABRT" in content(crashed)
    assert content(late) == "Error: `stop_all` did not answer within 1 s"
    assert content(other).isdecimal()
    assert time.monotonic() - began < within(20)  # each end and each fork waited for 120 s


def test_a_template_that_does_not_answer_costs_no_call_more_than_its_deadline(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_processes, "REPLY_S", 1.0)
    with closing(environments(file, "sleep", "process", sandbox=False)) as envs:
        processes = envs.factories[""].shared[0].processes  # type: ignore[attr-defined]
        late = processes.fork()
        os.kill(processes._template._process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            late.request(0.2, "call", 0, None, {"seconds": 600})
        assert time.monotonic() - began < within(0.9)
        assert int(processes.call(1, {}, within(5))) > 1


def test_a_regular_expression_without_end_is_over_at_its_deadline(play: Play) -> None:
    began = time.monotonic()
    endless = call("match", pattern="(a+)+b", text="a" * 28)
    [late, next_one], _ = play([endless, call("match", pattern="a+", text="aa")], "match", late_s=1)
    assert content(late) == "Error: `match` did not answer within 1 s"
    assert content(next_one) == "true"
    assert time.monotonic() - began < within(20)  # with the start of the processes; it would take a minute


def test_tools_see_no_secret_of_the_environment_but_what_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    [result], _ = play([call("variable", of="HF_TOKEN") + call("variable", of="MY_KEY")], "variable")
    assert [message["content"] for message in result.messages] == ["null", "null"]
    [result], _ = play([call("variable", of="MY_KEY")], "variable", env=["MY_KEY"])
    assert content(result) == "secret"


def test_tools_have_a_network_only_if_the_recipe_says_so(play: Play) -> None:
    def serve() -> None:
        with listening.accept()[0] as connection:
            connection.sendall(b"hello")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        reply = call("connect", port=listening.getsockname()[1])
        [refused], _ = play([reply], "connect")
        [result], _ = play([reply], "connect", network=True)
    assert "PermissionError" in content(refused)
    assert content(result) == "hello"


def test_tools_read_what_they_are_to_see_and_write_to_a_folder_of_their_own(
    play: Play, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("found")
    read = call("read_file", path=str(tmp_path / "secret"))
    [hidden], _ = play([read], "read_file")
    [shown], _ = play([read], "read_file", readable=[str(tmp_path)])
    assert "FileNotFoundError" in content(hidden)
    assert content(shown) == "found"
    proc = call("read_file", path=f"/proc/{os.getpid()}/environ")
    own = call("write_file", path=str(file.parent / "new.py"))
    [result], _ = play([proc + own + call("write_file", path="notes")], "read_file", "write_file")
    environ, refused, written = (message["content"] for message in result.messages)
    assert "FileNotFoundError" in environ
    assert "OSError: [Errno 30] Read-only file system" in refused
    assert written.startswith("/sandbox/")


def test_tools_have_limits_of_memory_and_a_crash_costs_its_own_call(play: Play) -> None:
    replies = [call("take", megabytes=900), call("crash"), call("take", megabytes=1)]
    (too_much, crashed, enough), summary = play(replies, "take", "crash", memory_mb=512)
    assert "MemoryError" in content(too_much)
    assert "its process died: it was killed by signal 6 (SIGABRT" in content(crashed)
    assert content(enough) == str(1 << 20)
    assert (summary["tool_calls"], summary["tool_errors"]) == (3, 2)


@pytest.mark.parametrize("sandbox", [True, False])
def test_what_a_tool_starts_may_compute_as_long_as_its_call(play: Play, sandbox: bool) -> None:
    results, _ = play([call("cpu_seconds")] * 2, "cpu_seconds", tool_timeout_s=20, sandbox=sandbox)
    assert all(21 <= int(content(result)) <= 25 for result in results)


def test_without_a_sandbox_tools_are_killed_and_limited_all_the_same(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    replies = [call("sleep", seconds=30), call("variable", of="HF_TOKEN"), call("take", megabytes=900)]
    results, _ = play(replies, "sleep", "variable", "take", memory_mb=512, sandbox=False, late_s=0.5)
    late, variable, too_much = map(content, results)
    assert late == "Error: `sleep` did not answer within 0.5 s"
    assert variable == "null"
    assert "MemoryError" in too_much


def test_for_a_debugger_tools_run_in_this_process(file: Path) -> None:
    async def play() -> tuple[str, str]:
        make = envs.factory_for(ROW).make_in_process
        assert make is not None
        env = make()
        await env.reset(ROW, 0)
        results = content(await env.step(call("process"))), content(await env.step(call("read")))
        await env.close()
        return results

    envs = environments(file, "process", "Notes")
    assert asyncio.run(play()) == (str(os.getpid()), '["5"]')
    envs.close()


def test_what_a_session_has_started_ends_with_it(file: Path) -> None:
    async def play() -> tuple[int, int]:
        env = envs.factory_for(ROW).make()
        await env.reset(ROW, 0)
        await env.step(call("start", seconds=600))
        before = children_of_sandbox(envs)
        await env.close()
        deadline = time.monotonic() + within(10)  # the kernel takes a moment
        while (after := children_of_sandbox(envs)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return before, after

    envs = environments(file, "Starter")
    assert asyncio.run(play()) == (2, 0)
    envs.close()


def test_where_tools_can_not_be_locked_in_they_are_refused_with_what_to_do(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "sandbox_init.py"
    text = Path(code.__file__).with_name("sandbox_init.py").read_text()
    broken.write_text(text.replace("build_root(settings)", 'raise OSError("no mounts here")'))
    monkeypatch.setattr(code, "__file__", str(tmp_path / "code.py"))
    with pytest.raises(UserError, match=r"no mounts here.*The sandbox of `tools` needs user.*sandbox: false"):
        environments(file, "add")


# Both styles.


@pytest.mark.parametrize(
    ("reply", "style", "expected"),
    [
        (call("add", a=1), "hermes", [("add", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "hermes", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', "hermes", [("f", {}), ("g", {})]),
        ('{"name": "f", "arguments": {}}', "hermes", []),
        ('{"name": "f", "arguments": {"a": 1}}', "openai", [("f", {"a": 1})]),
        ('```json\n{"name": "f", "parameters": {"a": 1}}\n```', "openai", [("f", {"a": 1})]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "openai", [("f", {}), ("g", {})]),
        (
            'Well. {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}',
            "openai",
            [("f", {})],
        ),
        ("The answer is 5.", "openai", []),
        ('{"answer": 5}', "openai", []),
        ('{"name": "Ada"}', "openai", []),
        ("[1, 2]", "openai", []),
        ("[]", "openai", []),
    ],
)
def test_calls_are_found_in_both_styles(reply: str, style: Style, expected: list[tuple[str, Any]]) -> None:
    calls = parse_reply(reply, style).calls
    assert all(one.problem is None for one in calls)
    assert [(one.name, one.arguments) for one in calls] == expected


@pytest.mark.parametrize("reply", ['{"tool_calls": [', '{"tool_calls": 1}', '{"tool_calls": [1]}', '{"name": "f", '])
def test_a_malformed_call_in_the_openai_style_is_seen_as_one(reply: str) -> None:
    [one] = parse_reply(reply, "openai").calls
    assert one.problem is not None


@pytest.mark.slow
@given(st.text(alphabet='<>/tool_cal{}[]":,nameargumts \n1\\') | st.text(), st.sampled_from(["hermes", "openai"]))
def test_no_reply_is_too_strange_to_be_read(reply: str, style: Style) -> None:
    for text in (reply, f"<tool_call>{reply}</tool_call>", f'{{"tool_calls": {reply}'):
        parse_reply(text, style)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(JSON)
def test_arguments_are_judged_as_a_json_schema_validator_would(value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def tool(a: list[int], b: dict[str, str], c: str | None, d: Literal["x", 1], e: bool, f: float) -> None: ...

    schema = function_schema(tool, "tool")["function"]["parameters"]
    sound = {"a": [1], "b": {"c": "d"}, "c": None, "d": "x", "e": True, "f": 1}
    for name in sound:
        if isinstance(value, float) and value.is_integer():
            continue  # an integer to a validator, and not to a Python function
        given = {**sound, name: value}
        # Its items are judged in the same way.
        if name in "ab" and any(isinstance(v, float) for v in (value if isinstance(value, list) else ())):
            continue
        assert (problem_with(given, schema) is None) is jsonschema.Draft202012Validator(schema).is_valid(given), name


# With the driver.


@dataclass
class ScriptedEngine:
    """An engine that says what it is told to. Tokens, masks and rewards are still the driver's."""

    replies: list[str]
    tokenizer: Any = field(default_factory=tiny_tokenizer)

    async def generate(self, tokens: list[int], sampling: Sampling, seed: int, **more: Any) -> Completion:
        said = [*self.tokenizer.encode(self.replies.pop(0), add_special_tokens=False), self.tokenizer.eos_token_id]
        return Completion(said, [-1.0] * len(said), FinishReason.STOP_TOKEN, [0] * len(said))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        return 0.0

    def pause(self) -> None: ...

    def resume(self) -> None: ...


TEMPLATE_WITH_TOOLS = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>\n{% endif %}"
)


def drive(envs: EnvSet, replies: list[str], row: Row = ROW) -> list[Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE_WITH_TOOLS + str(tokenizer.chat_template)
    driver = RolloutDriver(
        engine=ScriptedEngine(replies),
        envs=envs,
        chat=ChatRenderer(tokenizer, True),
        max_turns=4,
        max_prompt_tokens=200,
        max_response_tokens=400,
        seed=7,
    )
    prompt = Prompt(0, 0, row, render_prompt(tokenizer, row, True))
    with closing(envs):
        return asyncio.run(driver.roll_out([prompt], 1, Sampling(max_tokens=400)))


def test_a_row_with_tools_of_its_own_is_refused(file: Path) -> None:
    row = replace(ROW, tools=[{"type": "function", "function": {"name": "multiply"}}])
    [trajectory] = drive(environments(file, "add"), ["5"], row)
    assert "set `data.tools_key: null`" in str(trajectory.error)


def test_calls_are_trained_on_and_results_are_not(file: Path) -> None:
    replies = [call("add", a=2, b=3), "5"]
    [trajectory] = drive(environments(file, "add", format_penalty=0.5), list(replies))
    decode = tiny_tokenizer().decode
    assert trajectory.error is None
    assert decode(trajectory.tokens) == (
        "<|start|>system\nadd<|end|>\n<|start|>user\n2 + 3?<|end|>\n<|start|>assistant\n"
        f"{replies[0]}<|end|>\n<|start|>tool\n5<|end|>\n<|start|>assistant\n5<|end|>"
    )
    assert decode(trajectory.tokens[trajectory.generated]) == f"{replies[0]}<|end|>5<|end|>"
    assert [reward for _, reward in trajectory.turn_rewards] == [0.0, 1.0]
    assert trajectory.metrics["tool_calls"] == 1
