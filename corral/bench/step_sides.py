"""The sides of `corral bench step`: a whole GRPO step, with the same prompts, samples, lengths, reward and optimizer.

No sample ends early (`endless_copy`), every one is trained on (`hash_reward`), and tokens and gradient norm are
checked, so that nobody wins by doing less.
"""

import importlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from corral.bench.benchmark_models import endless_copy, prompt_texts
from corral.bench.comparison import StepTimes
from corral.bench.device_peaks import memory_usage
from corral.bench.side_process import SideReporter
from corral.bench.workloads import BenchSettings, hash_reward
from corral.loop.components import OpenWorkers, open_runtime
from corral.loop.train import event_loop, running
from corral.loop.training_loop import Interrupt, run_steps
from corral.observe.console import Console
from corral.observe.run_folder import RunFolder
from corral.recipe.schema import Recipe

LEARNING_RATE = 1e-6


def corral(settings: BenchSettings, reporter: SideReporter) -> None:
    """A real run of a recipe: the loop of `corral train`, its reward processes and its records, all in one process."""
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        recipe = Recipe.model_validate(recipe_values(settings, Path(folder)))
        measured = timed_steps(recipe, on_step=lambda step: report_progress(reporter, step))
    for step in measured:
        step["generation_s"] = step["time/rollout_s"]
        step["tokens"] = round(step["speed/tokens_per_s"] * step["time/step_s"])
        step["gradient_norm"] = step["policy/gradient_norm"]
    furthest = max(step["policy/ratio_deviation"] for step in measured)
    reporter.facts(remark=f"engine against trainer: every ratio of the update is within {furthest:.2g} of 1")
    variant = f"micro-batches of {settings.micro_batch_tokens} tokens"
    report_row(settings, reporter, measured, variant + with_adapters(settings))


def recipe_values(settings: BenchSettings, folder: Path) -> dict[str, Any]:
    work, rows = settings.step, folder / "prompts.jsonl"
    endless_copy(Path(settings.folder), folder / "model")
    rows.write_text(
        "".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in random_prompts(settings, folder))
    )
    return {
        "name": "bench",
        "model": {
            "path": str(folder / "model"),
            "dtype": settings.dtype,
            "lora": {"rank": work.lora_rank} if work.lora_rank else None,
        },
        "data": {
            "train": {"path": str(rows)},
            "chat": False,
            "shuffle": False,
            "max_prompt_tokens": work.prompt_tokens,
        },
        "environment": {"reward": {"name": "corral.bench.workloads:hash_reward"}},
        "rollout": {
            "max_response_tokens": work.new_tokens,
            "max_sequences": min(settings.max_sequences, work.num_trajectories),
            "max_prefill_tokens": settings.max_prefill_tokens,
        },
        "batch": {
            "prompts_per_step": work.num_prompts,
            "samples_per_prompt": work.num_samples,
            "max_tokens_per_micro_batch": settings.micro_batch_tokens,
        },
        "train": {"logits_chunk": settings.micro_batch_tokens},
        "algorithm": {"name": "grpo"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "schedule": {"steps": work.steps + 1},
        "logging": {"runs": str(folder / "runs"), "trajectories": False},
    }


def trl(settings: BenchSettings, reporter: SideReporter) -> None:
    """TRL's GRPO trainer with vLLM in the same process, tuned.

    Without gradient checkpointing, sleep mode (both fit) and importance correction, which costs another forward pass,
    unless the settings ask for them. Without a GPU it generates with transformers.
    """
    # FlashInfer's sampler is compiled on first use, which needs a CUDA toolkit.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from transformers import AutoTokenizer, PrinterCallback

    library: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    clock = make_trl_clock(lambda step: report_progress(reporter, step))

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [hash_reward(completion) for completion in completions]

    with tempfile.TemporaryDirectory(prefix="corral-bench-") as name:
        folder = Path(name)
        endless_copy(Path(settings.folder), folder / "model")
        trainer = library.GRPOTrainer(
            model=str(folder / "model"),
            processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
            reward_funcs=rewards,
            train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in random_prompts(settings, folder)]),
            callbacks=[clock],
            peft_config=trl_adapters(settings.step.lora_rank),
            args=library.GRPOConfig(output_dir=str(folder / "out"), **trl_config(settings)),
        )
        trainer._generate = clock.timing_generation(trainer._generate)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    peers, config = settings.peers, trainer.args
    variant = f"{'vLLM' if config.use_vllm else 'transformers'}, micro-batches of {config.per_device_train_batch_size} "
    variant += f"samples, {peers.trl_dtype} weights"
    variant += ", gradient checkpointing" if peers.trl_checkpointing else ""
    variant += ", importance correction" if peers.trl_correction else ""
    variant += with_adapters(settings)
    report_row(settings, reporter, clock.steps(logs, config.generation_batch_size)[1:], variant)


def with_adapters(settings: BenchSettings) -> str:
    return f", LoRA of rank {settings.step.lora_rank}" if settings.step.lora_rank else ""


