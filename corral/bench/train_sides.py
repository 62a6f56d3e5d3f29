"""The sides of `corral bench train`: forward, backward and AdamW, with and without gradient checkpointing."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from corral.bench.device_peaks import memory_usage, synchronize
from corral.bench.side_process import SideReporter
from corral.bench.workloads import BenchSettings
from corral.recipe.shape import ModelShape

LEARNING_RATE = 1e-6


def corral(settings: BenchSettings, reporter: SideReporter) -> None:
    """The native trainer, with float32 master weights; log-probs and entropy of every token."""
    from corral.model.model_loading import load_model
    from corral.recipe.schema import Model, Optimizer, Train
    from corral.training.native_trainer import NativePolicyTrainer

    device = torch.device(settings.device)
    model = load_model(Model(path=settings.folder, dtype=settings.dtype), device)
    policy = NativePolicyTrainer(
        model,
        temperature=1.0,
        logits_chunk=Train().logits_chunk,
        optimizer=Optimizer(learning_rate=LEARNING_RATE),
        total_updates=10**6,
    )
    pack = random_pack(settings)

    def step() -> float:
        policy.forward_backward([(pack, lambda logprobs, entropy: -logprobs.sum() / settings.train.num_tokens)])
        result = policy.step()
        assert not result.skipped, "the update was not finite"
        return result.gradient_norm

    for recompute in ("full", "none"):
        policy.activations.checkpointing = recompute == "full"
        measure(settings, reporter, step, recompute=recompute, masters="float32")


def transformers(settings: BenchSettings, reporter: SideReporter) -> None:
    """A plain model with its own loss, and fused AdamW without master weights, so it does less."""
    from transformers import AutoModelForCausalLM

    device = torch.device(settings.device)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=settings.dtype, attn_implementation="sdpa")
    model = model.to(device).train()
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    vocab_size = ModelShape.from_folder(Path(settings.folder)).vocab_size
    tokens = torch.tensor(settings.train.sequences(vocab_size), device=device)[:, :-1]

    def step() -> float:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return float(norm)

    for recompute in ("full", "none"):
        if recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        measure(settings, reporter, step, recompute=recompute, masters="none")


def random_pack(settings: BenchSettings) -> Any:
    """One micro-batch of sequences without a common prefix; all tokens but the first of each are predicted."""
    from corral.data.batch import Batch, Trajectory

    vocab_size = ModelShape.from_folder(Path(settings.folder)).vocab_size
    trajectories = [Trajectory.from_tokens(sequence) for sequence in settings.train.sequences(vocab_size)]
    [pack] = Batch.of(trajectories).pack(settings.train.num_tokens)
    return pack


def measure(settings: BenchSettings, reporter: SideReporter, step: Callable[[], float], **about: str) -> None:
    """Times `step`, which returns the gradient's norm, and reports a row."""
    device, work = torch.device(settings.device), settings.train
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(work.warm_up + work.measured):
        synchronize(device)
        started = time.perf_counter()
        norm = step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        if number in (0, work.warm_up):
            reporter.progress(f"recompute {about['recompute']}, step {number + 1}: {seconds[-1]:.3f} s")
    step_s = statistics.median(seconds[work.warm_up :])
    parameters = ModelShape.from_folder(Path(settings.folder)).num_parameters
    reporter.row(
        **about,
        tokens=work.num_tokens,
        seconds=seconds[work.warm_up :],
        step_s=step_s,
        tokens_per_s=work.num_tokens / step_s,
        tflops=6 * parameters * work.num_tokens / step_s / 1e12,
        gradient_norm=norm,
        **memory_usage(device),
    )
