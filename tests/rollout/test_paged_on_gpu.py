"""The paged core with its kernels and graphs, against the reference core on the same GPU. Skipped without one."""

import asyncio
from typing import Any

import pytest
import torch
from test_native_engine import PROMPTS, generate
from tiny import DEVICE, tiny_config, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.model.attention import register
from corral.model.fused_layers import fuse
from corral.model.lora import ADAPTERS, LoraLinear, add_adapters
from corral.recipe.schema import Lora
from corral.rollout.engine import Completion, Sampling
from corral.rollout.native_engine import NativeEngine
from corral.rollout.paged_core import PagedCore
from corral.rollout.paged_kv_cache import free_memory

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
LONG_PROMPT = [3 + i % 60 for i in range(150)]


def config_of(family: str) -> Any:
    """`llama+lora` is a model with adapters."""
    config = tiny_config(family.partition("+")[0])
    config.head_dim = 32
    return config


def engines(family: str, dtype: torch.dtype, **options: int) -> tuple[NativeEngine, NativeEngine]:
    """(paged and fused, reference), with the same weights."""
    register()
    config = config_of(family)
    made = []
    for paged in (True, False):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="corral", dtype=dtype).eval().to(DEVICE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        if "+lora" in family:
            add_adapters(model, Lora(rank=8))
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    torch.nn.init.normal_(parameter, 0.0, 0.3)
        if paged:
            fuse(model)
        limits = {"max_sequences": 64, "max_prefill_tokens": 4096, **options}
        made.append(NativeEngine(model, tiny_tokenizer(), max_length=256, paged=paged, **limits))
    assert isinstance(made[0].core, PagedCore)
    return made[0], made[1]


def compare(ours: list[Completion], theirs: list[Completion]) -> None:
    """In float32 sampled tokens are the same until rounding makes a difference, and so are their log-probs."""
    differences: list[float] = []
    for a, b in zip(ours, theirs, strict=True):
        alike = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), len(a.tokens))
        differences += [abs(x - y) for x, y in zip(a.logprobs[:alike], b.logprobs[:alike], strict=True)]
    assert max(differences) < 3e-4
    assert sum(differences) / len(differences) < 1e-5
    assert len(differences) > 0.99 * sum(len(completion.tokens) for completion in ours)


