"""The native engine against transformers' own forward pass, and what it promises."""

import asyncio
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import DEVICE, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, Mamba2Config

from corral.model.attention import make_exact, register
from corral.model.fused_layers import fuse, fused_layers
from corral.rollout.engine import Completion, FinishReason, Sampling
from corral.rollout.engine_core import GenerationRequest
from corral.rollout.general_core import GeneralCore
from corral.rollout.native_engine import NativeEngine, model_logprobs
from corral.rollout.slot_core import SlotCore

TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 3e-4
"""In log-probs, float32: a GPU sums in another order."""
PROMPTS = [[5, 6, 7, 8], [5, 6, 9], [40, 41, 42, 43, 44, 45], [5, 6, 7, 8, 9, 10]]


def make_engine(
    family: str = "llama", max_sequences: int = 64, max_prefill_tokens: int = 4096, core: str = "slots"
) -> NativeEngine:
    register()
    torch.manual_seed(2)
    attention = "sdpa" if core == "general" else "corral"
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention).eval().to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # random weights say nothing much; louder ones have opinions
    return NativeEngine(
        model,
        tiny_tokenizer(),
        max_sequences=max_sequences,
        max_prefill_tokens=max_prefill_tokens,
        max_length=256,
        paged=core == "paged",
    )


def generate(engine: NativeEngine, requests: list[tuple[list[int], Sampling, int]]) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return asyncio.run(all_at_once())


def reference_logprobs(engine: NativeEngine, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """By transformers, one sequence at a time, without a cache."""
    theirs = AutoModelForCausalLM.from_config(engine.model.config, attn_implementation="eager").eval().to(DEVICE)
    theirs.load_state_dict(engine.model.state_dict())
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + tokens], device=DEVICE)).logits[0, len(prompt) - 1 : -1] / temperature
    engine.model.config._attn_implementation = "corral"  # the configuration is shared, and was changed
    return logits.log_softmax(-1).cpu().gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_exact(engine: NativeEngine, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = reference_logprobs(engine, prompt, completion.tokens, temperature)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.slow
def test_log_probs_are_those_of_a_plain_forward_pass(family: str, core: str) -> None:
    engine = make_engine(family, max_sequences=5, core=core)
    sampling = Sampling(max_tokens=12, temperature=0.8)
    requests = [(prompt, sampling, 10 * i + s) for i, prompt in enumerate(PROMPTS) for s in range(4)]
    for (prompt, _, _), completion in zip(requests, generate(engine, requests), strict=True):
        assert_exact(engine, prompt, completion, 0.8)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(core: str) -> None:
    engine = make_engine(core=core)
    sampling = Sampling(max_tokens=20, temperature=0.0)
    ours = generate(engine, [(prompt, sampling, 0) for prompt in PROMPTS])
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        tokens = list(prompt)
        theirs = AutoModelForCausalLM.from_config(engine.model.config, attn_implementation="eager").eval().to(DEVICE)
        theirs.load_state_dict(engine.model.state_dict())
        for _ in range(20):
            tokens.append(int(theirs(torch.tensor([tokens], device=DEVICE)).logits[0, -1].argmax()))
        engine.model.config._attn_implementation = "corral"
        assert completion.tokens == tokens[len(prompt) :]


@pytest.mark.slow
def test_a_sample_does_not_depend_on_what_else_is_in_the_batch(core: str) -> None:
    sampling = Sampling(max_tokens=10)
    requests = [(prompt, sampling, 100 + i) for i, prompt in enumerate(PROMPTS * 3)]
    together = generate(make_engine(core=core), requests)
    cramped = generate(make_engine(max_sequences=3, max_prefill_tokens=6, core=core), requests)
    alone = [generate(make_engine(core=core), [request])[0] for request in requests]
    assert [c.tokens for c in together] == [c.tokens for c in cramped] == [c.tokens for c in alone]


def test_the_samples_of_a_prompt_share_its_prefill_and_every_common_prefix() -> None:
    engine = make_engine()
    completions = generate(engine, [(PROMPTS[2], Sampling(max_tokens=6), seed) for seed in range(30)])
    histories = {tuple(c.tokens[: i + 1]) for c in completions for i in range(len(c.tokens) - 1)}
    assert engine.stats.num_computed_tokens == len(PROMPTS[2]) + len(histories)
    assert engine.stats.num_generated_tokens == 30 * 6


def test_prompts_share_a_common_prefix(core: str) -> None:
    engine = make_engine(core=core)
    generate(engine, [(PROMPTS[0], Sampling(max_tokens=1), 0), (PROMPTS[3], Sampling(max_tokens=1), 0)])
    assert engine.stats.num_computed_tokens == 6


def test_a_prompt_is_prefilled_once_though_its_samples_start_at_different_times(core: str) -> None:
    engine = make_engine(max_sequences=3, core=core)
    completions = generate(engine, [(PROMPTS[2], Sampling(max_tokens=2), seed) for seed in range(10)])
    assert engine.stats.num_computed_tokens <= len(PROMPTS[2]) + 10
    assert all(len(c.tokens) == 2 for c in completions)
    core_now: Any = engine.core
    assert not (core_now.cached_prompts if core == "slots" else core_now.cache.cached_prompts)


def test_a_stop_string_ends_a_sequence_at_the_token_that_completes_it(core: str) -> None:
    engine = make_engine(core=core)
    free = generate(engine, [(PROMPTS[1], Sampling(max_tokens=30), 6)])[0]
    text = engine.tokenizer.decode(free.tokens)
    stopped = generate(engine, [(PROMPTS[1], Sampling(max_tokens=30, stop=(text[3:5],)), 6)])[0]
    assert stopped.finish_reason is FinishReason.STOP_STRING
    assert engine.tokenizer.decode(stopped.tokens) == text[: text.index(text[3:5]) + 2]


def test_truncated_sampling_excludes_tokens_and_reports_untruncated_log_probs(core: str) -> None:
    engine = make_engine(core=core)
    only_best = Sampling(max_tokens=8, top_k=1)
    greedy, best = generate(
        engine, [(PROMPTS[0], Sampling(max_tokens=8, temperature=0.0), 1), (PROMPTS[0], only_best, 2)]
    )
    assert best.tokens == greedy.tokens
    assert_exact(engine, PROMPTS[0], best)


def test_loaded_weights_are_the_ones_that_generate(core: str) -> None:
    engine, other = make_engine(core=core), make_engine(core=core)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.05)
    request = (PROMPTS[2], Sampling(max_tokens=20, temperature=0.0), 0)
    engine.load(other.model.named_parameters(), version=1)
    assert generate(engine, [request])[0].logprobs == generate(other, [request])[0].logprobs


