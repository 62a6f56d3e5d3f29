"""The sides of `corral bench rollout`: the same prompts, the same number of new tokens, temperature 1.

Every workload is warmed up first, with all its requests and fewer new tokens each, so that whatever a side captures or
compiles for a size of batch is not in the measurement. (Where lengths differ the batch gets smaller in the end, here as
there.) Start-up is from the beginning of the process to the end of the first warm-up.
"""

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.bench.settings import RolloutWork, Settings
from corral.bench.side import Tell
from corral.recipe.shape import ModelShape

WARM_UP_SHARE = 4
"""A warm-up has so many times fewer new tokens."""
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Generated:
    num_tokens: int
    logprob_sum: float | None = None
    """None: the side was not asked for log-probs."""


Prompts = Sequence[list[int]]
Generate = Callable[[Prompts, Sequence[int]], Generated]
"""(prompts, new tokens of each) -> what was drawn."""


def corral(settings: Settings, tell: Tell) -> None:
    """The native engine, as the rollout role has it."""
    import torch

    from corral.model.model_loading import load_model, load_tokenizer
    from corral.recipe.schema import Model
    from corral.rollout.engine import Sampling
    from corral.rollout.native import NativeEngine

    device = torch.device(settings.device)
    source = Model(path=settings.folder, dtype=settings.dtype)
    engine = NativeEngine(
        load_model(source, device),
        load_tokenizer(source),
        max_sequences=settings.max_sequences,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_length=most_tokens(settings),
    )
    tell.progress(f"loaded after {tell.elapsed_s:.0f} s")

    async def all_of(prompts: Prompts, lengths: Sequence[int]) -> Generated:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=length), seed)
                for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        tokens = sum(len(completion.tokens) for completion in completions)
        return Generated(tokens, sum(sum(completion.logprobs) for completion in completions))

    with asyncio.Runner() as runner:
        for work in settings.rollout:
            measure(settings, tell, work, lambda prompts, lengths: runner.run(all_of(prompts, lengths)))
    tell_of_cache(engine, tell)
    engine.close()


def tell_of_cache(engine: Any, tell: Tell) -> None:
    """What training gets while nothing is played, and how long that takes."""
    from corral.rollout.paged.core import PagedCore

    if isinstance(engine.core, PagedCore):
        started = time.perf_counter()
        engine.pause()
        paused = time.perf_counter()
        engine.resume()
        taken_ms, given_ms = 1000 * (time.perf_counter() - paused), 1000 * (paused - started)
        size = engine.core.cache.pool.num_bytes / 1e9
        tell.facts(remark=f"a cache of {size:.1f} GB was given back in {given_ms:.1f} ms, taken in {taken_ms:.1f} ms")


