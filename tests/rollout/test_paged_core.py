"""What only the paged core does: sharing pages, making room, reading long prompts in parts, decoding ahead."""

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
import torch
from test_native_engine import PROMPTS, TOLERANCE, assert_exact, generate, make_engine
from tiny import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from corral.kernels.paged_attention import PAGE
from corral.model.fused_layers import fuse
from corral.recipe.errors import UserError
from corral.recipe.schema import KEYS_PER_TOKEN
from corral.rollout import paged_core
from corral.rollout.engine import Completion, FinishReason, Sampling
from corral.rollout.engine_core import GenerationRequest
from corral.rollout.native_engine import NativeEngine
from corral.rollout.paged_core import PagedCore
from corral.rollout.paged_decoder import batch_size
from corral.rollout.paged_kv_cache import COPIED_PAGES, CacheShape, PagedKVCache, PagePool
from corral.rollout.prefill_scheduler import PrefillGroup

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels need heads of 32 and more")
LONG_PROMPT = [3 + i % 60 for i in range(150)]


def paged_engine(num_pages: int | None = None, **options: int) -> NativeEngine:
    engine = make_engine(core="paged", **options)  # type: ignore[arg-type]
    if num_pages is not None:
        core_of(engine).cache._num_pages = lambda: num_pages  # type: ignore[method-assign]
    return engine


def core_of(engine: NativeEngine) -> PagedCore:
    assert isinstance(engine.core, PagedCore)
    return engine.core


def assert_as_with_slots(completions: list[Completion], requests: list[tuple[list[int], Sampling, int]]) -> None:
    for ours, theirs in zip(completions, generate(make_engine(), requests), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


def assert_nothing_is_held(engine: NativeEngine) -> None:
    core = core_of(engine)
    gc.collect()
    core.acquire_cache()
    pool = core.cache.pool
    assert sorted(pool.free_pages) == list(range(1, pool.num_pages + 1))
    assert not pool.ref_counts.any()
    assert sorted(core.free_slots) == list(range(core.max_sequences))
    assert not core.page_table.any()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_fused_model_generates_as_it_does_module_by_module(family: str) -> None:
    requests = [(prompt, Sampling(max_tokens=12), 7 * i) for i, prompt in enumerate(PROMPTS * 2)]
    plain, fused = paged_engine(family=family), paged_engine(family=family)  # type: ignore[arg-type]
    assert fuse(fused.model)
    for ours, theirs in zip(generate(fused, requests), generate(plain, requests), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
    assert core_of(fused).decoder.rotary is not None  # type: ignore[union-attr]


@pytest.mark.slow
def test_sequences_of_several_pages_are_as_with_the_other_core() -> None:
    requests = [(LONG_PROMPT[: 40 + 20 * i], Sampling(max_tokens=90), i) for i in range(5)]
    assert_as_with_slots(generate(paged_engine(), requests), requests)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
@pytest.mark.slow
def test_samples_share_the_pages_of_their_prompt_and_write_into_none_of_them(length: int) -> None:
    engine = paged_engine()
    requests = [(LONG_PROMPT[:length], Sampling(max_tokens=20), seed) for seed in range(6)]
    assert_as_with_slots(generate(engine, requests), requests)
    assert engine.stats.num_computed_tokens - length < 6 * (20 + paged_core.WINDOW)
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_a_prompt_longer_than_a_prefill_batch_is_computed_in_chunks_between_which_others_are_decoded() -> None:
    engine = paged_engine(max_prefill_tokens=32)
    requests = [(PROMPTS[0], Sampling(max_tokens=60), 1), (LONG_PROMPT, Sampling(max_tokens=10), 2)]
    requests += [(PROMPTS[1], Sampling(max_tokens=10), 3)]
    passes: list[int] = []
    compute = core_of(engine).prefill.compute

    def counted(groups: list[PrefillGroup]) -> None:
        before = engine.stats.num_computed_tokens
        compute(groups)
        passes.append(engine.stats.num_computed_tokens - before)

    core_of(engine).prefill.compute = counted  # type: ignore[method-assign]
    assert_as_with_slots(generate(engine, requests), requests)
    assert max(passes) == 32
    assert_nothing_is_held(engine)


def test_a_prefill_batch_has_no_more_prompts_than_its_tokens_allow() -> None:
    core = core_of(paged_engine(max_prefill_tokens=12))
    core.acquire_cache()
    waiting = [GenerationRequest(np.array(prompt), Sampling(max_tokens=1), 0, None) for prompt in PROMPTS]
    batches = [core.prefill.next_batch(waiting, 4) for _ in range(2)]
    assert [[len(group.tokens) for group in batch] for batch in batches] == [[4, 3], [6, 6]]


def test_a_prefill_batch_gathers_no_more_keys_than_its_tokens_allow() -> None:
    engine = paged_engine(max_prefill_tokens=8)
    prompts = [LONG_PROMPT[i : 60 + i] for i in range(5)]

    async def first_turns() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=3), 1, keep_prefix=True) for p in prompts))

    turns = zip(prompts, asyncio.run(first_turns()), strict=True)
    waiting = [
        GenerationRequest(np.array([*prompt, *turn.tokens, 20]), Sampling(max_tokens=1), 0, None, prefix=turn.prefix)
        for prompt, turn in turns
    ]
    batches = [core_of(engine).prefill.next_batch(waiting, 5) for _ in range(3)]
    assert KEYS_PER_TOKEN * 8 == 2 * 64
    assert [[group.num_gathered for group in batch] for batch in batches] == [[64, 64], [64, 64], [64]]


