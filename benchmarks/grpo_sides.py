"""The two sides of `grpo_vs_trl.py`: a few GRPO steps with Corral's own parts, and the same with TRL's trainer.

Both return one dict for each step, the warm-up included: `seconds`, of which `generation_s`, `tokens` drawn,
`prompt_tokens` (once for each sample) and the `gradient_norm`: nobody wins by doing less.
"""

import argparse
import asyncio
import io
import tempfile
import time
from pathlib import Path
from typing import Any

from report import HERE, Measured
from workloads import SMOKE, WORKLOADS, Workload

QUICKSTART = HERE.parent / "recipes" / "quickstart.yaml"
LEARNING_RATE = 1e-6

TRL_SIDES: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-tuned": {"gradient_checkpointing": False, "one_micro_batch": True},
    "trl-tuned-8": {"gradient_checkpointing": False},
}


def workload_of(name: str, options: argparse.Namespace) -> Workload:
    return (SMOKE if options.smoke else WORKLOADS)[name]


def recipe_of(options: argparse.Namespace) -> Any:
    from corral.recipe.load import load_recipe
    from corral.recipe.schema import Recipe

    workload = workload_of(options.workload, options)
    source = {"path": f"{HERE / 'workloads.py'}:rows", "options": {"name": options.workload}}
    values: dict[str, Any] = {"data": {"train": source, "chat": workload.chat}, "batch": {}, "rollout": {}}
    if options.workload == "quickstart":
        values = load_recipe(QUICKSTART).model_dump(exclude_unset=True, include={"data", "batch", "rollout"})
        values["data"].pop("validation")
        values["rollout"].pop("stop")
    values["data"] |= {"shuffle": False}
    values["batch"] |= {"prompts_per_step": workload.num_prompts, "samples_per_prompt": workload.num_samples}
    values["rollout"] |= {"max_response_tokens": workload.num_new, "temperature": 1.0}
    return Recipe(
        name="benchmark",
        model={"path": options.model, "dtype": "float32"},
        environment={"reward": {"name": "corral.bench.reward:hash_reward"}},
        algorithm={"name": "grpo"},
        optimizer={"learning_rate": LEARNING_RATE},
        schedule={"steps": options.steps + 1},
        train={"threads": options.threads},
        **values,
    )


def corral_steps(options: argparse.Namespace) -> Measured:
    """The loop of `corral.loop.training_loop.steps`, with a clock. Generation includes the rewards."""
    return asyncio.run(timed_corral_steps(recipe_of(options), options.steps + 1))


async def timed_corral_steps(recipe: Any, num_steps: int) -> Measured:
    from corral.data.batch import Batch
    from corral.loop.advantages_step import advantages, plan_updates, score
    from corral.loop.components import open_components
    from corral.loop.rollout_step import PendingRollout
    from corral.loop.update import learn
    from corral.observe.console import Console
    from corral.observe.ledger import Ledger

    steps = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        async with open_components(recipe, Console(io.StringIO()), Path(folder), None) as parts:
            stats = parts.runtime.worker.site.hosted["rollout"].engine.stats
            for step in range(num_steps):
                computed, started = stats.computed_tokens, time.perf_counter()
                played = await PendingRollout(parts, ledger, step + 1).whole()
                played_at = time.perf_counter()
                batch = Batch.of(played.trajectories)
                updates = plan_updates(parts, batch)
                await score(parts, batch, updates)
                metrics = advantages(parts, batch, played)
                metrics |= (await learn(parts, batch, updates, step + 1)).metrics()
                await parts.publisher.publish(step + 1, parts.scheduler.lanes)
                ended = time.perf_counter()
                steps.append(
                    {
                        "seconds": ended - started,
                        "generation_s": played_at - started,
                        "tokens": batch.num_generated,
                        "gradient_norm": metrics["policy/gradient_norm"],
                        "prompt_tokens": int((~batch.generated).sum()),
                        "tokens_computed_by_engine": stats.computed_tokens - computed,
                        "tokens_computed_by_trainer": sum(pack.tree.num_nodes for pack in batch.pack(10**9)),
                    }
                )
    return steps


def trl_steps(options: argparse.Namespace) -> Measured:
    """TRL's own trainer; a step is from one optimizer step's end to the next one's."""
    import torch

    from corral.bench.reward import hash_reward
    from corral.bench.trl import timed_trl_steps
    from corral.data.sources import load_rows

    torch.set_num_threads(options.threads)
    recipe, workload, tuning = recipe_of(options), workload_of(options.workload, options), dict(TRL_SIDES[options.side])
    num_steps, num_samples = options.steps + 1, workload.num_prompts * workload.num_samples
    rows = load_rows(recipe.data.train, recipe.data)[: num_steps * workload.num_prompts]
    micro_batch = num_samples if tuning.pop("one_micro_batch", False) else 8
    return timed_trl_steps(
        model=options.model,
        prompts=[row.prompt if workload.chat else row.prompt[0]["content"] for row in rows],
        reward=hash_reward,
        config={
            "output_dir": "trl",
            "model_init_kwargs": {"dtype": "float32"},
            "bf16": False,
            "use_cpu": True,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": num_samples // micro_batch,
            "num_generations": workload.num_samples,
            "max_completion_length": workload.num_new,
            "max_steps": num_steps,
            "learning_rate": LEARNING_RATE,
            **tuning,
        },
    )