def transformers(settings: Settings, tell: Tell) -> None:
    """`generate`, one batch at a time: of the fixed batch of 128 only, with fewer new tokens, and no log-probs."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = torch.device(settings.device)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=settings.dtype).to(device).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )

    def generate(prompts: Prompts, lengths: Sequence[int]) -> Generated:
        tokens = torch.tensor(prompts, device=device)
        drawn = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max(lengths))
        return Generated((drawn.shape[1] - tokens.shape[1]) * len(prompts))

    for work in settings.rollout:
        if work.name == "fixed-128":
            most = min(settings.peers.transformers_new, work.most_new)
            shorter = RolloutWork(work.name, work.num_requests, work.prompt_tokens, most, most, repeats=1)
            measure(settings, tell, shorter, generate, variant=f"{most} new tokens, no log-probs")


def vllm(settings: Settings, tell: Tell) -> None:
    """vLLM's own scheduler, in its own process, with compilation and CUDA graphs as it comes. Log-probs of the drawn
    tokens in its flat form, which is its fastest, and as the dictionaries that it gives by default."""
    # FlashInfer's sampler is compiled on first use, which needs a CUDA toolkit; without top-k and top-p it is not used.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    library: Any = importlib.import_module("vllm")
    engine = library.LLM(
        model=settings.folder,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        gpu_memory_utilization=settings.peers.vllm_memory,
        max_model_len=most_tokens(settings) + 16,
        max_num_seqs=settings.max_sequences,
        enable_prefix_caching=False,  # all prompts are different
        seed=0,
    )
    tell.progress(f"loaded after {tell.elapsed_s:.0f} s")

    def generate_with(**options: Any) -> Generate:
        def generate(prompts: Prompts, lengths: Sequence[int]) -> Generated:
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [
                    library.SamplingParams(
                        max_tokens=length, ignore_eos=True, temperature=1.0, detokenize=False, **options
                    )
                    for length in lengths
                ],
                use_tqdm=False,
            )
            answers = [output.outputs[0] for output in outputs]
            return Generated(sum(len(answer.token_ids) for answer in answers), logprob_sum(answers))

        return generate

    for work in settings.rollout:
        measure(settings, tell, work, generate_with(logprobs=0, flat_logprobs=True))
        if work.repeats is None:
            measure(settings, tell, work, generate_with(), variant="no log-probs")
            measure(settings, tell, work, generate_with(logprobs=0), variant="log-probs as dictionaries")


def logprob_sum(answers: Sequence[Any]) -> float | None:
    """Of vLLM's answers: flat lists, or a dictionary for each token."""
    total = 0.0
    for answer in answers:
        if answer.logprobs is None:
            return None
        if hasattr(answer.logprobs, "logprobs"):
            total += sum(answer.logprobs.logprobs)
        else:
            total += sum(one[token].logprob for token, one in zip(answer.token_ids, answer.logprobs, strict=True))
    return total


def measure(settings: Settings, tell: Tell, work: RolloutWork, generate: Generate, variant: str = "") -> None:
    import torch

    from corral.bench.memory import memory

    shape = ModelShape.from_folder(Path(settings.folder))
    lengths = work.lengths()
    what = f"{work.name}{variant and f', {variant}'}"
    generate(work.prompts(shape.vocab_size, -1), [-(-length // WARM_UP_SHARE) for length in lengths])
    start_up_s = tell.ready()
    tell.progress(f"{what}: warm after {tell.elapsed_s:.0f} s")
    seconds, mean_logprob = [], None
    for repeat in range(work.repeats or settings.repeats):
        prompts = work.prompts(shape.vocab_size, repeat)
        started = time.perf_counter()
        generated = generate(prompts, lengths)
        seconds.append(time.perf_counter() - started)
        assert generated.num_tokens == sum(lengths), f"{what}: {generated.num_tokens} tokens, not {sum(lengths)}"
        if generated.logprob_sum is not None:
            mean_logprob = generated.logprob_sum / generated.num_tokens
        tell.progress(f"{what}: {sum(lengths)} tokens in {seconds[-1]:.2f} s")
    tell.row(
        workload=work.name,
        variant=variant,
        num_requests=work.num_requests,
        tokens=sum(lengths),
        seconds=seconds,
        tokens_per_s=sum(lengths) / min(seconds),
        mean_logprob=mean_logprob,
        decode_bytes=decode_bytes(shape, work, settings.max_sequences, BYTES[settings.dtype]),
        start_up_s=start_up_s,
        **memory(torch.device(settings.device)),
    )


def decode_bytes(shape: ModelShape, work: RolloutWork, max_sequences: int, value_bytes: int) -> int:
    """What has to be read at least: in every decode step all weights, of which the input embeddings are none, and for
    every new token the keys and values before it. Prompts are computed for nothing in this."""
    embeddings = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    weights = shape.num_parameters - embeddings
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    read = sum(length * work.prompt_tokens + length * (length + 1) // 2 for length in work.lengths())
    return value_bytes * (work.num_decode_steps(max_sequences) * weights + per_token * read)


def most_tokens(settings: Settings) -> int:
    return max(work.prompt_tokens + work.most_new for work in settings.rollout)
