"""`corral serve`, asked by the clients that people use."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from guides import block
from pydantic import BaseModel
from served import WAIT_S, running, wait_until
from tiny import tiny_tokenizer
from tiny_families import config_of, tiny_family_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.envs.chat_endpoint import ChatRequest
from corral.http_server import RequestRefused
from corral.model.model_loading import load_tokenizer
from corral.recipe.errors import UserError
from corral.recipe.schema import Model
from corral.rollout.engine import Completion, FinishReason
from corral.rollout.engine_server import EngineService, load_served_model, make_app
from corral.rollout.openai_api import (
    ChatBody,
    ChatWriter,
    StreamOptions,
    TextBody,
    TextStream,
    TokensBody,
    TokensSampling,
    parse,
)
from corral.training.checkpoint import find_model

MESSAGES: Any = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Server:
    service: EngineService
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=WAIT_S)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    service = EngineService("tiny")
    with running(make_app(service, None)) as url:
        loading = httpx.get(f"{url}/health")
        assert (loading.status_code, loading.json()["ready"]) == (503, False)
        early = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES})
        assert early.status_code == 503
        assert "is being loaded" in early.json()["error"]["message"]
        service.served = load_served_model(Model(path=str(tiny_model), dtype="float32"), 256, 4)
        yield Server(service, url)
    service.served.engine.close()


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def test_a_greedy_chat_is_what_transformers_generates(server: Server, plain: tuple[Any, Any]) -> None:
    model, tokenizer = plain
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = server.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=20)
    [choice] = answer.choices
    assert choice.message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
    assert answer.usage.completion_tokens == len(expected)
    assert server.client.models.list().data[0].id == "tiny"


def test_a_stream_is_the_whole_in_pieces(server: Server) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 4, "n": 2, "max_tokens": 40}
    whole = server.client.chat.completions.create(**asked)
    texts, ends, usages = ["", ""], {}, []
    for event in server.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages += [event.usage] if event.usage else []
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usages == [whole.usage]


def test_text_is_completed_up_to_a_stop_string(server: Server, plain: tuple[Any, Any]) -> None:
    free = server.client.completions.create(model="tiny", prompt="Hello", seed=1, max_tokens=30).choices[0].text
    stop = free[8:10]
    stopped = server.client.completions.create(model="tiny", prompt="Hello", seed=1, max_tokens=30, stop=[stop])
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    pieces = server.client.completions.create(
        model="tiny", prompt="Hello", seed=1, max_tokens=30, stop=stop, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == stopped.choices[0].text
    tokens = plain[1].encode("Hello")
    by_tokens = server.client.completions.create(model="tiny", prompt=tokens, seed=1, max_tokens=30)
    assert by_tokens.choices[0].text == free


def test_several_prompts_are_completed_as_each_is_alone(server: Server, plain: tuple[Any, Any]) -> None:
    texts = ["Hello", "What is 2 + 3?"]
    asked = {"max_tokens": 9, "seed": 1, "n": 2, "prompt_logprobs": 0, "ignore_eos": True}
    alone = [server.post("/v1/completions", {**asked, "prompt": text}).json() for text in texts]
    together = server.post("/v1/completions", {**asked, "prompt": texts}).json()
    expected = [choice for one in alone for choice in one["choices"]]
    assert together["choices"] == [{**choice, "index": i} for i, choice in enumerate(expected)]
    assert together["usage"] == {key: sum(one["usage"][key] for one in alone) for key in together["usage"]}
    by_tokens = {**asked, "prompt": [plain[1].encode(text) for text in texts]}
    assert server.post("/v1/completions", by_tokens).json()["choices"] == together["choices"]
    pieces = [""] * 4
    del asked["prompt_logprobs"]
    for event in server.client.completions.create(
        model="tiny", prompt=texts, seed=1, n=2, max_tokens=9, stream=True, extra_body={"ignore_eos": True}
    ):
        pieces[event.choices[0].index] += event.choices[0].text
    assert pieces == [choice["text"] for choice in expected]


def test_a_long_text_is_tokenized_next_to_other_requests_and_one_that_cannot_fit_not_at_all(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.service.served is not None
    tokenizer = server.service.served.tokenizer
    encode, may_go_on = tokenizer.encode, threading.Event()
    tokenized = []

    def slow(text: str) -> Any:
        tokenized.append(text)
        assert may_go_on.wait(WAIT_S)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", {"prompt": "Hello", "max_tokens": 1})
        wait_until(lambda: tokenized)
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        refused = server.post("/v1/completions", {"prompt": ["Hello", "a" * 10**6], "max_tokens": 1})
        may_go_on.set()
        assert answer.result().status_code == 200
    assert "1000000 characters are more than the 256 tokens of --max-length" in refused.json()["error"]["message"]
    assert tokenized == ["Hello"]


@pytest.mark.parametrize("stop", ["", [""]])
def test_an_empty_stop_string_stops_nothing(server: Server, stop: Any) -> None:
    body = {"prompt": "Hello", "seed": 1, "max_tokens": 5}
    free, stopped = server.post("/v1/completions", body), server.post("/v1/completions", {**body, "stop": stop})
    assert stopped.json()["choices"][0]["text"] == free.json()["choices"][0]["text"] != ""


def test_tool_calls_of_two_replies_have_different_ids(plain: tuple[Any, Any]) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' * 2
    completion = Completion(plain[1].encode(text), [], FinishReason.STOP_TOKEN, [])
    asked = ChatRequest(MESSAGES, [], "tiny", parse_calls=True, stream=False, stream_usage=False)
    body = ChatBody(messages=MESSAGES, n=2)
    ids = [
        call["id"]
        for _ in range(2)
        for choice in ChatWriter("tiny", body, asked, plain[1], [[1] * 5]).whole([completion] * 2)["choices"]
        for call in choice["message"]["tool_calls"]
    ]
    assert len(ids) == len(set(ids)) == 8


def test_tokens_go_in_and_out_with_the_log_probs_they_were_sampled_with(server: Server, plain: tuple[Any, Any]) -> None:
    prompt = [5, 6, 7, 8]
    sampling = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 0, "n": 2, "stop_token_ids": []}
    answer = server.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}).json()
    assert answer["request_id"]
    for choice in answer["choices"]:
        tokens = [*prompt, *choice["token_ids"]]
        with torch.no_grad():
            logits = plain[0](input_ids=torch.tensor([tokens])).logits[0, 3:-1] / 0.8
        expected = logits.log_softmax(-1).gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
        computed = torch.tensor([one["logprob"] for one in choice["logprobs"]["content"]])
        torch.testing.assert_close(computed, expected, atol=1e-4, rtol=0)
        assert choice["versions"] == [0] * len(choice["token_ids"])


def test_log_probs_of_a_prompt_are_those_of_the_model_for_whoever_has_the_tokens(
    server: Server, plain: tuple[Any, Any]
) -> None:
    prompt = [5, 6, 7, 8, 9, 5]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.5}
    first, *others = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [list(one) for one in others] == [[str(token)] for token in prompt[1:]]
    with torch.no_grad():
        logits = plain[0](input_ids=torch.tensor([prompt])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    computed = torch.tensor([one[str(token)]["logprob"] for token, one in zip(prompt[1:], others, strict=True)])
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=0)
    lonely = server.post("/v1/completions", {**body, "prompt": [5], "sampling_params": 0.5})  # a field of another route
    assert lonely.json()["choices"][0]["prompt_logprobs"] == [None]


def test_log_probs_of_a_chat_are_those_of_its_tokens(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=2, max_tokens=6, logprobs=True, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 6
    assert all(one.logprob <= 0 for one in content)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "?"}]}, "no `role`"),
        ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "tool_calls": True}]}, "`tool_calls` must be a list"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1000}, "more than the 256"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "presence_penalty": 1},
            "`presence_penalty: 1` is not supported",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_k": 2**63}, "top_k"),
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "content": "5"}]}, "does not continue"),
        ("/v1/completions", {"prompt": ["a", [5]]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "65 prompts with n = 2 are more than 128 completions"),
        ("/v1/completions", {"prompt": ""}, "at least 1"),
        ("/v1/completions", {"prompt": []}, "at least 1"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 5}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0, "stream": True}, "with `stream: true`"),
        ("/v1/completions", {"prompt": [10**6], "prompt_logprobs": 0}, "outside of the vocabulary"),
        ("/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}}, "outside of the vocabulary"),
        ("/inference/v1/generate", {"token_ids": [-5], "sampling_params": {}}, "outside of the vocabulary"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"guided_json": {}}}, "not supported"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}, "features": {"a": 1}}, "`features"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}, "the request has tools, and the model's chat"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"name": "add"}]}, "`tools` must be a list of"),
        ("/v1/chat/completions", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/v1/completions", {"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(server: Server, path: str, body: Any, expected: str) -> None:
    refused = server.post(path, body)
    assert refused.status_code == 400
    assert expected in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "refused", "harmless"),
    [
        ("chat_template", "{{ messages }}", None),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("guided_choice", ["a"], None),
        ("guided_regex", "a", None),
        ("guided_grammar", "a", None),
        ("continue_final_message", True, False),
        ("add_generation_prompt", False, True),
        ("use_beam_search", True, False),
        ("parallel_tool_calls", False, True),
        ("reasoning_effort", "high", None),
        ("truncate_prompt_tokens", 5, None),
        ("include_stop_str_in_output", True, False),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, refused: Any, harmless: Any) -> None:
    with pytest.raises(RequestRefused, match=f"`{field}: .* is not supported"):
        parse(ChatBody, json.dumps({"messages": MESSAGES, field: refused}).encode())
    parse(ChatBody, json.dumps({"messages": MESSAGES, field: harmless}).encode())


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (ChatBody, {"messages": MESSAGES}),
        (TextBody, {"prompt": "a"}),
        (TokensBody, {"token_ids": [1], "sampling_params": {}}),
        (TokensSampling, {}),
        (StreamOptions, {}),
    ],
)
def test_null_is_an_optional_field_that_is_not_given(kind: type[BaseModel], required: dict[str, Any]) -> None:
    optional = dict.fromkeys(name for name in kind.model_fields if name not in required)
    assert kind.model_validate({**optional, **required}) == kind.model_validate(required)


def test_other_routes_are_named(server: Server) -> None:
    assert "/v1/chat/completions" in httpx.get(f"{server.url}/v2").json()["error"]["message"]


@pytest.mark.deadline("the client must hang up before all tokens are generated")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_is_not_generated_for(server: Server, stream: bool) -> None:
    served = server.service.served
    assert served is not None
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 4}
    steps = served.engine.num_decode_steps
    timeout = httpx.Timeout(WAIT_S, read=0.1)
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=timeout) as it,
    ):
        next(it.iter_raw())  # of a stream the first piece, of an answer as a whole nothing
    wait_until(lambda: served.engine.num_in_flight == 0)
    assert served.engine.num_decode_steps - steps < 200


def test_health_and_metrics(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"ready": True, "model": "tiny", "in_flight": 0}
    server.client.completions.create(model="tiny", prompt="Hello", max_tokens=3)
    text = httpx.get(f"{server.url}/metrics").text
    assert 'corral_engine_requests_total{route="/v1/completions",code="200"}' in text
    assert "corral_engine_ready 1" in text
    assert "corral_engine_latency_seconds_count" in text


@pytest.mark.slow
def test_many_at_once_are_answered_each_with_its_own(server: Server) -> None:
    async def ask() -> list[str]:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            bodies = [{"prompt": f"{i}", "max_tokens": 5, "seed": 7, "temperature": 0} for i in range(24)]
            answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    together = asyncio.run(ask())
    alone = [server.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 5, "temperature": 0}) for i in range(24)]
    assert together == [answer.json()["choices"][0]["text"] for answer in alone]


def test_characters_of_several_tokens_are_streamed_whole() -> None:
    tokenizer = load_tokenizer(Model(path="blank-1m"))
    text = "naïve 日本 🙂 end"
    stream = TextStream(tokenizer, [" end"])
    pieces = [stream.add([token], is_last=False) for token in tokenizer.encode(text)]
    pieces.append(stream.add([], is_last=True))
    assert "".join(pieces) == "naïve 日本 🙂"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_length_that_the_model_does_not_compute_is_refused_by_the_commands_own_option(tmp_path: Path) -> None:
    tiny_family_model(config_of("phi3-longrope-short")).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--max-length = 65, but the model turns to other rotary frequencies"):
        load_served_model(Model(path=str(tmp_path), dtype="float32"), 65, 1)


def test_a_model_that_names_no_limit_of_positions_is_served_up_to_max_length(tiny_model: Path) -> None:
    spec = Model(path=str(tiny_model), dtype="float32", config_overrides={"max_position_embeddings": -1})
    served = load_served_model(spec, 16, 1)
    served.engine.close()
    assert served.max_length == 16


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted_and_wants_its_token(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open-sesame-open-sesame")
    (tmp_path / "token").chmod(0o600)
    guide = block("serve").text.split()
    assert guide == ["corral", "serve", "runs/quickstart"]
    command = [sys.executable, "-m", "corral.cli.main", "serve", str(tiny_model), "--port=0", "--name=mine"]
    process = subprocess.Popen(
        [*command, f"--token-file={tmp_path}/token"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        url = first.split("listening on ")[1].split(";")[0]
        assert "ready after" in process.stdout.readline()
        assert httpx.get(f"{url}/health").status_code == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="open-sesame-open-sesame")
        assert client.models.list().data[0].id == "mine"
        assert client.chat.completions.create(model="mine", messages=MESSAGES, max_tokens=3).choices[0].message.content
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (0, "ended\n", "")


@pytest.mark.slow
def test_other_machines_need_a_token_and_a_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "corral.cli.main", "serve", "x", "--host=0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "give --token-file" in refused.stderr
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no checkpoint that is whole"):
        find_model(str(tmp_path))
    assert find_model("openai/some-model") == "openai/some-model"
