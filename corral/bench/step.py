"""The sides of `corral bench step`: a whole GRPO step, with the same prompts, samples, lengths, reward and optimizer.

No sample ends early and every one is trained on (see `models.py` and `reward.py`), and the gradient norm is told, so
nobody wins by doing less.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from corral.bench.memory import memory
from corral.bench.models import endless_copy, prompt_texts
from corral.bench.reward import hash_reward
from corral.bench.settings import Settings
from corral.bench.side import Measured, Tell

LEARNING_RATE = 1e-6


def corral(settings: Settings, tell: Tell) -> None:
    """A real run of a recipe: the loop of `corral train`, its reward processes and its records, all in one process."""
    from corral.bench.timed import timed_steps
    from corral.recipe.schema import Recipe

    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        recipe = Recipe.model_validate(recipe_values(settings, Path(folder)))
        steps = timed_steps(recipe, on_step=lambda step: told(tell, step))
    for step in steps:
        step["generation_s"] = step["time/rollout_s"]
        step["tokens"] = round(step["speed/tokens_per_s"] * step["time/step_s"])
        step["gradient_norm"] = step["policy/gradient_norm"]
    furthest = max(step["policy/ratio_deviation"] for step in steps)
    tell.facts(remark=f"engine against trainer: every ratio of the update is within {furthest:.2g} of 1")
    report(settings, tell, steps, f"micro-batches of {settings.micro_batch_tokens} tokens")


def recipe_values(settings: Settings, folder: Path) -> dict[str, Any]:
    work, rows = settings.step, folder / "prompts.jsonl"
    endless_copy(Path(settings.folder), folder / "model")
    rows.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in prompts_of(settings, folder)))
    return {
        "name": "bench",
        "model": {"path": str(folder / "model"), "dtype": settings.dtype},
        "data": {
            "train": {"path": str(rows)},
            "chat": False,
            "shuffle": False,
            "max_prompt_tokens": work.prompt_tokens,
        },
        "environment": {"reward": {"name": "corral.bench.reward:hash_reward"}},
        "rollout": {
            "max_response_tokens": work.num_new,
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


def trl(settings: Settings, tell: Tell) -> None:
    """TRL's trainer with vLLM in the same process, tuned: no gradient checkpointing, no sleep mode (both fit), and,
    unless asked for, no importance correction, which costs another forward pass. Without a GPU it generates with
    transformers."""
    from corral.bench.trl import timed_trl_steps

    work, peers, on_gpu = settings.step, settings.peers, settings.device == "cuda"
    micro_batch = min(peers.trl_micro_batch, work.num_trajectories)
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as name:
        folder = Path(name)
        endless_copy(Path(settings.folder), folder / "model")
        config: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "model_init_kwargs": {"dtype": peers.trl_dtype},
            "bf16": on_gpu,
            "use_cpu": not on_gpu,
            "gradient_checkpointing": peers.trl_checkpointing,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": work.num_trajectories // micro_batch,
            "num_generations": work.num_samples,
            "max_completion_length": work.num_new,
            "max_steps": work.steps + 1,
            "learning_rate": LEARNING_RATE,
            "loss_type": "grpo",
            "beta": 0.0,
        }
        if on_gpu:
            config |= {
                "use_vllm": True,
                "vllm_mode": "colocate",
                "vllm_gpu_memory_utilization": peers.trl_vllm_memory,
                "vllm_max_model_length": work.prompt_tokens + work.num_new + 16,
                "vllm_importance_sampling_correction": peers.trl_correction,
                "generation_kwargs": {"ignore_eos": True, "detokenize": False},
            }
        steps = timed_trl_steps(
            model=str(folder / "model"),
            prompts=prompts_of(settings, folder),
            reward=hash_reward,
            config=config,
            on_step=lambda step: told(tell, step),
        )
    engine = "vLLM" if on_gpu else "transformers"
    about = f"{engine}, micro-batches of {micro_batch} samples, {peers.trl_dtype} weights"
    about += ", gradient checkpointing" if peers.trl_checkpointing else ""
    about += ", importance correction" if peers.trl_correction else ""
    report(settings, tell, steps[1:], about)


def prompts_of(settings: Settings, folder: Path) -> list[str]:
    """New ones for every step."""
    from transformers import AutoTokenizer

    work = settings.step
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return prompt_texts(tokenizer, work.num_prompts * (work.steps + 1), work.prompt_tokens)


def told(tell: Tell, step: int) -> None:
    tell.progress(f"step {step} done after {tell.elapsed_s:.0f} s")


def report(settings: Settings, tell: Tell, steps: Measured, variant: str) -> None:
    work = settings.step
    for step in steps:
        assert step["tokens"] == work.num_tokens, f"{step['tokens']} tokens were drawn, not {work.num_tokens}"
        assert step["gradient_norm"] > 0, "nothing was learnt"
    step_s = statistics.median(step["seconds"] for step in steps)
    generation_s = statistics.median(step["generation_s"] for step in steps)
    tell.row(
        variant=variant,
        tokens=work.num_tokens,
        seconds=[step["seconds"] for step in steps],
        step_s=step_s,
        generation_s=generation_s,
        rest_s=statistics.median(step["seconds"] - step["generation_s"] for step in steps),
        tokens_per_s=work.num_tokens / step_s,
        steps=steps,
        start_up_s=tell.elapsed_s - sum(step["seconds"] for step in steps),
        **memory(torch.device(settings.device)),
    )
