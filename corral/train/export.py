"""A checkpoint without its optimizer: the model and tokenizer, for transformers, vLLM and others."""

import json
import os
import shutil
from pathlib import Path

import torch

from corral.recipe.errors import UserError
from corral.train.checkpoint import problem_with
from corral.train.tensors import StoredTensors, load_tensors, save_tensors

NOT_THE_MODEL = {"actor", "critic", "state.json", "ledger.jsonl", "manifest.json"}


def export_model(checkpoint: Path, out: Path, dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")
    if problem := problem_with(checkpoint, hashes=True):
        raise UserError(f"{checkpoint} is not a usable checkpoint: {problem}")
    if out.exists():
        raise UserError(f"{out} exists already")
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, work, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
        if dtype != "auto":
            convert(work, getattr(torch, dtype))
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(folder: Path, dtype: torch.dtype) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_tensors(file)
        save_tensors({name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}, file)
    for file in folder.glob("*.safetensors.index.json"):
        index = json.loads(file.read_text())
        stored = StoredTensors(folder, file.name.removesuffix(".safetensors.index.json"))
        index["metadata"]["total_size"] = sum(stored[name].nbytes for name in stored.names)
        file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
