"""Prints the table of `docs/clusters.md`: what `corral plan --fit` proposes for public models on devices of 80 GB.

Folders with each model's `config.json` are made for it; no weights are needed.

    python docs/fit_table.py
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.cli.main import app
from corral.recipe.errors import UserError

DEVICES = ("1xh100-80", "8xh100-80", "4x8xh100-80")
RECIPE = """\
name: fit
model: {path: MODEL}
data:
  train: {path: rows.jsonl}
  max_prompt_tokens: 1024
rollout: {max_response_tokens: 3072}
batch: {prompts_per_step: 128, samples_per_prompt: 8}
schedule: {steps: 100}
"""


def dense(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }


def mixture(hidden: int, layers: int, heads: int, expert_size: int) -> dict[str, Any]:
    return {
        **dense(hidden, layers, heads, 4, 3 * hidden),
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "moe_intermediate_size": expert_size,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }


MODELS = {
    "Qwen2.5-7B": dense(3584, 28, 28, 4, 18944),
    "Qwen2.5-14B": dense(5120, 48, 40, 8, 13824),
    "Qwen2.5-32B": dense(5120, 64, 40, 8, 27648),
    "Qwen2.5-72B": dense(8192, 80, 64, 8, 29568),
    "Qwen3-30B-A3B": mixture(2048, 48, 32, 768),
    "Qwen3-235B-A22B": mixture(4096, 94, 64, 1536),
}


def write_inputs(folder: Path) -> Path:
    """Writes the models' folders and a recipe, and returns the recipe."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def table() -> Iterator[str]:
    yield "| full training | 1 x 80 GB | 8 x 80 GB | 4 nodes of 8 x 80 GB |"
    yield "| --- | --- | --- | --- |"
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_inputs(Path(folder))
        for model in MODELS:
            cells = (cell(recipe, Path(folder) / model, devices) for devices in DEVICES)
            yield f"| {model} | {' | '.join(cells)} |"


def cell(recipe: Path, model: Path, devices: str) -> str:
    """What `corral plan recipe.yaml model.path=MODEL --fit --devices DEVICES --json` has found."""
    printed = io.StringIO()
    command = ["plan", str(recipe), f"model.path={model}", "--fit", "--devices", devices, "--json"]
    try:
        with contextlib.redirect_stdout(printed):
            app(command, standalone_mode=False)
    except UserError as error:
        needed = str(error).partition("settings need is ")[2].partition(" of a device")[0]
        return f"does not fit: needs {needed}"
    found = json.loads(printed.getvalue())
    return f"{found['settings']}: {found['peak_bytes'] / 2**30:.0f} GiB, about {found['step_s']:.0f} s a step"


if __name__ == "__main__":
    print("\n".join(table()))
