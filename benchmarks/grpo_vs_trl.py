"""One GRPO step, Corral against TRL: same model, prompts, samples, lengths, optimiser, reward, dtype and threads.

    python benchmarks/grpo_vs_trl.py                # everything; needs TRL in the same Python
    python benchmarks/grpo_vs_trl.py --workloads short --rounds 1 --steps 1

Each side runs in a process of its own, one after the other, in turns (A B C A B C). The first step of a process is
warm-up. TRL is measured as it comes and tuned in two ways; the ratio is against the fastest of the three.
"""

import argparse
import importlib.util
import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import HERE, RESULTS, Report, SideFailed, median, run_side, spread
from workloads import WORKLOADS, Workload, hash_reward

QUICKSTART = HERE.parent / "recipes" / "quickstart.yaml"
LEARNING_RATE = 1e-6
NEVER_SAID = "<gh_stars>"
"""A token that a model never draws, put in the place of its end-of-turn token: no sample ends early, on any side."""

TRL_SIDES: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-tuned": {"gradient_checkpointing": False, "one_micro_batch": True},
    "trl-tuned-8": {"gradient_checkpointing": False},
}
SIDES = {
    "corral": "Corral",
    "trl": "TRL, its defaults (micro-batches of 8, gradient checkpointing)",
    "trl-tuned": "TRL tuned: no checkpointing, one micro-batch",
    "trl-tuned-8": "TRL tuned: no checkpointing, micro-batches of 8",
}


def main() -> None:
    options = parse_options()
    if options.side:
        measure = corral_steps if options.side == "corral" else trl_steps
        Path(options.out).write_text(json.dumps(measure(options)))
        return
    sides = list(SIDES) if options.sides is None else options.sides
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed in this Python, so only Corral is measured: pip install torch==2.13.0 trl==1.16.0")
        sides = ["corral"]
    report = Report("grpo_vs_trl", "A GRPO step, Corral against TRL (float32)", options.results)
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        model = endless_model(options.model, Path(folder) / "model")
        for name in options.workloads:
            compare(report, name, model, sides, options)
    print(f"wrote {report.out}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, a hub name, or the built-in one")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn, besides the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    for hidden in ("--side", "--workload", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def endless_model(model: str, folder: Path) -> str:
    """A copy of the model (weights linked) whose end token is `NEVER_SAID`."""
    from corral.model.load import model_source
    from corral.recipe.errors import UserError
    from transformers import AutoTokenizer

    try:
        source = Path(model_source(model))
    except UserError as error:
        raise SystemExit(str(error)) from error
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = tokenizer.convert_tokens_to_ids(NEVER_SAID)
    assert end != tokenizer.unk_token_id, f"{model} has no token {NEVER_SAID}; name another one that it never says"
    changes = {"tokenizer_config.json": NEVER_SAID, "config.json": end, "generation_config.json": end}
    for name, value in changes.items():
        settings = json.loads((folder / name).read_text())
        settings["eos_token" if isinstance(value, str) else "eos_token_id"] = value
        (folder / name).write_text(json.dumps(settings))
    return str(folder)


def compare(report: Report, name: str, model: str, sides: list[str], options: argparse.Namespace) -> None:
    workload = WORKLOADS[name]
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(options.rounds):
        for side in sides:
            arguments = ["--side", side, "--workload", name, "--model", model, "--steps", str(options.steps)]
            try:
                steps = run_side(sys.executable, Path(__file__).name, arguments, options.threads)[1:]
            except SideFailed as error:
                print(error)
                continue
            measured[side] += steps
            seconds = ", ".join(f"{step['step_s']:.2f}" for step in steps)
            print(f"{name}, turn {turn + 1}, {side}: {seconds} s a step", flush=True)
            for step in steps:
                if step["tokens"] != workload.tokens_per_step or not step["gradient_norm"] > 0:
                    print(f"  NOT THE SAME WORK: {step}")
    medians = {side: median([step["step_s"] for step in steps]) for side, steps in measured.items() if steps}
    rivals = {side: value for side, value in medians.items() if side != "corral"}
    best = min(rivals, key=rivals.__getitem__) if rivals else None
    rows = [table_row(side, measured[side], workload, medians.get("corral"), side == best) for side in medians]
    shape = f"{workload.num_prompts} prompts x {workload.num_samples} samples x {workload.num_new} new tokens"
    columns = ["", "step s: median (min-max)", "generation s", "rest s", "new tokens/s", "against Corral"]
    report.add(name, shape, columns, rows, {"workload": vars(workload), "fastest_rival": best, "steps": measured})


def table_row(
    side: str, steps: list[dict[str, Any]], workload: Workload, corral_s: float | None, is_best: bool
) -> list[str]:
    step_s = [step["step_s"] for step in steps]
    generation_s = median([step["generation_s"] for step in steps])
    rest_s = median([step["step_s"] - step["generation_s"] for step in steps])
    ratio = "" if corral_s is None else f"{median(step_s) / corral_s:.2f} x the time"
    return [
        SIDES[side],
        spread(step_s),
        f"{generation_s:.2f}",
        f"{rest_s:.2f}",
        f"{workload.tokens_per_step / median(step_s):.1f}",
        f"**{ratio}**" if is_best else ratio,
    ]


# --- the sides


def recipe_of(options: argparse.Namespace) -> Any:
    from corral.recipe.load import load_recipe
    from corral.recipe.schema import Recipe

    workload = WORKLOADS[options.workload]
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
        environment={"reward": {"name": f"{HERE / 'workloads.py'}:hash_reward"}},
        algorithm={"name": "grpo"},
        optimiser={"learning_rate": LEARNING_RATE},
        schedule={"steps": options.steps + 1},
        train={"threads": options.threads},
        **values,
    )


