"""Engines in processes of their own: through the contract, and when a process ends.

The native engine always; vLLM and SGLang where `CORRAL_TEST_VLLM_PYTHON` and `CORRAL_TEST_SGLANG_PYTHON` name the
interpreter of an environment that has them.
"""

import asyncio
import copy
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_contract
import pytest
import torch
from engine_contract import ENGINE_CONTRACT, PROMPTS, MakeEngine, log_probs_are_those_before_truncation
from tiny import DEVICE, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from corral.recipe.errors import RunError, UserError
from corral.rollout import process_engine
from corral.rollout.engine import FinishReason, Sampling
from corral.rollout.engine_process import EngineSettings
from corral.rollout.process_engine import EngineLost, ProcessEngine
from corral.runtime import worker_heartbeat
from corral.runtime.weight_publisher import PROBE_BOUNDS, compare_logprobs

pytestmark = pytest.mark.slow

VLLM_PYTHON = os.environ.get("CORRAL_TEST_VLLM_PYTHON")
PYTHONS = {"native": None, "vllm": VLLM_PYTHON, "sglang": os.environ.get("CORRAL_TEST_SGLANG_PYTHON")}
ON_GPU = DEVICE.type == "cuda"
BOUNDS = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest deviation of log-probs: logits of a random model are around 20, which bfloat16 rounds to multiples of 1/8."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Heads of 64: others have no kernels for small ones."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,  # which vLLM packs apart on a CPU
        max_position_embeddings=256,
    )
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    folder = tmp_path_factory.mktemp("models") / "served"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


def dtype_of(name: str) -> str:
    """Others have no fast kernels for float32 on a GPU."""
    return "bfloat16" if ON_GPU and name != "native" else "float32"


def start_engine(model: tuple[Path, Any], name: str, *, python: str | None = None, **changes: Any) -> ProcessEngine:
    settings = {
        "name": name,
        "model": str(model[0]),
        "dtype": dtype_of(name),
        "max_length": 256,
        "max_sequences": 4,
        "max_prefill_tokens": 4096,
        "seed": 0,
        "truncates": False,
        "memory_fraction": 0.2 if ON_GPU and name != "native" else None,
    }
    return ProcessEngine(
        EngineSettings(**{**settings, **changes}), tiny_tokenizer(), model[1], DEVICE, python=python or PYTHONS[name]
    )


ENGINES = ["native", *(["vllm", "vllm-raw"] if VLLM_PYTHON else []), *(["sglang"] if PYTHONS["sglang"] else [])]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, model: tuple[Path, Any]) -> Iterator[ProcessEngine]:
    name, _, mode = request.param.partition("-")
    made = start_engine(model, name, truncates=mode == "raw")
    yield made
    folder = made.folder
    made.close()
    assert not folder.exists()


@pytest.mark.deadline("weights must come before the engine's process has generated all that it is asked for")
@pytest.mark.parametrize("check", ENGINE_CONTRACT, ids=lambda check: check.__name__)
def test_engine_keeps_its_contract(
    engine: ProcessEngine,
    model: tuple[Path, Any],
    check: Callable[[MakeEngine], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_contract, "TOLERANCE", BOUNDS[engine.settings.dtype])
    if engine.settings.name == "vllm" and engine.settings.truncates != (check is log_probs_are_those_before_truncation):
        pytest.skip("vLLM's log-probs are either before the temperature, or after truncation")

    def reset() -> ProcessEngine:
        engine.load(model[1].named_parameters(), 0)
        return engine

    async def run() -> None:
        await check(reset)

    asyncio.run(run())


def test_greedy_decoding_is_that_of_transformers(engine: ProcessEngine, model: tuple[Path, Any]) -> None:
    if engine.settings.dtype != "float32":
        pytest.skip("rounding decides between tokens that are about as likely")
    engine.load(model[1].named_parameters(), 0)
    prompt = PROMPTS[0]
    expected = model[1].generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    completion = asyncio.run(engine.generate(prompt, Sampling(max_tokens=20, temperature=0.0), 0))
    assert completion.tokens == expected[0, len(prompt) :].tolist()


def test_a_stop_string_over_token_borders_ends_a_completion(engine: ProcessEngine, model: tuple[Path, Any]) -> None:
    engine.load(model[1].named_parameters(), 0)
    greedy = Sampling(max_tokens=30, temperature=0.0)
    free = asyncio.run(engine.generate(PROMPTS[2], greedy, 0)).tokens
    text = tiny_tokenizer().decode(free)
    stop = text[5:9]
    stopped = asyncio.run(engine.generate(PROMPTS[2], Sampling(max_tokens=30, temperature=0.0, stop=(stop,)), 0))
    assert stopped.finish_reason is FinishReason.STOP_STRING
    assert stopped.tokens == free[: len(stopped.tokens)]
    assert stop in tiny_tokenizer().decode(stopped.tokens)
    assert stop not in tiny_tokenizer().decode(stopped.tokens[:-1])


def test_a_cancelled_request_is_dropped(engine: ProcessEngine) -> None:
    async def run() -> None:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=200), 0))
        before = engine.num_decode_steps
        while engine.num_decode_steps < before + 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.num_in_flight == 0
        assert len((await engine.generate(PROMPTS[1], Sampling(max_tokens=3), 0)).tokens) == 3

    asyncio.run(run())


