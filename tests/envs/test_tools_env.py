"""The tools environment: what the model is told of its tools, and what becomes of its calls, sound or not."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from torch import Tensor

from corral.data.plugins import load_object
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs.base import EnvSet, StepResult
from corral.envs.tool_calls import Style, function_schema, parse_reply, problem_with
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards.scorer_pool import InProcessScorer
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Completion, FinishReason, Sampling

TOOLS = '''
import asyncio
import enum
import sqlite3
import sys
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


class Notes:
    """SQLite connections may be used in the thread that made them only."""

    closed = []

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
        Notes.closed.append(True)


class Clock:
    async def now(self) -> int:
        return 12


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
    closed = []

    def put(self):
        pass

    def close(self):
        Tidy.closed.append(True)


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
    def play(replies: Sequence[str], *names: str, **options: Any) -> tuple[list[StepResult], dict[str, float]]:
        async def play() -> tuple[list[StepResult], dict[str, float]]:
            env: Any = envs.factory_for(ROW).make()
            await env.reset(ROW, 0)
            try:
                return [await env.step(reply) for reply in replies], env.summary()
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
    environment = Environment(name="tools", options={"tools": tools, **options})
    return EnvSet({"": environment}, {"": InProcessScorer(Reward(name="exact"))}, Rollout())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def content(result: StepResult) -> str:
    [message] = result.messages
    return message["content"]


# What the model is told.


def test_a_function_becomes_a_json_schema(file: Path) -> None:
    envs = environments(file, "add")
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
        (["add"], {"told_by": "system"}, "'told_by'; `told_by` is now `tool_prompt`"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused_before_training(
    file: Path, names: list[str], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        environments(file, *names, **options)


def test_where_the_template_knows_no_tools_a_system_message_describes_them(file: Path) -> None:
    env: Any = environments(file, "add", tool_prompt="system").factory_for(ROW).make()
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
        (call("leave"), "Error: `leave` failed: RuntimeError: SystemExit(3)"),
        (call("sleep", seconds=30), "Error: `sleep` did not answer within 0.2 s"),
        (call("doze"), "Error: `doze` did not answer within 0.2 s"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_model_and_costs_nothing(play: Play, reply: str, expected: str) -> None:
    names = ("fail", "leave", "sleep", "doze")
    (first, last), summary = play([reply, "5"], *names, format_penalty=0.25, tool_timeout_s=0.2)
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


def test_half_a_character_from_the_model_is_no_problem(play: Play) -> None:
    [result], _ = play(['<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>'], "echo")
    assert content(result) == "?"


# Sessions.


def test_a_class_has_one_object_for_each_trajectory(file: Path) -> None:
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
    notes = envs.factories[""].shared[0].tools["write"].owner  # type: ignore[attr-defined]
    assert notes.closed == [True, True]
    for thread in threading.enumerate():
        if thread.name == "tools Notes":
            thread.join(5)
    assert threading.active_count() <= before


def test_a_session_that_is_stuck_says_so_and_comes_back(file: Path) -> None:
    async def play() -> list[str]:
        env = envs.factory_for(ROW).make()
        await env.reset(ROW, 0)
        said = [content(await env.step(call("nap", seconds=0.6))), content(await env.step(call("read")))]
        await asyncio.sleep(0.8)
        said.append(content(await env.step(call("read"))))
        await env.close()
        return said

    envs = environments(file, "Notes", tool_timeout_s=0.2)
    late, busy, back = asyncio.run(play())
    assert late == "Error: `nap` did not answer within 0.2 s"
    assert "an earlier call that took too long is still running" in busy
    assert back == '["5"]'


def test_a_session_that_cannot_be_closed_keeps_no_other_open(play: Play, file: Path) -> None:
    with pytest.raises(ValueError, match="cannot let go"):
        play([], "Stubborn", "Tidy")
    assert load_object(f"{file}:Tidy", "tools").closed == [True]


def test_a_class_of_async_methods_lives_in_the_event_loop(play: Play) -> None:
    [result], _ = play([call("now")], "Clock")
    assert content(result) == "12"


def test_a_session_that_cannot_be_opened_is_the_trajectorys_error(file: Path) -> None:
    [trajectory] = drive(environments(file, "Broken"), ["5"])
    assert trajectory.error is not None
    assert trajectory.error.startswith("reset: ValueError: no session today")


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


def drive(envs: EnvSet, replies: list[str]) -> list[Any]:
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
    prompt = Prompt(0, 0, ROW, render_prompt(tokenizer, ROW, True))
    return asyncio.run(driver.roll_out([prompt], 1, Sampling(max_tokens=400)))


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
