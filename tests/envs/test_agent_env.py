"""Agents that somebody else wrote, against the OpenAI API, with its own client or a plain one."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from deadlines import within
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.data.batch import StopReason, Trajectory
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs.base import EnvSet, StepResult
from corral.envs.built_in.agent import AgentEnv
from corral.envs.chat_endpoint import ChatSession
from corral.model.attention import register
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards.scorer_pool import InProcessScorer
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine

AGENTS = '''
import asyncio
import json
import os
import socket
import struct
import subprocess
import time

import httpx

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def post(base_url, api_key, body):
    headers = {"Authorization": f"Bearer {api_key}"}
    return httpx.post(f"{base_url}/chat/completions", headers=headers, json=body, timeout=30)


def ask(base_url, api_key, messages, **more):
    return post(base_url, api_key, {"model": "m", "messages": messages, **more})


def say(base_url, api_key, messages, **more):
    """One turn; the conversation goes on."""
    answer = ask(base_url, api_key, messages, **more)
    answer.raise_for_status()
    messages.append(answer.json()["choices"][0]["message"])
    return messages[-1]["content"]


def two_turns(row, base_url, api_key, model):
    """With the client of the API, and one more question."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": row.prompt[0]["content"]}]
    first = client.chat.completions.create(model=model, messages=messages, temperature=0.3)
    messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(model=model, messages=messages)
    counts = {"before": second.usage.prompt_tokens, "new": second.usage.completion_tokens}
    cut = second.choices[0].finish_reason == "length"
    return {"score": len(second.choices[0].message.content), "asked": 2, "id": second.id, "cut": cut, **counts}


async def one_turn(row, base_url, api_key):
    """Async; leaves the reward to the reward function."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="any", messages=row.prompt)


async def streamed(base_url, api_key):
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    options = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "?"}], stream=True, stream_options=options, tools=TOOLS
    )
    text, calls, ends, usage = "", [], [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                calls.append((call.index, call.function.name, call.function.arguments))
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    global last_stream
    last_stream = text, calls, ends
    return 0.5


def with_tools(base_url, api_key):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": "2 + 3?"}]
    for _ in range(9):
        choice = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            return
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})


def parts_and_none(base_url, api_key):
    """Says the same in other words, as frameworks do."""
    parts = [{"type": "text", "text": "Hi "}]
    say(base_url, api_key, [{"role": "developer", "content": parts}, {"role": "user", "content": "?"}])
    ask(base_url, api_key, [
        {"role": "system", "content": "Hi", "name": None, "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "? "}]},
        {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": None},
        {"role": "user", "content": "And?"},
    ])
    return 1


def forgetful(base_url, api_key):
    messages = [{"role": "user", "content": "The capital of France is a city on the Seine. Which?"}]
    say(base_url, api_key, messages)
    messages[0] = {"role": "user", "content": "The capital of France is a city on the Loire. Which?"}
    messages.append({"role": "user", "content": "Well?"})
    global last_answer
    last_answer = ask(base_url, api_key, messages)


def rewrites_replies(base_url, api_key):
    messages = [{"role": "user", "content": "?"}]
    say(base_url, api_key, messages)
    messages[-1] = {"role": "assistant", "content": "no"}
    say(base_url, api_key, [*messages, {"role": "user", "content": "Well?"}])


def starts_again(base_url, api_key):
    for _ in range(2):
        say(base_url, api_key, [{"role": "user", "content": "?"}])


def other_tools(base_url, api_key):
    messages = [{"role": "user", "content": "?"}]
    say(base_url, api_key, messages, tools=TOOLS)
    say(base_url, api_key, [*messages, {"role": "user", "content": "!"}])


def crashes(base_url, api_key):
    say(base_url, api_key, [{"role": "user", "content": "?"}])
    raise ValueError("no idea\\nat all")


def crashes_at_once():
    raise ValueError("no idea")


async def exits(base_url):
    raise SystemExit(3)


def says_nothing(row):
    return 1.0


def starts_a_child(base_url, api_key, row):
    child = subprocess.Popen(["sleep", "3600"])
    with open(row.extra["file"], "w") as file:
        json.dump({"pids": [os.getpid(), child.pid], "token": os.environ.get("HF_TOKEN")}, file)
    hangs(base_url, api_key)


def hangs(base_url, api_key):
    say(base_url, api_key, [{"role": "user", "content": "?"}])
    time.sleep(3600)


async def hangs_at_once(row):
    await asyncio.sleep(3600)


def asks_for_more(base_url, api_key, row):
    global last_answer
    last_answer = post(base_url, api_key, {"messages": [{"role": "user", "content": "?"}], **row.extra})
    return 0


async def two_at_once(base_url, api_key, row):
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    ask = [client.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}]) for _ in range(2)]
    ask = [asyncio.ensure_future(one) for one in ask]
    await asyncio.wait(ask, return_when=asyncio.FIRST_COMPLETED)
    open(row.extra["has_answer"], "w").close()
    answers = await asyncio.gather(*ask, return_exceptions=True)
    [refused] = [answer for answer in answers if isinstance(answer, openai.BadRequestError)]
    assert "another request is still being answered" in str(refused)
    return 1


def impatient(base_url, api_key):
    """Its client hangs up, and asks again."""
    messages = [{"role": "user", "content": "?"}]
    body = {"messages": messages}
    try:
        headers = {"Authorization": f"Bearer {api_key}"}
        httpx.post(f"{base_url}/chat/completions", headers=headers, json=body, timeout=httpx.Timeout(30, read=0.2))
    except httpx.ReadTimeout:
        say(base_url, api_key, messages)
    say(base_url, api_key, [*messages, {"role": "user", "content": "Thanks!"}])
    return 1


def broken_off(base_url, api_key):
    """Its connection is reset, and it asks again."""
    body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer {api_key}\\r\\nContent-Length: {len(body)}"
    host = httpx.URL(base_url)
    with socket.create_connection((host.host, host.port)) as connection:
        connection.sendall(head.encode() + b"\\r\\n\\r\\n" + body)
        time.sleep(0.2)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets when closed
    time.sleep(0.1)
    return float(say(base_url, api_key, [{"role": "user", "content": "?"}]))


def echo(row, base_url, api_key):
    """Two turns; what each session said must stay in it."""
    messages = list(row.prompt)
    for _ in range(2):
        said = say(base_url, api_key, messages)
        messages.append({"role": "user", "content": f"You said {said}"})
    return float(said)


def needs_more(row, wallet):
    pass
'''
PROGRAM = """
import json, os, subprocess, sys, time
import httpx

