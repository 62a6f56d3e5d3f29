"""The same training on 1, 2 and 4 worker processes of this machine, and in one process without Ray.

    python benchmarks/scaling.py                # about 4 minutes
    python benchmarks/scaling.py --smoke        # a tiny model, to see whether it works

A real model with random weights, in float32, on CPU; all roles on all devices, the trainers' parameters sharded over
them. Each worker computes with one thread. So there is a core for each of up to as many workers as the machine has
cores, and beyond that there is nothing to win: what it then shows is what being several costs.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, temporary_folder
from overlap import ray_cluster
from tiny import SHAPE, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from corral.bench.comparison import BenchmarkReport, StepTimes, format_spread
from corral.bench.step_sides import timed_steps
from corral.recipe.schema import Recipe

LAYOUTS = {
    "no Ray, 1 process": {"runtime": "local"},
    "Ray, 1 worker": {"runtime": "ray", "devices_per_node": 1},
    "Ray, 2 workers": {"runtime": "ray", "devices_per_node": 2},
    "Ray, 4 workers": {"runtime": "ray", "devices_per_node": 4},
}
STAGES = ("play", "score", "learn", "transfer")


def main() -> None:
    options = parse_options()
    report = BenchmarkReport("scaling", "Training on several processes of one machine", options.results, ["ray"])
    measured: dict[str, StepTimes] = {}
    with temporary_folder() as folder, ray_cluster():
        model = Path(folder) / "model"
        num_parameters = save_model(model, options.smoke)
        for name in options.layouts:
            recipe = recipe_of(LAYOUTS[name], model, Path(folder), options)
            measured[name] = timed_steps(recipe)
            print(f"  {name}: " + ", ".join(f"{step['seconds']:.2f}" for step in measured[name]) + " s", flush=True)
    first = next(iter(measured.values()))
    rows = [
        [
            name,
            format_spread(seconds(steps)),
            f"{statistics.median(seconds(first)) / statistics.median(seconds(steps)):.2f} x",
            *(stage_s(steps, stage) for stage in STAGES),
        ]
        for name, steps in measured.items()
    ]
    batch = recipe.batch
    heading = (
        f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples x "
        f"{recipe.rollout.max_response_tokens} new tokens at most, {num_parameters / 1e6:.1f} M parameters, one thread "
        f"in each process, {os.cpu_count()} cores"
    )
    columns = ["", "step s: median (min-max)", "speed", *(f"{stage} s" for stage in STAGES)]
    report.add("scaling", heading, columns, rows, {"steps": measured})
    print(f"wrote {report.path}.json and .md")


def seconds(steps: StepTimes) -> list[float]:
    return [step["seconds"] for step in steps]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=5, help="of each; the first one is not counted")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="a tiny model; the numbers mean nothing")
    options = parser.parse_args()
    if options.smoke:
        options.steps = 2
    return options


def save_model(folder: Path, smoke: bool) -> int:
    """Returns its number of parameters."""
    size = {"hidden_size": 32} if smoke else {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **size}, tie_word_embeddings=True))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def recipe_of(cluster: dict[str, Any], model: Path, folder: Path, options: argparse.Namespace) -> Recipe:
    prompts, new = (4, 4) if options.smoke else (16, 24)
    return Recipe.model_validate(
        {
            "name": "scaling",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": {"path": "arithmetic:addition", "size": 256}, "max_prompt_tokens": 128},
            "environment": {"reward": {"name": "corral.bench.workloads:hash_reward", "workers": 1}},
            "rollout": {"max_response_tokens": new},
            "batch": {"prompts_per_step": prompts, "samples_per_prompt": 8, "max_tokens_per_micro_batch": 2048},
            "algorithm": {"kl": {"where": "loss"}},
            "schedule": {"steps": options.steps},
            "train": {"threads": 1},
            "logging": {"runs": str(folder / "runs"), "trajectories": False},
            "cluster": cluster,
        }
    )


def stage_s(steps: StepTimes, stage: str) -> str:
    """In one process no weights travel."""
    seconds = [step[f"time/{stage}_s"] for step in steps if f"time/{stage}_s" in step]
    return f"{statistics.median(seconds):.2f}" if seconds else "-"


if __name__ == "__main__":
    main()