def test_a_bucket_that_arrives_changed_is_refused(engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.rollout.process_engine.checksum", lambda content: 1)
    name, shape, dtype = engine.weight_layout[0]
    with pytest.raises(RunError, match="checksum"):
        engine.load([(name, torch.ones(shape, dtype=dtype))], 5)


def test_a_tensor_that_did_not_arrive_is_noticed_by_the_probe(engine: ProcessEngine, model: tuple[Path, Any]) -> None:
    """Whichever matrix it is of the first layer: it is sent as it was before all of them changed."""
    dtype, tokens = getattr(torch, engine.settings.dtype), [5 + 7 * i % 60 for i in range(64)]
    changed = copy.deepcopy(model[1]).to(dtype)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.copy_(parameter.flip(0))  # of the same size, so that rounding is what it was
        expected = changed(torch.tensor([tokens], device=DEVICE)).logits[0, :-1].float().log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens[1:], device=DEVICE)[:, None])[:, 0].tolist()

    def deviation(weights: dict[str, torch.Tensor]) -> float:
        engine.load(weights.items(), 1)
        found = asyncio.run(engine.compute_logprobs(tokens, 1.0))
        return compare_logprobs(expected, found, dtype, version=1, name="device 0")

    before, after = dict(model[1].named_parameters()), dict(changed.named_parameters())
    assert deviation(after) <= PROBE_BOUNDS[dtype]
    for name in [name for name in after if ".layers.0." in name and "norm" not in name]:
        with pytest.raises(RunError, match="its weights are not those that were sent"):
            deviation({**after, name: before[name]})
    engine.load(before.items(), 0)


@pytest.mark.deadline("the process must be killed before it has generated all that it is asked for")
def test_a_killed_process_fails_what_waits_for_it_and_one_that_is_killed_while_it_starts_is_started_again(
    engine: ProcessEngine,
) -> None:
    if engine.settings.name != "native":
        pytest.skip("the others take minutes to start")

    async def run() -> None:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=200), 0))
        before = engine.num_decode_steps
        while engine.num_decode_steps < before + 3:
            await asyncio.sleep(0.001)
        os.kill(engine.process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"the engine's process \(native\) was killed by signal 9"):
            await task
        with pytest.raises(EngineLost, match="killed by signal 9"):
            await engine.generate(PROMPTS[0], Sampling(max_tokens=2), 0)

    asyncio.run(run())
    engine.settings = replace(engine.settings, model="a checkpoint that is gone")
    with hit_while_it_starts(engine, signal.SIGKILL):
        engine.restart_and_load((), 3)
    assert engine.version == 3
    assert asyncio.run(engine.generate(PROMPTS[0], Sampling(max_tokens=2), 0)).tokens


@contextmanager
def hit_while_it_starts(engine: ProcessEngine, number: signal.Signals) -> Iterator[None]:
    """The process that takes the place of this one, so that another has to be started in its place."""

    def hit_next() -> None:
        while engine.process.pid == before:
            time.sleep(0.001)
        hit.append(engine.process.pid)
        os.kill(engine.process.pid, number)

    before, hit = engine.process.pid, list[int]()
    thread = threading.Thread(target=hit_next)
    thread.start()
    yield
    thread.join()
    assert engine.process.pid not in (before, *hit)


@pytest.mark.deadline("the process must be stopped before it has generated all that it is asked for")
def test_a_process_that_hangs_is_killed_and_whoever_waits_for_it_knows(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.settings.name != "native":
        pytest.skip("the others take minutes to start")
    monkeypatch.setattr(worker_heartbeat, "QUIET_S", 1.0)
    monkeypatch.setattr(process_engine, "HURRY_S", 2.0)
    weights = dict(engine.skeleton.named_parameters())

    async def while_it_generates() -> None:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=200), 0))
        before = engine.num_decode_steps
        while engine.num_decode_steps < before + 3:
            await asyncio.sleep(0.001)
        os.kill(engine.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match=r"no sign of life for 2 s \(`cluster.worker_timeout_s`\) and was killed"):
            await task

    def with_weights() -> None:
        os.kill(engine.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match="no sign of life for 2 s"):
            engine.load(weights.items(), 4)

    engine.load(weights.items(), 3)
    engine.hurry()
    asyncio.run(while_it_generates())
    engine.restart_and_load(weights.items(), 3)
    with_weights()
    with hit_while_it_starts(engine, signal.SIGSTOP):
        engine.restart_and_load(weights.items(), 4)
    assert asyncio.run(engine.generate(PROMPTS[0], Sampling(max_tokens=2), 0)).versions == [4, 4]
    engine.silence_s = 300.0


def test_what_keeps_an_engine_from_starting_is_told(model: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be started: No such file"):
        start_engine(model, "native", python=str(tmp_path / "python"))
    with pytest.raises(UserError, match="is not a folder"):
        start_engine((tmp_path / "nothing", model[1]), "native")


@pytest.mark.skipif(VLLM_PYTHON is None, reason="CORRAL_TEST_VLLM_PYTHON names no interpreter that has vLLM")
def test_a_process_that_vllm_has_started_is_part_of_the_engine(model: tuple[Path, Any]) -> None:
    engine = start_engine(model, "vllm")

    async def run() -> None:
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=200), 0))
        while engine.num_decode_steps < 3:
            await asyncio.sleep(0.001)
        children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
        [core] = [pid for pid in children if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(core), signal.SIGKILL)
        with pytest.raises(EngineLost):
            await task

    asyncio.run(run())
    engine.close()


@pytest.mark.skipif(VLLM_PYTHON is None, reason="CORRAL_TEST_VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_num_seq": 3}, "the installed vLLM has no argument `max_num_seq`; did you mean `max_num_seqs`"),
        ({"seed": 3}, "rollout.engine.arguments.seed: this is decided by seed"),
    ],
)
def test_arguments_of_vllm_are_checked(model: tuple[Path, Any], arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        start_engine(model, "vllm", arguments=arguments)