row = json.loads(sys.stdin.readline())
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = {"messages": row["prompt"], "model": os.environ["OPENAI_MODEL"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = httpx.post(url, headers=headers, json=body, timeout=30).json()["choices"][0]["message"]["content"]
print("model said", said, flush=True)
if said == "crash":
    print("Traceback", file=sys.stderr)
    sys.exit("no such luck")
if said == "hang":
    child = subprocess.Popen(["sleep", "3600"])
    print(os.getpid(), child.pid, file=open(row["extra"]["pids"], "w"), flush=True)
    time.sleep(3600)
if said == "leave a child":
    subprocess.Popen(["sleep", "3600"])
if said == "score":
    print(json.dumps({"score": 0.75, "steps": 1}))
"""
ROW = Row([Message(role="user", content="2 + 3?")], "5", "", {})


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("agents") / "some_agents.py"
    file.write_text(AGENTS)
    return file


@pytest.fixture(scope="module")
def agents_of_clients(agents: Path) -> Path:
    """The same, with the API's client imported before agents are forked: it takes a second of a core."""
    file = agents.with_name("agents_of_clients.py")
    file.write_text(f"import openai\n{AGENTS}")
    return file


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "agent.py").write_text(PROGRAM)
    return ["python", str(tmp_path / "agent.py")]


def open_envs(timeout_s: float = within(20), **options: Any) -> EnvSet:
    environment = Environment(name="agent", options=options, timeout_s=timeout_s)
    return EnvSet({"": environment}, {"": InProcessScorer(Reward(name="exact"))}, Rollout())


async def converse(
    env: AgentEnv, replies: list[str], row: Row = ROW, after_reset: Callable[[], Awaitable[None]] | None = None
) -> tuple[list[Message], list[StepResult]]:
    try:
        opening = await env.reset(row, 0)
        if after_reset is not None:
            await after_reset()
        return opening, [await env.step(reply) for reply in replies]
    finally:
        await env.close()


def play(
    agents: Path,
    name: str,
    replies: list[str],
    row: Row = ROW,
    timeout_s: float = within(20),
    after_reset: Callable[[], Awaitable[None]] | None = None,
    **options: Any,
) -> tuple[list[Message], list[StepResult]]:
    envs = open_envs(timeout_s, agent=f"{agents}:{name}", **options)
    try:
        return asyncio.run(converse(envs.factory_for(row).make(), replies, row, after_reset))  # type: ignore[arg-type]
    finally:
        envs.close()


def module_of(agents: Path) -> Any:
    return sys.modules[f"file {agents}"]


# The conversation.


@pytest.mark.slow
def test_an_agents_requests_become_the_opening_and_what_follows(agents: Path) -> None:
    opening, (first, last) = play(agents, "two_turns", ["It is 5.", "Yes."])
    assert opening == [
        Message(role="system", content="Be short."),
        Message(role="user", content="2 + 3?"),
    ]
    assert first == StepResult([Message(role="user", content="Sure?")], 0.0, done=False)
    assert last == StepResult([], 4.0, done=True, metrics={"asked": 2, "before": 0, "new": 0, "cut": 0})


@pytest.mark.slow
def test_without_a_score_of_its_own_the_reward_function_scores_the_last_reply(agents: Path) -> None:
    assert play(agents, "one_turn", ["5"])[1] == [StepResult([], 1.0, done=True)]
    assert play(agents, "one_turn", ["6"])[1] == [StepResult([], 0.0, done=True)]


@pytest.mark.slow
def test_calls_of_tools_are_given_to_the_agent_as_such(agents: Path) -> None:
    call = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    envs = open_envs(agent=f"{agents}:with_tools")
    env: Any = envs.factory_for(ROW).make()
    _, (first, second, last) = asyncio.run(converse(env, [call, call + call, "5"]))
    envs.close()
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    assert [(message["role"], message["content"]) for message in first.messages] == [("tool", "5")]
    assert [message["content"] for message in second.messages] == ["5", "5"]
    assert (last.reward, last.done) == (1.0, True)
    assert env.summary() == {"turns": 3, "tool_calls": 3}


@pytest.mark.slow
def test_a_malformed_call_of_a_tool_stays_text(agents: Path) -> None:
    assert play(agents, "with_tools", ["<tool_call>{</tool_call>"])[1] == [StepResult([], 0.0, done=True)]


@pytest.mark.slow
def test_where_the_template_knows_no_tools_a_system_message_describes_them(agents: Path) -> None:
    opening, _ = play(agents, "with_tools", ["5"], tool_prompt="system")
    assert [message["role"] for message in opening] == ["system", "user"]
    assert '"name": "add"' in opening[0]["content"]


def test_a_stream_is_one_that_the_client_reads(agents: Path) -> None:
    _, [result] = play(agents, "streamed", ["Hello\nthere"], in_process=True)
    assert result.reward == 0.5
    assert module_of(agents).last_stream == ("Hello\nthere", [], ["stop"])
    play(agents, "streamed", ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2], in_process=True)
    calls = [(0, "add", '{"a": 1}'), (1, "add", '{"a": 1}')]
    assert module_of(agents).last_stream == ("", calls, ["tool_calls"])