def test_a_released_cache_is_allocated_again_by_the_next_request() -> None:
    engine = make_engine()
    assert isinstance(engine.core, SlotCore)
    before = generate(engine, [(PROMPTS[0], Sampling(max_tokens=5), 3)])[0]
    engine.release_cache()
    assert engine.core.cache.capacity == 0
    assert engine.core.cache.keys[0] is None
    engine.acquire_cache()
    assert generate(engine, [(PROMPTS[0], Sampling(max_tokens=5), 3)])[0].tokens == before.tokens


def test_released_weights_have_no_memory_until_all_of_them_come_again(core: str) -> None:
    engine, other = make_engine(core=core), make_engine(core=core)
    request = (PROMPTS[2], Sampling(max_tokens=20, temperature=0.0), 0)
    before, layout = generate(engine, [request])[0], engine.weight_layout
    for version in (1, 2):
        engine.release_cache()
        engine.release_weights()
        engine.release_weights()
        assert engine.weight_layout == layout
        if DEVICE.type == "cpu":
            assert {parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()} == {0}
        with pytest.raises(AssertionError, match="no weights"):
            generate(engine, [request])
        with pytest.raises(AssertionError, match="did not come again"):
            engine.load(list(other.model.named_parameters())[1:], version)
        engine.release_weights()
        engine.load(other.model.named_parameters(), version)
        after = generate(engine, [request])[0]
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


def test_a_model_with_biases_is_still_fused_after_its_weights_were_released() -> None:
    engine = make_engine("qwen2")
    weights = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    assert fuse(engine.model)
    engine.release_weights()
    engine.load(weights.items(), 1)
    assert fused_layers(engine.model) is not None
    assert all(torch.equal(weight, weights[name]) for name, weight in engine.model.named_parameters())


@pytest.mark.slow
def test_the_cache_stays_within_its_bound() -> None:
    engine = make_engine(max_sequences=4)
    generate(engine, [(prompt, Sampling(max_tokens=60), i) for i, prompt in enumerate(PROMPTS * 4)])
    assert isinstance(engine.core, SlotCore)
    keys = engine.core.cache.keys[0]
    assert keys is not None
    assert keys.shape[0] == 4
    assert keys.shape[2] <= 128


