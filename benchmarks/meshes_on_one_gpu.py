"""Meshes of several workers through Ray, all on one GPU: they learn what one process does, and survive killed workers.

    python benchmarks/meshes_on_one_gpu.py [--only shard4,killed-trainer] [--at-once 4] [--steps 14] [--out FOLDER]

NCCL takes the workers for different hosts, which talk over loopback (`cluster.address: here`). So this shows NCCL's
order of calls, its streams and its errors, not NVLink, InfiniBand or speed. Without a GPU they are on CPUs, with gloo.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import temporary_folder
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from corral.model.builtin_models import save_blank_model
from corral.observe.run_files import read_metrics

CORRAL = [sys.executable, "-m", "corral.cli.main"]
RECIPE = """\
name: mesh
model: {{path: {model}, dtype: float32}}
data: {{chat: false, train: {{path: "arithmetic:addition", size: 1200}}, max_prompt_tokens: 64}}
environment: {{reward: {{name: "{folder}/vowels.py:share_of_vowels"}}}}
rollout: {{max_response_tokens: 5}}
batch: {{prompts_per_step: 16, samples_per_prompt: 8, max_tokens_per_micro_batch: 1024}}
optimizer: {{learning_rate: 1e-3}}
schedule: {{steps: {steps}}}
checkpoint: {{every: 3}}
"""
REWARD = """\
def share_of_vowels(response):
    return sum(letter in "aeiou" for letter in response) / 5
"""
EXPERTS = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": True},
    **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
APART = "{actor: 0-1, rollout: 2-3}"


@dataclass(frozen=True)
class Mesh:
    num_workers: int
    parallel: str = "{}"
    placement: str = ""
    staleness: int = 0
    killed: int | None = None
    """Device whose worker is killed after step 4."""
    model: str = "blank-1m"


MESHES = {
    "one process": Mesh(1),
    "shard4": Mesh(4, "{shard: 4}"),
    "replicate2-shard2": Mesh(4, "{replicate: 2, shard: 2}"),
    "context2-shard2": Mesh(4, "{context: 2, shard: 2}"),
    "pipeline4": Mesh(4, "{pipeline: 4}"),
    "pipeline2-tensor2": Mesh(4, "{pipeline: 2, tensor: 2}"),
    "apart, in flight": Mesh(6, "{replicate: 2, shard: 2}", "{actor: 0-3, rollout: 4-5}", staleness=1),
    "killed-trainer": Mesh(4, "{shard: 2}", APART, killed=0),
    "killed-rollout-worker": Mesh(4, "{shard: 2}", APART, killed=3),
    "killed-replica": Mesh(3, "{replicate: 2}", "{actor: 0-1, rollout: 2}", killed=1),
    "experts, one process": Mesh(1, model="experts"),
    "expert4": Mesh(4, "{expert: 4}", model="experts"),
    "pipeline2-expert2": Mesh(4, "{pipeline: 2, expert: 2}", model="experts"),
}
REFERENCES = {"blank-1m": "one process", "experts": "experts, one process"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--limit", type=float, default=300, help="seconds for each run")
    parser.add_argument("--out", type=Path, help="keep each run's console here")
    options = parser.parse_args()
    only = {*options.only.split(",")} - {""}
    chosen = {name: mesh for name, mesh in MESHES.items() if not only or name in only or name in REFERENCES.values()}
    with temporary_folder() as made:
        folder = Path(made)
        save_mixture(folder / "experts")
        (folder / "vowels.py").write_text(REWARD)
        with ThreadPoolExecutor(options.at_once) as pool:
            runs = {name: pool.submit(train, folder, name, mesh, options) for name, mesh in chosen.items()}
            rows = {name: run.result() for name, run in runs.items()}
    print("| mesh | workers | seconds | first reward, last | from one process, at most | probe | ledger |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, mesh in chosen.items():
        print(line(name, mesh, rows[name], rows[REFERENCES[mesh.model]]))
    sys.exit(any(row["error"] for row in rows.values()))


def save_mixture(folder: Path) -> None:
    save_blank_model(folder)  # for its tokenizer
    blank = AutoConfig.from_pretrained(folder)
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**EXPERTS, **{name: getattr(blank, name) for name in names})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train(folder: Path, name: str, mesh: Mesh, options: argparse.Namespace) -> dict[str, Any]:
    own = folder / name.replace(", ", "-").replace(" ", "-")
    own.mkdir()
    model = folder / mesh.model if mesh.model == "experts" else mesh.model
    (own / "recipe.yaml").write_text(RECIPE.format(model=model, folder=folder, steps=options.steps))
    overrides = [f"train.parallel={mesh.parallel}", f"schedule.max_staleness={mesh.staleness}"]
    if mesh.num_workers > 1:
        overrides += ["cluster.address=here", f"cluster.devices_per_node={mesh.num_workers}"]
    if mesh.placement:
        overrides.append(f"cluster.placement={mesh.placement}")
    started = time.monotonic()
    with (own / "console.txt").open("w") as console:
        run = subprocess.Popen([*CORRAL, "train", "recipe.yaml", *overrides], cwd=own, stdout=console, stderr=console)
        if mesh.killed is not None:
            threading.Thread(target=kill_worker, args=(run, own, mesh.killed), daemon=True).start()
        try:
            error = "" if run.wait(options.limit) == 0 else f"ended with code {run.returncode}"
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                run.wait(60)
            run.kill()
            error = f"not ready after {options.limit:g} s"
    seconds = time.monotonic() - started
    if options.out:
        (options.out / f"{own.name}.txt").write_text((own / "console.txt").read_text())
    ledger = subprocess.run([*CORRAL, "ledger", "runs/mesh"], cwd=own, capture_output=True, text=True)
    return {"error": error, "seconds": seconds, "steps": steps_of(own), "ledger": ledger.stdout.split()[-1:]}


def kill_worker(run: "subprocess.Popen[bytes]", folder: Path, device: int) -> None:
    while run.poll() is None:
        time.sleep(0.1)
        with suppress(OSError, ValueError):  # the file is not there yet
            workers = json.loads((folder / "runs/mesh/logs/workers.json").read_text())["workers"]
            if len(steps_of(folder)) >= 4:
                os.kill(next(worker["pid"] for worker in workers if worker["device"] == device), signal.SIGKILL)
                return


def steps_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs/mesh/metrics.jsonl"
    return [row for row in read_metrics(file) if "reward/mean" in row] if file.exists() else []


def line(name: str, mesh: Mesh, row: dict[str, Any], reference: dict[str, Any]) -> str:
    if row["error"]:
        return f"| {name} | {mesh.num_workers} | {row['seconds']:.0f} | **{row['error']}** | | | |"
    rewards, expected = ([step["reward/mean"] for step in one["steps"]] for one in (row, reference))
    apart = max(abs(a - b) for a, b in zip(rewards, expected, strict=True))
    probe = max(step.get("transfer/probe_deviation", 0.0) for step in row["steps"])
    return (
        f"| {name} | {mesh.num_workers} | {row['seconds']:.0f} | {rewards[0]:.3f}, {rewards[-1]:.3f} | {apart:.3f} "
        f"| {probe:.1e} | {' '.join(row['ledger'])} |"
    )


if __name__ == "__main__":
    main()