@torch.no_grad()
def test_the_pages_of_a_prompt_in_chunks_are_not_given_to_running_sequences() -> None:
    def run(num_pages: int) -> list[list[int]]:
        engine = paged_engine(num_pages=num_pages, max_sequences=4, max_prefill_tokens=16)
        short = [GenerationRequest(np.array(PROMPTS[i]), Sampling(max_tokens=120), i, None) for i in range(2)]
        long = [GenerationRequest(np.array(LONG_PROMPT), Sampling(max_tokens=10), i, None) for i in range(2)]
        waiting = list(short)
        core_of(engine).step(waiting)
        waiting += long
        while waiting or core_of(engine).is_busy:
            core_of(engine).step(waiting)
        assert_nothing_is_held(engine)
        return [request.tokens for request in short + long]

    assert run(num_pages=7) == run(num_pages=100)


@pytest.mark.slow
def test_sequences_are_preempted_when_pages_run_out_and_continue_later_as_if_nothing_had_happened() -> None:
    engine = paged_engine(num_pages=5)
    preempted: list[int] = []
    put_back = core_of(engine)._preempt

    def noted(waiting: list[GenerationRequest]) -> None:
        put_back(waiting)
        preempted.append(len(waiting[0].tokens))

    core_of(engine)._preempt = noted  # type: ignore[method-assign]
    requests = [(PROMPTS[i % 4], Sampling(max_tokens=100), i) for i in range(6)]
    assert_as_with_slots(generate(engine, requests), requests)
    assert preempted
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_a_sequence_may_be_as_long_as_all_pages() -> None:
    engine = paged_engine(max_sequences=1)
    prompt = [3 + i % 60 for i in range(250)]
    requests = [(prompt, Sampling(max_tokens=6), seed) for seed in range(3)]
    assert_as_with_slots(generate(engine, requests), requests)
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_cached_prompts_are_evicted_for_running_sequences() -> None:
    engine = paged_engine(num_pages=6, max_sequences=4)
    prompts = [LONG_PROMPT[: 100 + i] for i in range(4)]
    requests = [(prompt, Sampling(max_tokens=100), seed) for prompt in prompts for seed in range(5)]
    assert_as_with_slots(generate(engine, requests), requests)
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_what_is_decoded_behind_a_stop_token_is_cut_off() -> None:
    engine = paged_engine(max_sequences=2)
    free = generate(engine, [(PROMPTS[0], Sampling(max_tokens=40), 5)])[0]
    sampling = Sampling(max_tokens=40, stop_tokens=frozenset(free.tokens[9:10]))
    first = free.tokens.index(free.tokens[9])
    requests = [(PROMPTS[0], sampling, 5), *((PROMPTS[i % 4], Sampling(max_tokens=30), 50 + i) for i in range(8))]
    stopped, *others = generate(engine, requests)
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == pytest.approx(free.logprobs[: first + 1], abs=TOLERANCE)
    assert stopped.finish_reason is FinishReason.STOP_TOKEN
    assert_as_with_slots(others, requests[1:])
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_cached_prefixes_are_evicted_for_running_sequences() -> None:
    engine = paged_engine(num_pages=4)

    async def run() -> tuple[list[Completion], Completion, Completion]:
        first = await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=4), 1, keep_prefix=True) for prompt in PROMPTS)
        )
        long = await engine.generate(LONG_PROMPT, Sampling(max_tokens=60), 2)
        again = [*PROMPTS[0], *first[0].tokens, 20]
        return first, long, await engine.generate(again, Sampling(max_tokens=4), 3, prefix=first[0].prefix)

    first, long, again = asyncio.run(run())
    assert all(completion.prefix is not None for completion in first)
    assert not any(completion.prefix.pages for completion in first)  # type: ignore[union-attr]
    assert_exact(engine, LONG_PROMPT, long)
    assert_exact(engine, [*PROMPTS[0], *first[0].tokens, 20], again)
    del first, long, again
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_several_requests_may_continue_one_cached_prefix() -> None:
    engine = paged_engine()

    async def run() -> list[tuple[list[int], Completion]]:
        first = await engine.generate(LONG_PROMPT[:70], Sampling(max_tokens=6), 1, keep_prefix=True)
        wholes = [[*LONG_PROMPT[:70], *first.tokens, *range(20, 23 + i)] for i in range(4)]
        completions = await asyncio.gather(
            *(engine.generate(whole, Sampling(max_tokens=10), 5, prefix=first.prefix) for whole in wholes)
        )
        return list(zip(wholes, completions, strict=True))

    before = engine.stats.num_computed_tokens
    for whole, completion in asyncio.run(run()):
        assert_exact(engine, whole, completion)
    assert engine.stats.num_computed_tokens - before < 2 * 70
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_a_cached_prefix_from_before_the_cache_was_released_is_prefilled_again() -> None:
    engine = paged_engine()

    async def run() -> tuple[list[int], Completion]:
        first = await engine.generate(PROMPTS[2], Sampling(max_tokens=6), 1, keep_prefix=True)
        engine.release_cache()
        assert core_of(engine).cache.pool.layers is None
        engine.acquire_cache()
        whole = [*PROMPTS[2], *first.tokens, 20]
        return whole, await engine.generate(whole, Sampling(max_tokens=6), 2, prefix=first.prefix)

    whole, completion = asyncio.run(run())
    assert_exact(engine, whole, completion)
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_where_the_memory_is_not_to_be_had_again_the_cache_gets_smaller() -> None:
    engine = paged_engine()
    cache = core_of(engine).cache
    before = generate(engine, [(PROMPTS[2], Sampling(max_tokens=20), 1)])[0]
    engine.release_cache()
    larger = cache.pool

    def others_have_it() -> None:
        raise torch.OutOfMemoryError("others have come to stay")

    larger.acquire = others_have_it  # type: ignore[method-assign]
    cache._num_pages = lambda: 10  # type: ignore[method-assign]
    assert generate(engine, [(PROMPTS[2], Sampling(max_tokens=20), 1)])[0].tokens == before.tokens
    assert cache.pool.num_pages == 10
    assert_nothing_is_held(engine)


