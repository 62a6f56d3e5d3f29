"""The sides of `corral bench rollout`: the same prompts, the same number of new tokens, temperature 1.

Every workload is warmed up first, with all its requests and a quarter of the new tokens each, so that what a side
captures or compiles for a batch size is not in the measurement. (Where lengths differ, the batch shrinks towards the
end in both.) Start-up is from the beginning of the process to the end of the first warm-up.
"""

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.bench.side_process import SideReporter
from corral.bench.workloads import CPU_WORKLOADS, GPU_WORKLOADS, BenchSettings, RolloutWork
from corral.recipe.memory import DTYPE_BYTES
from corral.recipe.shape import ModelShape

WARM_UP_DIVISOR = 4
"""A warm-up has a quarter of the new tokens."""


Prompts = Sequence[list[int]]
Generate = Callable[[Prompts, Sequence[int]], tuple[int, float | None]]
"""(prompts, new tokens of each) -> (tokens generated, sum of their log-probs, or None if they were not computed)."""


def corral(settings: BenchSettings, reporter: SideReporter) -> None:
    """The native engine, as a rollout worker has it."""
    import torch

    from corral.model.model_loading import load_model, load_tokenizer
    from corral.recipe.schema import Model
    from corral.rollout.engine import Sampling
    from corral.rollout.native_engine import NativeEngine

    device = torch.device(settings.device)
    source = Model(path=settings.folder, dtype=settings.dtype)
    engine = NativeEngine(
        load_model(source, device),
        load_tokenizer(source),
        max_sequences=num_sequences(settings),
        max_prefill_tokens=settings.max_prefill_tokens,
        max_length=max_length(settings),
    )
    reporter.progress(f"loaded after {reporter.elapsed_s:.0f} s")

    async def generate_all(prompts: Prompts, lengths: Sequence[int]) -> tuple[int, float]:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=length), seed)
                for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        tokens = sum(len(completion.tokens) for completion in completions)
        return tokens, sum(sum(completion.logprobs) for completion in completions)

    with asyncio.Runner() as runner:
        for work in settings.rollout:
            measure(settings, reporter, work, lambda prompts, lengths: runner.run(generate_all(prompts, lengths)))
    report_cache(engine, reporter)
    engine.close()


def report_cache(engine: Any, reporter: SideReporter) -> None:
    """Reports how much memory the engine frees for training, and how long freeing and taking it again takes."""
    from corral.rollout.paged_core import PagedCore

    if isinstance(engine.core, PagedCore):
        started = time.perf_counter()
        engine.release_cache()
        paused = time.perf_counter()
        engine.acquire_cache()
        resume_ms, pause_ms = 1000 * (time.perf_counter() - paused), 1000 * (paused - started)
        size = engine.core.cache.pool.num_bytes / 1e9
        reporter.facts(remark=f"a cache of {size:.1f} GB was freed in {pause_ms:.1f} ms, taken in {resume_ms:.1f} ms")


def transformers(settings: BenchSettings, reporter: SideReporter) -> None:
    """`generate`, one batch at a time. Of the workloads for GPUs only the fixed batch of 128, with fewer new tokens and
    no log-probs, for it is slow."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = torch.device(settings.device)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=settings.dtype).to(device).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )

    def generate(prompts: Prompts, lengths: Sequence[int]) -> tuple[int, None]:
        tokens = torch.tensor(prompts, device=device)
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max(lengths))
        return (output.shape[1] - tokens.shape[1]) * len(prompts), None

    def generate_with_logprobs(prompts: Prompts, lengths: Sequence[int]) -> tuple[int, float]:
        tokens = torch.tensor(prompts, device=device)
        options = {"max_new_tokens": max(lengths), "return_dict_in_generate": True, "output_scores": True}
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        logprobs = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        return logprobs.numel(), float(logprobs.sum())

    for work in settings.rollout:
        if work.name in CPU_WORKLOADS:
            measure(settings, reporter, work, generate_with_logprobs)
        elif work.name == "fixed-128":
            most = min(settings.peers.transformers_new_tokens, work.max_new_tokens)
            shorter = replace(work, min_new_tokens=most, max_new_tokens=most, repeats=1)
            measure(settings, reporter, shorter, generate, variant=f"{most} new tokens, no log-probs")


def vllm(settings: BenchSettings, reporter: SideReporter) -> None:
    """vLLM's own scheduler.

    On a GPU in a process of its own, with compilation and CUDA graphs as it comes; on a CPU in this process and eager,
    which was its fastest way there. Log-probs of the sampled tokens in its flat form, which is its fastest, and for the
    workloads of GPUs also as the dictionaries that it gives by default, and without any.
    """
    # FlashInfer's sampler is compiled on first use, which needs a CUDA toolkit; without top-k and top-p it is not used.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    options: dict[str, Any] = {"gpu_memory_utilization": settings.peers.vllm_memory}
    if settings.device == "cpu":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        options = {"enforce_eager": True, "max_num_batched_tokens": settings.max_prefill_tokens}
    if settings.peers.vllm_block_size is not None:
        options["block_size"] = settings.peers.vllm_block_size
    library: Any = importlib.import_module("vllm")
    reporter.facts(vllm_version=library.__version__)
    engine = library.LLM(
        model=settings.folder,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=max_length(settings) + 16,
        max_num_seqs=num_sequences(settings),
        # Only samples of one prompt have anything in common.
        enable_prefix_caching=any(work.num_samples > 1 for work in settings.rollout),
        seed=0,
        **options,
    )
    reporter.progress(f"loaded after {reporter.elapsed_s:.0f} s")

    def generate_with(**options: Any) -> Generate:
        options |= {"ignore_eos": True, "temperature": 1.0, "detokenize": False}

        def generate(prompts: Prompts, lengths: Sequence[int]) -> tuple[int, float | None]:
            sampling = [library.SamplingParams(max_tokens=length, **options) for length in lengths]
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.generate(inputs, sampling, use_tqdm=False)
            completions = [output.outputs[0] for output in outputs]
            return sum(len(one.token_ids) for one in completions), vllm_logprob_sum(completions)

        return generate

    for work in settings.rollout:
        measure(settings, reporter, work, generate_with(logprobs=0, flat_logprobs=True))
        if work.name in GPU_WORKLOADS and work.repeats is None:
            measure(settings, reporter, work, generate_with(), variant="no log-probs")
            measure(settings, reporter, work, generate_with(logprobs=0), variant="log-probs as dictionaries")


def vllm_logprob_sum(completions: Sequence[Any]) -> float | None:
    """Sum of the log-probs of vLLM's completions, which are flat lists, or a dictionary for each token."""
    total = 0.0
    for completion in completions:
        if completion.logprobs is None:
            return None
        if hasattr(completion.logprobs, "logprobs"):
            total += sum(completion.logprobs.logprobs)
        else:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            total += sum(position[token].logprob for token, position in pairs)
    return total


