"""New weights while requests are in flight: which tokens are computed with which, and what is noted of it."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from deadlines import within
from test_native_engine import PROMPTS, TOLERANCE, generate, make_engine
from tiny import DEVICE
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from corral.recipe.errors import RunError
from corral.rollout.engine import Completion, Sampling
from corral.rollout.engine_core import GenerationRequest
from corral.rollout.native_engine import NativeEngine, copy_weights

LONG = Sampling(max_tokens=24)
STEPS = {"slots": 9, "paged": 2}
"""After so many the weights come: with about a third of the tokens to go."""
SAMPLES = [(PROMPTS[2], LONG, seed) for seed in range(10)]


def new_weights(engine: NativeEngine) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    own = [(name, parameter.detach()) for name, parameter in engine.model.named_parameters()]
    return [(name, p + 0.1 * torch.randn(p.shape, generator=generator).to(DEVICE)) for name, p in own]


def sampled_before(completion: Completion) -> int:
    """Tokens that the old weights drew: some, not all."""
    old = completion.versions.count(0)
    assert 0 < old < len(completion.versions)
    return old


def updated_engine(core: str) -> NativeEngine:
    """One that never had the old weights."""
    engine = make_engine(core=core)
    engine.load(new_weights(engine), version=1)
    return engine


def generate_across_update(
    engine: NativeEngine,
    requests: list[tuple[list[int], Sampling, int]],
    weights: Iterable[tuple[str, Tensor]],
    *,
    after: int,
    later: Iterable[tuple[list[int], Sampling, int]] = (),
) -> tuple[list[Any], Any]:
    """(completions, seconds paused), or what was raised instead. The weights come when `after` steps are over, and then
    the `later` requests."""

    async def run() -> tuple[list[Any], Any]:
        loop, step, counter = asyncio.get_running_loop(), engine.step, itertools.count(1)
        calls: list[asyncio.Future[Any]] = []

        def update() -> None:
            calls.append(asyncio.ensure_future(engine.update(weights, version=1)))
            calls.extend(asyncio.ensure_future(engine.generate(*request)) for request in later)

        def counted_step() -> list[GenerationRequest]:
            finished = step()
            if next(counter) == after:
                loop.call_soon_threadsafe(update)  # before the pump hears that the step is over
            return finished

        engine.step = counted_step  # type: ignore[method-assign]
        early = await asyncio.gather(*(engine.generate(*request) for request in requests), return_exceptions=True)
        seconds, *late = await asyncio.gather(*calls, return_exceptions=True)
        return [*early, *late], seconds

    return asyncio.run(run())


def test_a_completion_notes_which_version_drew_each_token_and_the_pause_is_returned(core: str) -> None:
    engine = make_engine(core=core)
    (completion,), seconds = generate_across_update(engine, SAMPLES[:1], new_weights(engine), after=STEPS[core])
    old = sampled_before(completion)
    assert completion.versions == [0] * old + [1] * (24 - old)
    assert 0 < seconds < within(10)


def test_tokens_sampled_before_an_update_are_as_without_it(core: str) -> None:
    undisturbed = generate(make_engine(core=core), SAMPLES)
    engine = make_engine(core=core)
    completions, _ = generate_across_update(engine, SAMPLES, new_weights(engine), after=STEPS[core])
    for ours, theirs in zip(completions, undisturbed, strict=True):
        old = sampled_before(ours)
        assert (ours.tokens[:old], ours.logprobs[:old]) == (theirs.tokens[:old], theirs.logprobs[:old])
        assert ours.tokens[old:] != theirs.tokens[old:]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_after_an_update_new_weights_attend_to_what_the_old_ones_left_in_the_cache(family: str, core: str) -> None:
    engine = make_engine(family, core=core)
    weights = new_weights(engine)
    old = [(name, parameter.detach().clone()) for name, parameter in engine.model.named_parameters()]
    completions, _ = generate_across_update(engine, SAMPLES, weights, after=STEPS[core])
    theirs = AutoModelForCausalLM.from_config(engine.model.config, attn_implementation="eager").eval().to(DEVICE)
    for completion in completions:
        copy_weights(theirs, old)
        history = torch.tensor([PROMPTS[2] + completion.tokens], device=DEVICE)
        # The last token that the old weights drew was read by the new ones.
        num_read = len(PROMPTS[2]) + sampled_before(completion) - 1
        cache = DynamicCache()
        with torch.no_grad():
            before = theirs(history[:, :num_read], past_key_values=cache).logits
            copy_weights(theirs, weights)
            after = theirs(history[:, num_read:-1], past_key_values=cache).logits
        logits = torch.cat([before, after], dim=1)[0, len(PROMPTS[2]) - 1 :]
        expected = logits.log_softmax(-1).gather(-1, history[0, len(PROMPTS[2]) :, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.slow
def test_samples_that_start_after_an_update_have_nothing_of_the_old_weights(core: str) -> None:
    engine = make_engine(max_sequences=3, core=core)
    completions, _ = generate_across_update(engine, SAMPLES, new_weights(engine), after=STEPS[core])
    assert [completion.versions[0] for completion in completions] == [0] * 3 + [1] * 7
    for ours, theirs in zip(completions[3:], generate(updated_engine(core), SAMPLES[3:]), strict=True):
        assert ours.versions == [1] * 24
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=1e-5, abs=TOLERANCE)


def test_a_request_that_comes_after_an_update_is_of_the_new_version_alone(core: str) -> None:
    engine = make_engine(core=core)
    later = (PROMPTS[2], LONG, 77)
    (*_, ours), _ = generate_across_update(engine, SAMPLES, new_weights(engine), after=STEPS[core], later=[later])
    (theirs,) = generate(updated_engine(core), [later])
    assert ours.versions == [1] * 24
    assert ours.tokens == theirs.tokens
    assert ours.logprobs == pytest.approx(theirs.logprobs, rel=1e-5, abs=TOLERANCE)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.slow
def test_after_weights_that_broke_off_requests_have_the_old_ones_or_wait_but_never_a_mixture(
    core: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(core=core)
    weights = new_weights(engine)
    old = [parameter.detach().clone() for parameter in engine.model.parameters()]
    monkeypatch.setattr(engine, "has_room_for_weights", lambda: has_room)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights[:4]
        raise RunError("the sender died")

    async def go() -> list[int]:
        prompt, _, seed = SAMPLES[0]
        request = asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=200), seed))
        while engine.stats.num_generated_tokens < 9:
            await asyncio.sleep(0.001)  # not 0: a loop that spins takes the GIL from the engine
        with pytest.raises(RunError, match="the sender died"):
            await engine.update(broken(), version=1)
        drawn = engine.stats.num_generated_tokens
        if has_room:
            assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), old, strict=True))
            while engine.stats.num_generated_tokens == drawn:
                await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(0.2)
            assert engine.stats.num_generated_tokens == drawn
        await engine.update(weights, version=2)
        return (await request).versions

    assert set(asyncio.run(go())) == {0, 2}


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.slow
def test_decoding_goes_on_while_weights_arrive_where_they_fit_twice(
    core: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(core=core)
    weights, drawn = new_weights(engine), list[int]()
    monkeypatch.setattr(engine, "has_room_for_weights", lambda: has_room)

    def slowly() -> Iterator[tuple[str, Tensor]]:
        before, deadline = engine.stats.num_generated_tokens, time.monotonic() + (within(30) if has_room else 0.3)
        while engine.stats.num_generated_tokens < before + 9 and time.monotonic() < deadline:
            time.sleep(0.001)
        drawn.append(engine.stats.num_generated_tokens - before)
        yield from weights

    async def go() -> tuple[float, list[int]]:
        prompt, _, seed = SAMPLES[0]
        request = asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=200), seed))
        while engine.stats.num_generated_tokens < 9:
            await asyncio.sleep(0.001)
        pause_s = await engine.update(slowly(), version=1)
        return pause_s, (await request).versions

    pause_s, versions = asyncio.run(go())
    assert set(versions) == {0, 1}
    assert drawn[0] >= 9 if has_room else drawn[0] == 0
    assert has_room or pause_s >= 0.3