def merged_in_float64(model: Any) -> dict[str, Tensor]:
    """The model's weights, with adapters merged into them without rounding."""
    weights = {name: weight.double().cpu() for name, weight in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            a, b = (weights.pop(f"{name}.{adapter}") for adapter in ADAPTERS)
            weights[f"{name}.weight"] += module.lora_scale * b @ a
    return weights


def errors(family: str, engine: NativeEngine, prompts: list[list[int]], played: list[Completion]) -> list[float]:
    """By how much each log-prob is off: transformers computes it in float64, with the same weights."""
    exact = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager", dtype=torch.float64)
    exact.set_experts_implementation("eager")
    exact.load_state_dict(merged_in_float64(engine.model))
    off: list[float] = []
    for prompt, completion in zip(prompts, played, strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        off += (logprobs - torch.tensor(completion.logprobs)).abs().tolist()
    return off


FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2+lora", "qwen3+lora"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_as_near_to_the_truth_as_the_reference_s(family: str, dtype: torch.dtype) -> None:
    prompts = [LONG_PROMPT[: 20 + 30 * (i % 5)] for i in range(20)]
    requests = [(prompt, Sampling(max_tokens=40 + i), i) for i, prompt in enumerate(prompts)]
    ours, theirs = (errors(family, engine, prompts, generate(engine, requests)) for engine in engines(family, dtype))
    assert sum(ours) < 1.5 * sum(theirs)
    assert max(ours) < 4 * max(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_those_of_the_reference_core(family: str) -> None:
    paged, reference = engines(family, torch.float32)
    requests = [(LONG_PROMPT[: 20 + 30 * (i % 5)], Sampling(max_tokens=40 + i), i) for i in range(20)]
    requests += [(prompt, Sampling(max_tokens=30, top_p=0.9, temperature=0.7), 9) for prompt in PROMPTS]
    requests += [(prompt, Sampling(max_tokens=30, temperature=0.0), 9) for prompt in PROMPTS]
    compare(generate(paged, requests), generate(reference, requests))


def test_few_slots_are_refilled_and_a_long_prompt_is_prefilled_in_chunks() -> None:
    paged, reference = engines("llama", torch.float32, max_sequences=3, max_prefill_tokens=32)
    requests = [(LONG_PROMPT[: 10 + 20 * (i % 7)], Sampling(max_tokens=5 + 7 * (i % 6)), i) for i in range(30)]
    compare(generate(paged, requests), generate(reference, requests))


def test_graphs_hold_after_the_cache_was_released_and_with_other_weights() -> None:
    paged, reference = engines("llama", torch.float32)
    requests = [(prompt, Sampling(max_tokens=30), 3) for prompt in PROMPTS]
    generate(paged, requests)
    before = torch.cuda.mem_get_info()[0]
    paged.release_cache()
    core = paged.core
    assert isinstance(core, PagedCore)
    assert torch.cuda.mem_get_info()[0] - before >= core.cache.pool.num_bytes
    graphs = dict(core.decoder.graphs)  # type: ignore[union-attr]
    weights = [(name, weight.detach() * 0.9) for name, weight in reference.model.named_parameters()]
    paged.load(weights, version=1)
    reference.load(weights, version=1)
    compare(generate(paged, requests), generate(reference, requests))
    assert core.decoder.graphs == graphs  # type: ignore[union-attr]


def test_without_virtual_memory_the_cache_comes_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.rollout.paged_kv_cache.keeps_address", lambda device: False)
    paged, reference = engines("llama", torch.float32)
    assert "does not manage virtual memory" in str(paged.warning)
    requests = [(prompt, Sampling(max_tokens=30), 3) for prompt in PROMPTS]
    for _ in range(2):
        compare(generate(paged, requests), generate(reference, requests))
        paged.release_cache()
        held = torch.empty(2**20, device=DEVICE)  # takes the address
    del held


def test_memory_that_graphs_have_cached_is_not_counted_as_free() -> None:
    paged, _ = engines("llama", torch.float32)
    generate(paged, [(PROMPTS[0], Sampling(max_tokens=30, top_p=0.9), 3)])
    torch.cuda.synchronize()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    of_graphs = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    assert of_graphs > 0
    assert free_memory(DEVICE) == torch.cuda.mem_get_info()[0] + cached - of_graphs


def test_weights_that_were_moved_are_captured_again() -> None:
    paged, reference = engines("llama", torch.float32)
    requests = [(prompt, Sampling(max_tokens=30), 3) for prompt in PROMPTS]
    generate(paged, requests)
    for parameter in paged.model.parameters():
        parameter.data = parameter.data.clone()
    compare(generate(paged, requests), generate(reference, requests))


def test_conversations_continue_from_their_pages() -> None:
    paged, reference = engines("qwen3", torch.float32)

    async def turns(engine: NativeEngine, seed: int) -> list[Completion]:
        tokens, prefix, answers = LONG_PROMPT[: 60 + seed], None, []
        for turn in range(4):
            answer = await engine.generate(tokens, Sampling(max_tokens=9), seed + turn, prefix=prefix, keep_prefix=True)
            tokens, prefix = [*tokens, *answer.tokens, 20, 21, 22], answer.prefix
            answers.append(answer)
        return answers

    async def all_of(engine: NativeEngine) -> list[Completion]:
        answers = await asyncio.gather(*(turns(engine, seed) for seed in range(12)))
        return [answer for conversation in answers for answer in conversation]

    compare(asyncio.run(all_of(paged)), asyncio.run(all_of(reference)))
    assert paged.stats.num_computed_tokens < 2 * reference.stats.num_computed_tokens


def test_tokens_on_a_gpu_may_depend_on_the_batch() -> None:
    assert not any(engine.is_reproducible for engine in engines("llama", torch.float32))