def sglang(settings: BenchSettings, reporter: SideReporter) -> None:
    """SGLang's engine, with CUDA graphs for as many sequences as are decoded at a time: its own largest one is smaller,
    which halves its speed on large batches."""
    library: Any = importlib.import_module("sglang")
    reporter.facts(sglang_version=library.__version__)
    most = min(num_sequences(settings), max(work.num_requests for work in settings.rollout))
    engine = library.Engine(
        model_path=settings.folder,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        sampling_backend="pytorch",  # FlashInfer's sampler is compiled on first use, which needs a CUDA toolkit
        mem_fraction_static=settings.peers.sglang_memory,
        max_running_requests=num_sequences(settings),
        cuda_graph_max_bs_decode=most,
        random_seed=0,
        log_level="error",
    )
    reporter.progress(f"loaded after {reporter.elapsed_s:.0f} s")

    def generate_with(return_logprob: bool) -> Generate:
        def generate(prompts: Prompts, lengths: Sequence[int]) -> tuple[int, float | None]:
            sampling = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
            options = {"sampling_params": sampling, "return_logprob": return_logprob}
            infos = [output["meta_info"] for output in engine.generate(input_ids=list(prompts), **options)]
            num_tokens = sum(info["completion_tokens"] for info in infos)
            if not return_logprob:
                return num_tokens, None
            return num_tokens, sum(entry[0] for info in infos for entry in info["output_token_logprobs"])

        return generate

    for work in settings.rollout:
        measure(settings, reporter, work, generate_with(return_logprob=True))
        if work.name in GPU_WORKLOADS and work.repeats is None:
            measure(settings, reporter, work, generate_with(return_logprob=False), variant="no log-probs")


def measure(
    settings: BenchSettings, reporter: SideReporter, work: RolloutWork, generate: Generate, variant: str = ""
) -> None:
    """Warms a workload up, measures it, and reports a row. Checks that nobody generates fewer tokens than it has to."""
    import torch

    from corral.bench.device_peaks import memory_usage

    shape = ModelShape.from_folder(Path(settings.folder))
    lengths = work.lengths()
    what = f"{work.name}{variant and f', {variant}'}"
    generate(work.prompts(shape.vocab_size, -1), [-(-length // WARM_UP_DIVISOR) for length in lengths])
    start_up_s = reporter.ready()
    reporter.progress(f"{what}: warm after {reporter.elapsed_s:.0f} s")
    seconds: list[float] = []
    for repeat in range(work.repeats or settings.repeats):
        prompts = work.prompts(shape.vocab_size, repeat)
        started = time.perf_counter()
        num_tokens, logprob_sum = generate(prompts, lengths)
        seconds.append(time.perf_counter() - started)
        assert num_tokens == sum(lengths), f"{what}: {num_tokens} tokens, not {sum(lengths)}"
        mean_logprob = None if logprob_sum is None else logprob_sum / num_tokens
        reporter.progress(f"{what}: {sum(lengths)} tokens in {seconds[-1]:.2f} s")
    reporter.row(
        workload=work.name,
        variant=variant,
        num_requests=work.num_requests,
        tokens=sum(lengths),
        seconds=seconds,
        tokens_per_s=sum(lengths) / min(seconds),
        mean_logprob=mean_logprob,
        # Where samples share a prompt, the least to read depends on how much of that a side makes use of.
        decode_bytes=None
        if work.num_samples > 1
        else decode_bytes(shape, work, settings.max_sequences, DTYPE_BYTES[settings.dtype]),
        start_up_s=start_up_s,
        **memory_usage(torch.device(settings.device)),
    )


def decode_bytes(shape: ModelShape, work: RolloutWork, max_sequences: int, value_bytes: int) -> int:
    """Bytes that must be read at least: all weights in every decode step (not the input embeddings, of which only some
    rows are), and for every new token the keys and values before it. Computing the prompts is not counted."""
    embeddings = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    weights = shape.num_parameters - embeddings
    read = sum(length * work.prompt_tokens + length * (length + 1) // 2 for length in work.lengths())
    return value_bytes * (work.num_decode_steps(max_sequences) * weights + shape.kv_values_per_token * read)


def max_length(settings: BenchSettings) -> int:
    return max(work.prompt_tokens + work.max_new_tokens for work in settings.rollout)


def num_sequences(settings: BenchSettings) -> int:
    """Sequences decoded at a time; on a CPU, where the cache for them is allocated at once, no more than needed."""
    most = max(work.num_requests for work in settings.rollout)
    return min(settings.max_sequences, most) if settings.device == "cpu" else settings.max_sequences