def test_a_failing_model_fails_its_requests_instead_of_hanging(core: str) -> None:
    engine = make_engine(core=core)

    def broken(*_: object, **__: object) -> Callable[..., None]:
        raise RuntimeError("out of memory")

    engine.model.get_decoder = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(engine, [(prompt, Sampling(max_tokens=5), 0) for prompt in PROMPTS])
    del engine.model.get_decoder
    assert len(generate(engine, [(PROMPTS[0], Sampling(max_tokens=5), 0)])[0].tokens) == 5


@pytest.mark.slow
def test_exact_attention_makes_log_probs_independent_of_the_batch_to_the_last_bit() -> None:
    sampling = Sampling(max_tokens=10)
    requests = [(prompt, sampling, 100 + i) for i, prompt in enumerate(PROMPTS * 3)]
    engines = [make_engine(), make_engine(max_sequences=3, max_prefill_tokens=6), make_engine(max_sequences=1)]
    for engine in engines:
        make_exact(engine.model)
    first, *others = [[c.logprobs for c in generate(engine, requests)] for engine in engines]
    difference = max(
        abs(a - b) for other in others for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert difference == 0 if platform.machine() == "aarch64" else difference < 4e-6  # x86: a last bit or two


async def two_turns(
    engine: NativeEngine, prompt: list[int], seed: int, *, keep: bool = True
) -> tuple[list[int], Completion]:
    """A turn of up to 6 tokens, 3 tokens from elsewhere, and another turn."""
    sampling = Sampling(max_tokens=6)
    first = await engine.generate(prompt, sampling, seed, keep_prefix=keep)
    whole = [*prompt, *first.tokens, 20, 21, 22]
    return whole, await engine.generate(whole, sampling, seed + 1, prefix=first.prefix)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_next_turn_of_a_conversation_prefills_only_what_is_new(family: str, core: str) -> None:
    async def conversations(engine: NativeEngine, keep: bool) -> list[tuple[list[int], Completion]]:
        return await asyncio.gather(*(two_turns(engine, p, 10 * i, keep=keep) for i, p in enumerate(PROMPTS * 3)))

    remembering, forgetting = make_engine(family, core=core), make_engine(family, core=core)
    found = asyncio.run(conversations(remembering, keep=True))
    again = asyncio.run(conversations(forgetting, keep=False))
    for (whole, completion), (same, other) in zip(found, again, strict=True):
        assert whole == same
        assert completion.tokens == other.tokens
        assert completion.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
        assert_exact(remembering, whole, completion)
    assert remembering.stats.num_computed_tokens < forgetting.stats.num_computed_tokens
    core_now: Any = remembering.core
    # Nobody can come back with one any more.
    assert not (core_now if core == "slots" else core_now.cache).cached_prefixes


def test_cached_prefixes_have_no_more_tokens_than_the_cache() -> None:
    engine = make_engine(max_sequences=2)

    async def many() -> list[Completion]:
        prompts = [list(range(3, 3 + 60 + i)) for i in range(12)]
        sampling = Sampling(max_tokens=2)
        return await asyncio.gather(*(engine.generate(prompt, sampling, 1, keep_prefix=True) for prompt in prompts))

    kept = [completion.prefix for completion in asyncio.run(many())]
    assert 0 < sum(memory is not None for memory in kept) < 12
    assert sum(memory.length for memory in kept if memory is not None) <= 2 * 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [(0.0, 0.05), (0.02, 0.2), (0.0, float("inf"))])
def test_time_steps_are_limited_in_decoding_as_in_a_whole_sequence(limit: tuple[float, float]) -> None:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, expand=2, num_hidden_layers=2, state_size=8,
        n_groups=1, chunk_size=16, time_step_limit=limit,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    core = GeneralCore(model, tiny_tokenizer(), max_sequences=2, max_prefill_tokens=64, max_length=64)
    assert core.uses_cache
    request = GenerationRequest(np.array(PROMPTS[2]), Sampling(max_tokens=12), 0, None)
    waiting = [request]
    with torch.inference_mode():
        while waiting or core.is_busy:
            core.step(waiting)
    assert request.logprobs == pytest.approx(model_logprobs(model, [*PROMPTS[2], *request.tokens])[5:], abs=TOLERANCE)
