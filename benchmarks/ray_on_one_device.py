"""The same recipe in one process and under Ray with one device: the same numbers, and what Ray costs.

    python benchmarks/ray_on_one_device.py [--size small|medium] [--steps 10]

A random model of Qwen2's architecture is trained to generate vowels. Actor and rollout are in one process on the device
in both cases, so nothing is transferred.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import temporary_folder
from runs import REWARD
from tiny import SHAPE, tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

from corral.observe.run_files import read_metrics

SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    "medium": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
}
CORRAL = [sys.executable, "-c", "from corral.cli.main import main; main()"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    with temporary_folder() as folder:
        recipe = prepare(Path(folder), options.size, options.steps)
        here = train(recipe, "here")
        on_ray = train(recipe, "ray", "cluster.devices_per_node=1")
    print(f"device: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}; model: {options.size}")
    print(f"{'':<12}{'start to end':>14}{'median step':>13}{'reward first':>14}{'last':>8}")
    for name, (seconds, rows) in {"one process": here, "Ray": on_ray}.items():
        step = statistics.median(row["time/step_s"] for row in rows[1:])
        first, last = rows[0]["reward/mean"], rows[-1]["reward/mean"]
        print(f"{name:<12}{seconds:>12.1f} s{step:>11.3f} s{first:>14.3f}{last:>8.3f}")
    print(f"largest difference of a metric: {difference(here[1], on_ray[1]):.2g}")


def prepare(folder: Path, size: str, steps: int) -> Path:
    torch.manual_seed(0)
    shape = {**SHAPE, **SIZES[size], "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Qwen2Config(**shape, tie_word_embeddings=True)).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "vowels.py").write_text(REWARD)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""\
name: benchmark
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {{path: "arithmetic:addition", size: 400}}, max_prompt_tokens: 64}}
environment: {{reward: {{name: "{folder}/vowels.py:share_of_vowels"}}}}
rollout: {{max_response_tokens: 32, max_sequences: 128}}
batch: {{prompts_per_step: 16, samples_per_prompt: 8}}
optimizer: {{learning_rate: 1e-4}}
schedule: {{steps: {steps}}}
logging: {{runs: {folder}/runs, trajectories: false}}
"""
    )
    return recipe


def train(recipe: Path, name: str, *overrides: str) -> tuple[float, list[dict[str, Any]]]:
    started = time.perf_counter()
    subprocess.run([*CORRAL, "train", str(recipe), f"name={name}", *overrides], check=True)
    rows = read_metrics(recipe.parent / "runs" / name / "metrics.jsonl")
    return time.perf_counter() - started, [row for row in rows if "reward/mean" in row]


def difference(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    return max(
        abs(value - other[name])
        for row, other in zip(rows, others, strict=True)
        for name, value in row.items()
        if value is not None and not name.startswith(("time/", "speed/", "memory/"))
    )


if __name__ == "__main__":
    main()