# The same conversation in other words, and another conversation.


def test_the_same_history_in_other_words_is_the_same(agents: Path) -> None:
    _, (first, last) = play(agents, "parts_and_none", ["yes\n", "no"])
    assert first.messages == [Message(role="user", content="And?")]
    assert (last.reward, last.done) == (1.0, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forgetful", "message 0 of the request was changed: from character 19 on .* the Seine.* the Loire"),
        ("rewrites_replies", "message 1 of the request was changed: from character 0 on it was 'yes' and is 'no'"),
        ("starts_again", "the request has 1 messages, and there were 2 before"),
        ("other_tools", "the request has other `tools` than the one before"),
    ],
)
def test_a_history_that_was_changed_ends_the_trajectory_and_says_what_differs(
    agents: Path, name: str, expected: str
) -> None:
    with pytest.raises(Exception, match=expected):
        play(agents, name, ["yes", "again"])


def test_the_agent_too_hears_that_its_history_was_changed(agents: Path) -> None:
    with pytest.raises(Exception, match="was changed"):
        play(agents, "forgetful", ["yes", "again"], in_process=True)
    wait_for(lambda: hasattr(module_of(agents), "last_answer"))
    wait_for(lambda: "was changed" in module_of(agents).last_answer.text)
    assert module_of(agents).last_answer.status_code == 400