def corral_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The loop of `corral.loop.train.steps`, with a clock. Generation includes the rewards."""
    from corral.data.batch import Batch
    from corral.loop.parts import build_parts
    from corral.loop.record import step_metrics
    from corral.loop.stages import advantages, learn, plan_updates, play, score
    from corral.observe.console import Console

    recipe, console, steps = recipe_of(options), Console(io.StringIO()), []
    parts = build_parts(recipe, console, None)
    try:
        for step in range(options.steps + 1):
            computed, started = parts.engine.stats.computed_tokens, time.perf_counter()
            with console.stage("playing") as progress:
                played = play(parts, progress)
            played_at = time.perf_counter()
            batch = Batch.of(played.trajectories)
            updates = plan_updates(parts, batch)
            score(parts, batch, updates)
            metrics = advantages(parts, batch, played)
            metrics |= learn(parts, batch, updates, step + 1).metrics()
            parts.engine.load((), version=step + 1)
            metrics |= step_metrics(played, batch, recipe.batch.samples_per_prompt)
            ended = time.perf_counter()
            steps.append(
                {
                    "step_s": ended - started,
                    "generation_s": played_at - started,
                    "tokens": batch.num_generated,
                    "gradient_norm": metrics["policy/gradient_norm"],
                    "prompt_tokens": int((~batch.generated).sum()),
                    "tokens_computed_by_engine": parts.engine.stats.computed_tokens - computed,
                    "tokens_computed_by_trainer": sum(pack.tree.num_nodes for pack in batch.pack(10**9)),
                }
            )
    finally:
        parts.close()
    return steps


def trl_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """TRL's own trainer; a step is from one optimiser step's end to the next one's."""
    import torch
    from corral.data.sources import load_rows
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    recipe, workload, tuning = recipe_of(options), WORKLOADS[options.workload], dict(TRL_SIDES[options.side])
    num_steps, num_samples = options.steps + 1, workload.num_prompts * workload.num_samples
    rows = load_rows(recipe.data.train, recipe.data)[: num_steps * workload.num_prompts]
    prompts = [row.prompt if workload.chat else row.prompt[0]["content"] for row in rows]
    micro_batch = num_samples if tuning.pop("one_micro_batch", False) else 8
    clock = {"generation_s": 0.0, "ends": [], "generations": []}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock["ends"].append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock["ends"].append(time.perf_counter())
            clock["generations"].append(clock["generation_s"])
            clock["generation_s"] = 0.0

    class TimedTrainer(GRPOTrainer):
        def _generate(self, *arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate(*arguments, **named)
            clock["generation_s"] += time.perf_counter() - started
            return result

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [hash_reward(c if isinstance(c, str) else c[0]["content"]) for c in completions]

    trainer = TimedTrainer(
        model=options.model,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir="trl",
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_samples // micro_batch,
            num_generations=workload.num_samples,
            max_completion_length=workload.num_new,
            shuffle_dataset=False,
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **tuning,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [
        {
            "step_s": clock["ends"][i + 1] - clock["ends"][i],
            "generation_s": clock["generations"][i],
            "tokens": round(log["completions/mean_length"] * num_samples),
            "gradient_norm": log["grad_norm"],
        }
        for i, log in enumerate(logs)
    ]


if __name__ == "__main__":
    main()