def trl_adapters(rank: int) -> Any:
    """PEFT's form of the recipe's adapters; None without."""
    if not rank:
        return None
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def trl_config(settings: BenchSettings) -> dict[str, Any]:
    work, peers, on_gpu = settings.step, settings.peers, settings.device == "cuda"
    micro_batch = min(peers.trl_micro_batch, work.num_trajectories)
    config: dict[str, Any] = {
        "model_init_kwargs": {"dtype": peers.trl_dtype},
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": peers.trl_checkpointing,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.num_trajectories // micro_batch,
        "num_generations": work.num_samples,
        "max_completion_length": work.new_tokens,
        "max_steps": work.steps + 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "beta": 0.0,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if on_gpu:
        config |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": peers.trl_vllm_memory,
            "vllm_max_model_length": work.prompt_tokens + work.new_tokens + 16,
            "vllm_importance_sampling_correction": peers.trl_correction,
            "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        }
    return config


def random_prompts(settings: BenchSettings, folder: Path) -> list[str]:
    """Prompts for all steps, different ones for each."""
    from transformers import AutoTokenizer

    work = settings.step
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return prompt_texts(tokenizer, work.num_prompts * (work.steps + 1), work.prompt_tokens, work.shared_tokens)


def report_progress(reporter: SideReporter, step: int) -> None:
    reporter.progress(f"step {step} done after {reporter.elapsed_s:.0f} s")


def report_row(settings: BenchSettings, reporter: SideReporter, measured: StepTimes, variant: str) -> None:
    work = settings.step
    for step in measured:
        assert step["tokens"] == work.num_tokens, f"{step['tokens']} tokens were generated, not {work.num_tokens}"
        assert step["gradient_norm"] > 0, "the gradient is zero"
    step_s = statistics.median(step["seconds"] for step in measured)
    generation_s = statistics.median(step["generation_s"] for step in measured)
    reporter.row(
        variant=variant,
        tokens=work.num_tokens,
        seconds=[step["seconds"] for step in measured],
        step_s=step_s,
        generation_s=generation_s,
        rest_s=statistics.median(step["seconds"] - step["generation_s"] for step in measured),
        tokens_per_s=work.num_tokens / step_s,
        steps=measured,
        start_up_s=reporter.elapsed_s - sum(step["seconds"] for step in measured),
        **memory_usage(torch.device(settings.device)),
    )


class StepClock(Console):
    """Records when each step was logged: from one to the next is a step, with all that is between two steps."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(io.StringIO())
        self.on_step = on_step
        self.records: list[tuple[float, float, Mapping[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((time.perf_counter(), time.process_time(), dict(metrics)))
        self.on_step(step)


def timed_steps(
    recipe: Recipe, open_workers: OpenWorkers = open_runtime, on_step: Callable[[int], None] = lambda step: None
) -> StepTimes:
    """Runs a recipe. Returns for each step but the first `seconds`, `cpu_s` of this process, and the step's metrics."""
    clock = StepClock(on_step)

    async def run_all(folder: RunFolder, interrupt: Interrupt) -> None:
        async with running(recipe, folder, clock, interrupt, open_workers=open_workers) as run:
            await run.supervisor.run(run_steps(run))

    with (
        event_loop(clock) as runner,
        RunFolder.open(recipe.logging.folder, recipe.name, "never") as folder,
        Interrupt(clock.warn) as interrupt,
    ):
        runner.run(run_all(folder, interrupt))
    return [
        {"seconds": end - start, "cpu_s": cpu_end - cpu_start, **metrics}
        for (start, cpu_start, _), (end, cpu_end, metrics) in zip(clock.records, clock.records[1:], strict=False)
    ]


def make_trl_clock(on_step: Callable[[int], None]) -> Any:
    """A callback of TRL's trainer; its base class is imported only here, with transformers."""
    from transformers import TrainerCallback

    class TrlClock(TrainerCallback):  # type: ignore[misc]
        """Records when optimizer steps end, and how long was generated in each."""

        def __init__(self) -> None:
            self.generation_s = 0.0
            self.ends: list[float] = []
            self.generations: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())
            self.generations.append(self.generation_s)
            self.generation_s = 0.0
            on_step(len(self.generations))

        def timing_generation(self, generate: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                started = time.perf_counter()
                result = generate(*arguments, **named)
                self.generation_s += time.perf_counter() - started
                return result

            return timed

        def steps(self, logs: list[dict[str, Any]], num_samples: int) -> StepTimes:
            """A dict for each step: `seconds` is from the end of one optimizer step to that of the next, and
            `generation_s` the part of it in which tokens are generated and new weights brought to the engine."""
            return [
                {
                    "seconds": self.ends[i + 1] - self.ends[i],
                    "generation_s": self.generations[i],
                    "tokens": round(log["completions/mean_length"] * num_samples),
                    "gradient_norm": log["grad_norm"],
                }
                for i, log in enumerate(logs)
            ]

    return TrlClock()
