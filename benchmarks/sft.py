"""Seconds per step of supervised fine-tuning, Corral and TRL, on rows that begin with the same system message.

    python benchmarks/sft.py            # a quarter of an hour on one core
    python benchmarks/sft.py --smoke    # a tiny model, to see whether it works

Both sides have the same model in float32, the same rows in the same order, and the same AdamW. TRL computes every row
by itself, padded to the longest of its micro-batch; Corral computes what rows have in common once. The losses of the
first step have to be equal: else the two would not have done the same. On a machine that others use, CPU seconds with
OMP_NUM_THREADS=1 say more than seconds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from common import RESULTS, temporary_folder
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, TrainerCallback

from corral.bench.comparison import BenchmarkReport
from corral.bench.step_sides import timed_steps
from corral.data.rows import row_from_mapping
from corral.data.supervised import render_row
from corral.model.model_loading import load_tokenizer, model_source
from corral.recipe.schema import Recipe

LEARNING_RATE = 1e-5


def main() -> None:
    options = parse_options()
    report = BenchmarkReport(
        "sft", "Supervised fine-tuning on rows with a common beginning", options.results, packages=["trl"]
    )
    with temporary_folder() as name:
        folder = Path(name)
        model = options.model
        if options.smoke:
            save_tiny_model(folder / "model")
            model = str(folder / "model")
        recipe = make_recipe(folder, model, options)
        ours = timed_steps(recipe)
        our_loss = first_loss(folder)
        theirs, their_loss = trl_steps(folder, recipe, options)
    assert abs(our_loss - their_loss) < 1e-3, f"the first losses differ: {our_loss} and {their_loss}"
    medians = {
        name: [statistics.median(step[name] for step in steps) for steps in (ours, theirs)]
        for name in ("seconds", "cpu_s")
    }
    ratios = {name: trl_s / corral_s for name, (corral_s, trl_s) in medians.items()}
    report.add(
        "shared_beginning",
        f"{options.rows} rows a step, which share a system message of {options.shared_words} words",
        ["per step", "Corral", "TRL", "TRL / Corral"],
        [
            *([name, *(f"{value:.2f}" for value in both), f"{ratios[name]:.2f}"] for name, both in medians.items()),
            ["loss of the first", f"{our_loss:.4f}", f"{their_loss:.4f}", ""],
        ],
        {"ratios": ratios, "corral": ours, "trl": theirs},
    )


def make_recipe(folder: Path, model: str, options: argparse.Namespace) -> Recipe:
    rows = make_rows(options.rows * options.steps, options.shared_words)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate(
        {
            "name": "sft",
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": {"path": str(folder / "rows.jsonl")}, "max_prompt_tokens": 4000, "shuffle": False},
            "batch": {"prompts_per_step": options.rows, "max_tokens_per_micro_batch": 4096},
            "algorithm": {"name": "sft"},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "schedule": {"steps": options.steps},
            "logging": {"runs": str(folder / "runs"), "trajectories": False},
        }
    )


def make_rows(number: int, shared_words: int) -> list[dict[str, Any]]:
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(("time", "people", "way", "water", "day", "word")) for _ in range(count))

    system = {"role": "system", "content": words(shared_words)}
    return [
        {
            "messages": [
                system,
                {"role": "user", "content": words(15)},
                {"role": "assistant", "content": words(draw.randint(10, 30))},
            ]
        }
        for _ in range(number)
    ]


def first_loss(folder: Path) -> float:
    with (folder / "runs" / "sft" / "metrics.jsonl").open() as lines:
        return float(json.loads(next(lines))["policy/loss"])


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Records when optimizer steps end."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def trl_steps(folder: Path, recipe: Recipe, options: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """Seconds and CPU seconds of each step but the first, and the loss of the first."""
    tokenizer = load_tokenizer(recipe.model)
    clock = StepClock()
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_source(recipe.model.path), dtype=torch.float32),
        args=trl.SFTConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=min(options.trl_micro_batch, options.rows),
            gradient_accumulation_steps=options.rows // min(options.trl_micro_batch, options.rows),
            max_steps=options.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            packing=False,
            max_length=None,
            gradient_checkpointing=False,
            completion_only_loss=False,
            train_sampling_strategy="sequential",
        ),
        train_dataset=datasets.Dataset.from_list(tokenized(recipe, tokenizer)),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    pairs = zip(clock.ends, clock.ends[1:], strict=False)
    return [{"seconds": end - start, "cpu_s": cpu_end - cpu} for (start, cpu), (end, cpu_end) in pairs], losses[0]


def tokenized(recipe: Recipe, tokenizer: Any) -> Sequence[dict[str, Any]]:
    """The rows as TRL takes them when they are tokens already: the same tokens on both sides, and the same mask."""
    lines = Path(str(recipe.data.train.path)).read_text().splitlines()
    rows = [row_from_mapping(json.loads(line), recipe.data, with_completion=True) for line in lines]
    rendered = [render_row(tokenizer, row, chat=True) for row in rows]
    return [
        {"input_ids": tokens, "labels": [t if own else -100 for t, own in zip(tokens, trained, strict=True)]}
        for tokens, trained in rendered
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning: seconds per step of Corral and of TRL.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--shared-words", type=int, default=300, help="words of the system message, a token each")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--trl-micro-batch", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and short rows")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.shared_words, options.steps = 4, 20, 3
    if options.rows % min(options.trl_micro_batch, options.rows):
        parser.error("--rows must be a multiple of --trl-micro-batch")
    return options


if __name__ == "__main__":
    main()