@pytest.mark.slow
def test_an_update_between_two_chunks_of_a_prompt_prefills_it_again() -> None:
    engine = paged_engine(max_prefill_tokens=32, max_sequences=2)
    weights = [(name, weight.detach() * 0.9) for name, weight in engine.model.named_parameters()]

    async def run() -> Completion:
        other = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=60), 1))
        request = asyncio.ensure_future(engine.generate(LONG_PROMPT, Sampling(max_tokens=10), 2))
        while not core_of(engine).prefill.chunked:
            await asyncio.sleep(0.0002)
        await engine.update(weights, version=1)
        await other
        return await request

    completion = asyncio.run(run())
    assert completion.versions == [1] * 10
    assert_exact(engine, LONG_PROMPT, completion)
    assert_nothing_is_held(engine)


def test_graphs_come_in_few_sizes_and_decode_little_padding() -> None:
    sizes = {batch_size(count, 1000) for count in range(1, 1001)}
    assert len(sizes) < 20
    assert all(batch_size(count, 1000) >= count for count in range(1, 1001))
    assert max(batch_size(count, 1000) / count for count in range(128, 1001)) < 1.5


@pytest.fixture
def pool() -> PagePool:
    pool = PagePool(CacheShape(2, 1, 4, torch.float32), 6, torch.device("cpu"))
    pool.acquire()
    return pool


