"""TRL's GRPO trainer with a clock, on a GPU or a CPU."""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from corral.bench.side import Measured


def timed_trl_steps(
    *,
    model: str,
    prompts: Sequence[Any],
    reward: Callable[[str], float],
    config: dict[str, Any],
    on_step: Callable[[int], None] = lambda step: None,
) -> Measured:
    """One dict for each step, the first included: its `seconds`, from the end of one optimizer step to the next one's,
    of which `generation_s` (with the new weights brought to the engine), `tokens` drawn, `prompt_tokens` and the
    `gradient_norm`. `prompts`: texts, or lists of messages; in their order."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from transformers import AutoTokenizer, PrinterCallback

    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    clock = make_clock(on_step)

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [reward(one if isinstance(one, str) else one[0]["content"]) for one in completions]

    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=rewards,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[clock],
        args=trl.GRPOConfig(
            shuffle_dataset=False,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **config,
        ),
    )
    trainer._generate = clock.timing_generation(trainer._generate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    num_samples = trainer.args.generation_batch_size
    steps: Measured = clock.steps([log for log in trainer.state.log_history if "grad_norm" in log], num_samples)
    return steps


def make_clock(on_step: Callable[[int], None]) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when optimizer steps end, and how long was generated in each."""

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

        def steps(self, logs: list[dict[str, Any]], num_samples: int) -> Measured:
            seen = [0, *(round(log["num_tokens"]) for log in logs)]  # counted over the run, prompts included
            tokens = [round(log["completions/mean_length"] * num_samples) for log in logs]
            return [
                {
                    "seconds": self.ends[i + 1] - self.ends[i],
                    "generation_s": self.generations[i],
                    "tokens": tokens[i],
                    "gradient_norm": log["grad_norm"],
                    "prompt_tokens": seen[i + 1] - seen[i] - tokens[i],
                }
                for i, log in enumerate(logs)
            ]

    return Clock()
