"""What every `Engine` promises, checked through the seam alone. Each check is given a function that makes an engine."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch
from deadlines import within
from torch import Tensor

from corral.rollout.engine import Completion, Engine, FinishReason, Sampling

MakeEngine = Callable[[], Engine]
"""An engine over a model with at least 60 tokens, whose weights are the same each time, for sequences of up to 256
tokens."""
PROMPTS = [[5, 6, 7, 8], [5, 6, 9], [40, 41, 42, 43, 44, 45]]
LONG = 240 if torch.cuda.is_available() else 100
"""Tokens that are not all generated before an update begins."""
TOLERANCE = 1e-4
"""In log-probs: engines may compute one token at a time and a whole sequence with different kernels."""


def new_weights(engine: Engine) -> list[tuple[str, Tensor]]:
    """Random ones, made from nothing but the layout."""
    generator = torch.Generator().manual_seed(9)
    return [
        (name, (0.3 * torch.randn(shape, generator=generator)).to(dtype)) for name, shape, dtype in engine.weight_layout
    ]


async def generate_all(engine: Engine, sampling: Sampling, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts)))


async def check_logprobs(engine: Engine, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    computed = await engine.compute_logprobs([*prompt, *completion.tokens], temperature)
    assert completion.logprobs == pytest.approx(computed[len(prompt) - 1 :], abs=TOLERANCE)


async def a_completion_has_a_log_prob_and_a_version_for_each_token(make: MakeEngine) -> None:
    engine = make()
    steps_before = engine.num_decode_steps
    completions = await generate_all(engine, Sampling(max_tokens=12, temperature=0.8))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert (len(completion.tokens), completion.finish_reason) == (12, FinishReason.LENGTH)
        assert completion.versions == [0] * 12
        await check_logprobs(engine, prompt, completion, temperature=0.8)
    assert engine.num_in_flight == 0
    assert engine.num_decode_steps > steps_before


async def more_requests_than_sequences_wait_and_finish(make: MakeEngine) -> None:
    engine = make()
    prompts = [PROMPTS[i % 3] for i in range(2 * engine.max_sequences + 1)]
    running = asyncio.ensure_future(generate_all(engine, Sampling(max_tokens=40), prompts))
    while not engine.num_in_flight:
        await asyncio.sleep(0.001)  # not 0: a loop that spins takes the GIL from the engine
    assert engine.num_in_flight == len(prompts)
    assert [len(completion.tokens) for completion in await running] == [40] * len(prompts)


async def a_stop_token_ends_a_completion_and_is_part_of_it(make: MakeEngine) -> None:
    engine, greedy = make(), Sampling(max_tokens=20, temperature=0.0)
    free = await engine.generate(PROMPTS[0], greedy, 0)
    stop = free.tokens[4]
    stopped = await engine.generate(
        PROMPTS[0], Sampling(max_tokens=20, temperature=0.0, stop_tokens=frozenset([stop])), 0
    )
    assert stopped.finish_reason is FinishReason.STOP_TOKEN
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def log_probs_are_those_before_truncation(make: MakeEngine) -> None:
    engine = make()
    completion = await engine.generate(PROMPTS[0], Sampling(max_tokens=8, top_k=2, top_p=0.9), 3)
    await check_logprobs(engine, PROMPTS[0], completion)


async def a_reproducible_engine_samples_the_same_tokens_in_any_batch(make: MakeEngine) -> None:
    sampling, engine = Sampling(max_tokens=10), make()
    if engine.is_reproducible:
        together = await generate_all(engine, sampling, PROMPTS * 3)
        alone = [await engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(PROMPTS * 3)]
        assert [completion.tokens for completion in together] == [completion.tokens for completion in alone]


async def an_impossible_request_is_refused(make: MakeEngine) -> None:
    engine = make()
    for tokens, max_tokens, message in (([], 5, "at least one token"), ([1] * 250, 10, "pass the limit of 256")):
        with pytest.raises(ValueError, match=message):
            await engine.generate(tokens, Sampling(max_tokens=max_tokens), 0)
    assert engine.num_in_flight == 0


async def loaded_weights_generate_and_an_empty_load_only_sets_the_version(make: MakeEngine) -> None:
    engine = make()
    before = await engine.compute_logprobs(PROMPTS[2], 1.0)
    engine.load(new_weights(engine), version=3)
    after = await engine.compute_logprobs(PROMPTS[2], 1.0)
    assert after != before
    engine.load((), version=4)
    assert await engine.compute_logprobs(PROMPTS[2], 1.0) == after
    completion = await engine.generate(PROMPTS[2], Sampling(max_tokens=3), 0)
    assert completion.versions == [4] * 3
    await check_logprobs(engine, PROMPTS[2], completion)


async def requests_in_flight_continue_with_updated_weights(make: MakeEngine) -> None:
    engine = make()
    weights, before = new_weights(engine), engine.num_decode_steps
    running = asyncio.ensure_future(generate_all(engine, Sampling(max_tokens=LONG)))
    while engine.num_decode_steps < before + 9:
        await asyncio.sleep(0.001)  # not 0: a loop that spins takes the GIL from the engine
    assert await engine.update(weights, version=1) > 0
    for completion in await running:
        assert set(completion.versions) == {0, 1}
        assert completion.versions == sorted(completion.versions)
    later = await engine.generate(PROMPTS[1], Sampling(max_tokens=5), 1)
    assert later.versions == [1] * 5
    await check_logprobs(engine, PROMPTS[1], later)


def half(weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from weights[:4]
    raise ConnectionError("the sender died")


async def after_an_update_that_failed_requests_wait_or_have_the_old_weights_whole(make: MakeEngine) -> None:
    engine = make()
    weights = new_weights(engine)

    undisturbed = await engine.generate(PROMPTS[0], Sampling(max_tokens=LONG), 0)
    before = engine.num_decode_steps
    running = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=LONG), 0))
    while engine.num_decode_steps < before + 9:
        await asyncio.sleep(0.001)  # not 0: a loop that spins takes the GIL from the engine
    with pytest.raises(ConnectionError):
        await engine.update(half(weights), version=1)
    await asyncio.sleep(0.02)
    assert engine.num_in_flight == 1
    await engine.update(weights, version=2)
    completion = await running
    assert set(completion.versions) == {0, 2}
    old = completion.versions.index(2)
    if engine.is_reproducible:
        assert completion.tokens[:old] == undisturbed.tokens[:old]
        assert completion.logprobs[:old] == pytest.approx(undisturbed.logprobs[:old], abs=TOLERANCE)


async def after_an_update_that_failed_weights_can_be_loaded(make: MakeEngine) -> None:
    engine = make()
    weights = new_weights(engine)

    with pytest.raises(ConnectionError):
        await engine.update(half(weights), version=1)
    engine.load(weights, version=2)
    completion = await asyncio.wait_for(engine.generate(PROMPTS[0], Sampling(max_tokens=3), 0), within(30))
    assert completion.versions == [2] * 3
    await check_logprobs(engine, PROMPTS[0], completion)


async def a_conversation_continues_from_its_cached_prefix(make: MakeEngine) -> None:
    engine, sampling = make(), Sampling(max_tokens=6)
    first = await engine.generate(PROMPTS[0], sampling, 1, keep_prefix=True)
    whole = [*PROMPTS[0], *first.tokens, 20, 21, 22]
    continued = await engine.generate(whole, sampling, 2, prefix=first.prefix)
    await check_logprobs(engine, whole, continued)
    if engine.is_reproducible:
        assert continued.tokens == (await engine.generate(whole, sampling, 2)).tokens


async def a_cached_prefix_of_other_weights_is_not_used(make: MakeEngine) -> None:
    engine, sampling = make(), Sampling(max_tokens=6)
    first = await engine.generate(PROMPTS[0], sampling, 1, keep_prefix=True)
    engine.load(new_weights(engine), version=1)
    whole = [*PROMPTS[0], *first.tokens, 20]
    await check_logprobs(engine, whole, await engine.generate(whole, sampling, 2, prefix=first.prefix))


async def a_released_cache_is_acquired_by_the_next_request(make: MakeEngine) -> None:
    engine, sampling = make(), Sampling(max_tokens=6)
    first = await engine.generate(PROMPTS[0], sampling, 1, keep_prefix=True)
    engine.release_cache()
    whole = [*PROMPTS[0], *first.tokens, 20]
    await check_logprobs(engine, whole, await engine.generate(whole, sampling, 2, prefix=first.prefix))


ENGINE_CONTRACT = [
    a_completion_has_a_log_prob_and_a_version_for_each_token,
    more_requests_than_sequences_wait_and_finish,
    a_stop_token_ends_a_completion_and_is_part_of_it,
    log_probs_are_those_before_truncation,
    a_reproducible_engine_samples_the_same_tokens_in_any_batch,
    an_impossible_request_is_refused,
    loaded_weights_generate_and_an_empty_load_only_sets_the_version,
    requests_in_flight_continue_with_updated_weights,
    after_an_update_that_failed_requests_wait_or_have_the_old_weights_whole,
    after_an_update_that_failed_weights_can_be_loaded,
    a_conversation_continues_from_its_cached_prefix,
    a_cached_prefix_of_other_weights_is_not_used,
    a_released_cache_is_acquired_by_the_next_request,
]