def test_a_page_is_free_when_its_last_reference_is_dropped(pool: PagePool) -> None:
    pages = pool.allocate(3)
    pool.add_reference(pages[:1])
    pool.free(pages)
    assert set(pool.free_pages) == {1, 2, 3, 4, 5, 6} - {pages[0]}
    pool.free(pages[:1])
    assert set(pool.free_pages) == {1, 2, 3, 4, 5, 6}
    assert 0 not in pool.free_pages


def test_a_copied_page_has_the_same_keys_and_values_in_all_layers(pool: PagePool) -> None:
    assert pool.layers is not None
    pool.layers.normal_()
    pool.copy([2, 3], [5, 6])
    assert torch.equal(pool.layers[:, :, [5, 6]], pool.layers[:, :, [2, 3]])


class LargestTensor(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def test_many_pages_are_copied_some_at_a_time() -> None:
    shape = CacheShape(2, 1, 4, torch.float32)
    pool = PagePool(shape, 100, torch.device("cpu"))
    pool.acquire()
    assert pool.layers is not None
    pool.layers.normal_()
    with LargestTensor() as largest:
        pool.copy(list(range(1, 41)), list(range(51, 91)))
    assert torch.equal(pool.layers[:, :, 51:91], pool.layers[:, :, 1:41])
    assert largest.num_bytes == COPIED_PAGES * shape.page_bytes


def test_the_cache_leaves_the_memory_that_passes_need() -> None:
    shape = CacheShape(2, 1, 4, torch.float32)
    passes = 100 * shape.page_bytes
    cache = PagedKVCache(shape, 4, 256, torch.device("cpu"), passes)
    assert cache.num_fitting(300 * shape.page_bytes, 5) == 300 - 100 - COPIED_PAGES - 1
    assert cache.num_fitting(10_000 * shape.page_bytes, 5) == 9000 - 1
    with pytest.raises(UserError, match=r"rollout\.max_prefill_tokens"):
        cache.num_fitting(passes, 5)


def test_the_memory_of_passes_grows_with_what_they_compute() -> None:
    def of(max_sequences: int = 64, max_prefill_tokens: int = 4096) -> int:
        core = core_of(paged_engine(max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens))
        return core.cache.pass_bytes - COPIED_PAGES * core.cache.shape.page_bytes

    assert of(max_prefill_tokens=8192) > 1.5 * of()
    assert of(max_sequences=640) > of()