# What an agent may not do, and what it costs.


@pytest.mark.parametrize(
    ("name", "replies", "expected"),
    [
        ("crashes", ["yes"], r"the agent failed: ValueError: no idea at all \(some_agents.py:"),
        ("crashes_at_once", [], "the agent failed: ValueError: no idea"),
        ("exits", [], r"the agent failed: RuntimeError: it called sys.exit\(3\)"),
        ("says_nothing", [], "the agent ended without a request"),
        ("hangs", ["yes"], "the agent neither sent a request nor ended within 2 s"),
        ("hangs_at_once", [], "the agent neither sent a request nor ended within 2 s"),
    ],
)
def test_an_agent_that_fails_is_its_trajectorys_error(
    agents: Path, name: str, replies: list[str], expected: str
) -> None:
    started = time.monotonic()
    with pytest.raises((RuntimeError, TimeoutError), match=expected):
        play(agents, name, replies, timeout_s=2 if "hangs" in name else within(20))
    assert time.monotonic() - started < within(30)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 2}, "`n: 2` cannot be honored: one answer to a request"),
        ({"stop": ["\n"]}, "`rollout.stop`"),
        ({"logprobs": True}, "log-probabilities are not given"),
        ({"response_format": {"type": "json_object"}}, "answers are free text"),
        ({"tool_choice": "required"}, "the model chooses"),
        ({"messages": []}, "`messages` must be a list"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "the last message is the assistant's"),
        ({"messages": [{"content": "I"}]}, "message 0 has no `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text and images as data: URLs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            "only text and images as data: URLs",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list of parts"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": 3}]}, "message 0: `tool_calls` must be a list"),
        ({"tools": [{"name": "add"}]}, "`tools` must be a list of"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(agents: Path, fields: dict[str, Any], expected: str) -> None:
    row = Row(ROW.prompt, "5", "", fields)
    with pytest.raises(RuntimeError, match="the agent ended without a request"):
        play(agents, "asks_for_more", [], row, in_process=True)
    answer = module_of(agents).last_answer
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_is_ignored_on_purpose_is_not_refused(agents: Path) -> None:
    row = Row(ROW.prompt, "5", "", {"stop": ["\n"], "temperature": 0.1, "top_p": 0.5, "max_tokens": 3, "seed": 1})
    _, [result] = play(agents, "asks_for_more", ["5"], row, ignore=["stop"], in_process=True)
    assert result.done
    assert module_of(agents).last_answer.status_code == 200


@pytest.mark.slow
def test_an_agent_asks_one_thing_at_a_time(agents: Path, tmp_path: Path) -> None:
    async def one_is_refused() -> None:
        while not (tmp_path / "has_answer").exists():
            await asyncio.sleep(0.01)

    row = Row(ROW.prompt, "5", "", {"has_answer": str(tmp_path / "has_answer")})
    _, [result] = play(agents, "two_at_once", ["yes"], row, after_reset=one_is_refused)
    assert result.reward == 1.0


def test_a_client_that_hangs_up_and_asks_again_gets_the_answer(agents: Path) -> None:
    _, (first, last) = play(agents, "impatient", ["yes", "no"], after_reset=lambda: asyncio.sleep(0.6))
    assert first.messages == [Message(role="user", content="Thanks!")]
    assert last.reward == 1.0


def test_a_client_whose_connection_was_reset_and_asks_again_gets_the_answer(agents: Path) -> None:
    _, [last] = play(agents, "broken_off", ["0.5"], after_reset=lambda: asyncio.sleep(0.6))
    assert last.reward == 0.5


@pytest.mark.parametrize(
    ("spared", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "example.com, 127.0.0.1"}, "example.com,127.0.0.1"),
        ({"no_proxy": "a.com", "NO_PROXY": "b.com"}, "a.com,b.com,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
@pytest.mark.slow
def test_the_endpoint_is_asked_without_a_proxy(
    agents: Path, monkeypatch: pytest.MonkeyPatch, spared: dict[str, str], expected: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, spared.get(name, ""))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody is there
    _, [result] = play(agents, "one_turn", ["5"])
    assert result.reward == 1.0
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "either `agent`"),
        ({"agent": "a.py:b", "command": ["python"]}, "either `agent`"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": ["no-such-program"]}, "there is no program `no-such-program`"),
        ({"command": ["python"], "ignore": ["temprature"]}, "environment.options.ignore must be"),
        ({"command": ["python"], "style": "xml"}, "environment.options.style must be hermes or openai"),
    ],
)
def test_options_that_make_no_agent_are_refused_before_training(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        open_envs(**options)


def test_an_agent_that_needs_what_it_is_not_given_is_refused_before_training(agents: Path) -> None:
    with pytest.raises(UserError, match="needs `wallet`; an agent is given row, base_url, api_key, model"):
        open_envs(agent=f"{agents}:needs_more")


# The endpoint.


@pytest.fixture
def endpoint(agents: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and the key of a session that is open."""
    envs = open_envs(agent=f"{agents}:one_turn")
    server = envs.factories[""].shared[0].endpoint  # type: ignore[attr-defined]
    session = ChatSession(server, lambda exchange: None)
    yield server.base_url, {"Authorization": f"Bearer {session.key}"}
    envs.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.base_url}/models")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-guess"}, {"Authorization": "sk-"}])
def test_nobody_without_a_key_is_served(endpoint: tuple[str, dict[str, str]], headers: dict[str, str]) -> None:
    base_url, _ = endpoint
    for answer in (
        httpx.get(f"{base_url}/models", headers=headers),
        httpx.post(f"{base_url}/chat/completions", headers=headers, json={"messages": ROW.prompt}),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"


def test_the_endpoint_says_what_there_is(endpoint: tuple[str, dict[str, str]]) -> None:
    base_url, headers = endpoint
    with httpx.Client(headers=headers) as client:  # all in one connection
        assert [model["id"] for model in client.get(f"{base_url}/models").json()["data"]] == ["corral"]
        assert client.get(f"{base_url}/chat/completions").status_code == 405
        assert client.post(f"{base_url}/responses", json={}).status_code == 404
        assert client.post(f"{base_url}/chat/completions", content=b"{").status_code == 400
        chunked = client.post(f"{base_url}/chat/completions", content=iter([b'{"messages"', b": []}"]))
        assert chunked.json()["error"]["message"] == "`messages` must be a list of messages"


def test_what_is_no_http_gets_no_answer(endpoint: tuple[str, dict[str, str]]) -> None:
    port = httpx.URL(endpoint[0]).port

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), within(5))
        writer.close()
        return answer

    head = b"POST /v1/models HTTP/1.1\r\nAuthorization: " + endpoint[1]["Authorization"].encode()
    for data in (b"hello\r\n\r\n", b"x" * 100_000, head + b"\r\nContent-Length: 99999999999\r\n\r\n"):
        assert asyncio.run(send(data)) == b""


@pytest.mark.slow
def test_a_key_is_worth_nothing_once_its_trajectory_is_over(agents: Path) -> None:
    async def play() -> int:
        env: Any = envs.factory_for(ROW).make()
        await env.reset(ROW, 0)
        key = env._session.key
        await env.close()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
            return (await client.get(f"{envs.factories[''].shared[0].endpoint.base_url}/models")).status_code  # type: ignore[attr-defined]

    envs = open_envs(agent=f"{agents}:one_turn")
    assert asyncio.run(play()) == 401
    envs.close()


# Programs.


def run_program(program: list[str], reply: str, row: Row = ROW, timeout_s: float = within(20)) -> list[StepResult]:
    envs = open_envs(timeout_s, command=program)
    try:
        opening, results = asyncio.run(converse(envs.factory_for(row).make(), [reply], row))  # type: ignore[arg-type]
        assert opening == row.prompt
        return results
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("score", StepResult([], 0.75, done=True, metrics={"steps": 1.0})),
        ("5", StepResult([], 1.0, done=True)),
        ("leave a child", StepResult([], 0.0, done=True)),
    ],
)
def test_a_program_says_its_score_or_leaves_it_to_the_reward_function(
    program: list[str], reply: str, expected: StepResult
) -> None:
    assert run_program(program, reply) == [expected]


def test_a_program_that_fails_is_its_trajectorys_error(program: list[str]) -> None:
    with pytest.raises(RuntimeError, match="the agent failed: RuntimeError: it ended with exit code 1: no such luck"):
        run_program(program, "crash")


@pytest.mark.deadline("a program has 10 s from its start to its request")
@pytest.mark.slow
def test_a_program_that_hangs_is_killed_with_all_that_it_started(program: list[str], tmp_path: Path) -> None:
    row = Row(ROW.prompt, "5", "", {"pids": str(tmp_path / "pids")})
    with pytest.raises(TimeoutError, match="neither sent a request nor ended within 10 s"):
        run_program(program, "hang", row, timeout_s=10)
    for pid in (tmp_path / "pids").read_text().split():
        wait_for(lambda pid=pid: not is_alive(int(pid)))  # type: ignore[misc]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + within(10)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Many at once, and with a real engine.


@pytest.mark.slow
def test_a_function_has_a_process_without_secrets_that_is_killed_with_all_that_it_started(
    agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    row = Row(ROW.prompt, "5", "", {"file": str(tmp_path / "told.json")})
    with pytest.raises(TimeoutError, match="nor ended within 8 s"):
        play(agents, "starts_a_child", ["yes"], row, timeout_s=8)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["token"] is None
    assert os.getpid() not in told["pids"]
    wait_for(lambda: not any(map(is_alive, told["pids"])))


@pytest.mark.slow
def test_many_sessions_at_once_do_not_mix(agents: Path) -> None:
    async def one(number: int) -> float:
        row = Row([Message(role="user", content=f"I am {number}")], None, "", {})
        opening, (first, last) = await converse(envs.factory_for(row).make(), [f"{number}.5", f"{number}"], row)  # type: ignore[arg-type]
        assert opening == row.prompt
        assert first.messages == [Message(role="user", content=f"You said {number}.5")]
        return last.reward

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(number) for number in range(16)))

    envs = open_envs(agent=f"{agents}:echo")
    assert asyncio.run(all_of_them()) == [float(number) for number in range(16)]
    envs.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").eval()
    engine = NativeEngine(model, tiny_tokenizer(), max_sequences=8, max_prefill_tokens=512, max_length=200)
    yield engine
    engine.close()


def drive(engine: NativeEngine, agents: Path, name: str, samples: int) -> list[Trajectory]:
    envs = open_envs(agent=f"{agents}:{name}")
    driver = RolloutDriver(
        engine=engine,
        envs=envs,
        chat=ChatRenderer(tiny_tokenizer(), True),
        max_turns=4,
        max_prompt_tokens=100,
        max_response_tokens=80,
        seed=7,
    )
    row = ROW
    prompt = Prompt(0, 0, row, render_prompt(engine.tokenizer, row, True))
    sampling = Sampling(max_tokens=6, stop_tokens=frozenset({engine.tokenizer.eos_token_id}))
    try:
        return asyncio.run(driver.roll_out([prompt], samples, sampling))
    finally:
        envs.close()


@pytest.mark.slow
def test_the_tokens_are_the_opening_the_replies_and_what_came_between(
    engine: NativeEngine, agents_of_clients: Path
) -> None:
    tokenizer = tiny_tokenizer()
    for trajectory in drive(engine, agents_of_clients, "two_turns", samples=8):
        assert trajectory.error is None
        edges = np.flatnonzero(np.diff(trajectory.generated)) + 1
        opening, first, between, second = np.split(trajectory.tokens, edges)
        head = "<|start|>system\nBe short.<|end|>\n<|start|>user\n2 + 3?<|end|>\n<|start|>assistant\n"
        assert tokenizer.decode(opening) == head
        ended = first[-1] == tokenizer.eos_token_id
        following = "\n<|start|>user\nSure?<|end|>\n<|start|>assistant\n"
        assert tokenizer.decode(between) == ("" if ended else "<|end|>") + following
        said = tokenizer.decode(second, skip_special_tokens=True)
        assert trajectory.turn_rewards[-1] == (len(trajectory.tokens) - 1, float(len(said)))
        assert (trajectory.logprobs[trajectory.generated] < 0).all()
        assert trajectory.metrics["turns"] == 2
        assert trajectory.metrics["new"] == len(second)
        assert trajectory.metrics["before"] == len(trajectory.tokens) - len(second)
        assert trajectory.metrics["cut"] == (second[-1] != tokenizer.eos_token_id)


def test_a_failing_agent_costs_its_trajectory(engine: NativeEngine, agents: Path) -> None:
    for trajectory in drive(engine, agents, "crashes", samples=2):
        assert trajectory.stop is StopReason.ERROR
        assert trajectory.error is not None
        assert trajectory.error.startswith("step: RuntimeError: the agent failed: ValueError: no idea at all")
        assert trajectory.num_generated > 0
