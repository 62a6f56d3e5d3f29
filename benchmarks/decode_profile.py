"""Profile of the paged engine: decode steps of some batch sizes, kernel by kernel, and the ragged workload of
`corral bench rollout` twice in one process, the second time with everything compiled and captured.

    python benchmarks/decode_profile.py
"""

import argparse
import asyncio
import time

import torch
from torch.profiler import ProfilerActivity, profile

from corral.bench.benchmark_models import model_folder, save_random_model
from corral.bench.workloads import ROLLOUT, SMALL_ROLLOUT, RolloutWork
from corral.model.model_loading import load_model
from corral.recipe.schema import Model
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine
from corral.rollout.paged_core import PagedCore

STEPS = 8
"""Decode steps of a window, as the engine launches them."""


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-1.5b" if on_gpu else "tiny")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 512] if on_gpu else [4])
    parser.add_argument("--context", type=int, default=256, help="tokens before the first of the measured steps")
    arguments = parser.parse_args()
    [work] = [work for work in (ROLLOUT if on_gpu else SMALL_ROLLOUT) if work.name == "ragged"]
    engine = load_engine(arguments.model, on_gpu, max(1024 if on_gpu else 8, *arguments.sequences))
    for repeat in range(2):
        generate_ragged(engine, work, repeat)
    for count in arguments.sequences:
        profile_steps(engine, count, arguments.context)
    engine.close()


def load_engine(name: str, on_gpu: bool, max_sequences: int) -> NativeEngine:
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    folder = model_folder(name, dtype)
    if not folder.exists():
        save_random_model(name, folder, device, dtype)
    model = load_model(Model(path=str(folder), dtype=dtype), torch.device(device))
    return NativeEngine(model, None, max_sequences=max_sequences, max_prefill_tokens=8192, max_length=1152, paged=True)


def generate_ragged(engine: NativeEngine, work: RolloutWork, repeat: int) -> None:
    prompts, lengths = work.prompts(engine.model.config.vocab_size, repeat), work.lengths()

    async def generate() -> None:
        requests = enumerate(zip(prompts, lengths, strict=True))
        await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=n), seed) for seed, (p, n) in requests))

    start = time.perf_counter()
    asyncio.run(generate())
    seconds = time.perf_counter() - start
    print(f"{work.name}, turn {repeat + 1}: {seconds:.2f} s, {sum(lengths) / seconds:,.0f} new tokens/s", flush=True)


@torch.inference_mode()
def profile_steps(engine: NativeEngine, count: int, context: int) -> None:
    """Prints the time of a decode step and its slowest kernels. Every sequence has pages of its own, of random keys."""
    core = engine.core
    assert isinstance(core, PagedCore)
    core.acquire_cache()
    assert core.decoder is not None
    assert core.cache.pool.layers is not None
    core.cache.pool.layers.normal_()
    table = torch.arange(core.state.page_table.numel(), device=core.device).view_as(core.state.page_table)
    core.state.page_table.copy_(table % core.cache.pool.num_pages + 1)

    def window() -> None:
        core.state.positions.fill_(context)
        core.decoder.run(count, STEPS, False)  # type: ignore[union-attr]
        if core.device.type == "cuda":
            torch.cuda.synchronize()

    window()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        window()
        times.append(time.perf_counter() - start)
    print(f"\n{count} sequences, {context} tokens before: {1000 * sorted(times)[2] / STEPS:.3f} ms a step")
    if core.device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            window()
        for kernel in sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:12]:
            mean_us, times_a_step = kernel.self_device_time_total / kernel.count, kernel.count / STEPS
            print(
                f"{mean_us * times_a_step / 1000:8.3f} ms  {times_a_step:4.0f} x {mean_us:7.1f} us  {kernel.key[:80]}"
            )
    engine.release_cache()


if __name__ == "__main__":
    main()
