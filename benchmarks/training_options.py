"""What the options of training cost and save on this device: peak memory beside the plan's estimate, seconds, and what
is learned with them.

    python benchmarks/training_options.py memory [--model qwen2.5-7b] [--options plain,offload-optimizer]
    python benchmarks/training_options.py checkpoint [--model qwen2.5-7b] [--write]
    python benchmarks/training_options.py checkpoint --model qwen2-1.5b --ranks 4
    python benchmarks/training_options.py learn [--steps 20] [KEY=VALUE ...]

`memory` makes updates of three micro-batches with random weights of a shape, each set of options in its own process.
`checkpoint` copies the states of a model beside the work of the next step, and with `--write` writes and hashes the
files, too; with `--ranks` the model is sharded over processes that share the device, and what counts is how long they
wait. `learn` trains the quickstart with each option.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import HERE, RESULTS, temporary_folder

from corral.bench.benchmark_models import SHAPES, model_folder, save_random_model
from corral.bench.comparison import BenchmarkReport, format_table
from corral.bench.train_sides import random_pack
from corral.bench.workloads import TrainWork
from corral.model.model_loading import load_model
from corral.observe.run_files import read_metrics
from corral.recipe.memory import estimate_memory
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import resolve_placement
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape
from corral.training.checkpoint import list_files, size_and_hash, writing_checkpoint
from corral.training.native_trainer import NativePolicyTrainer
from corral.training.process_mesh import ProcessMesh
from corral.training.tensor_files import DeferredWrites

GIB = 2**30
LEARNED = ("step", "reward/mean", "time/train_s", "validation/mean@1")
"""Metrics of the quickstart that are kept."""
CORRAL = [sys.executable, "-c", "from corral.cli.main import main; main()"]
CHECKPOINTED = {"train": {"gradient_checkpointing": True}}
MICRO_BATCHES = 3
"""Of an update: gradients of the first one are kept in the weights' dtype, and summed in float32 from the second on, so
there is most in memory during the third."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"train": {"gradient_checkpointing": "selective"}},
    "checkpointing": CHECKPOINTED,
    "bfloat16-states": {**CHECKPOINTED, "optimizer": {"state_dtype": "bfloat16"}},
    "offload-activations": {"train": {"gradient_checkpointing": True, "offload": ["activations"]}},
    "offload-optimizer": {"train": {"gradient_checkpointing": True, "offload": ["optimizer"]}},
    "offload-both": {"train": {"gradient_checkpointing": True, "offload": ["optimizer", "activations"]}},
    "lora": {"model": {"lora": {"rank": 32}}, **CHECKPOINTED},
    "lora-8-bit": {"model": {"lora": {"rank": 32}, "quantization": {"bits": 8}}, **CHECKPOINTED},
    "lora-4-bit": {"model": {"lora": {"rank": 32}, "quantization": {"bits": 4}}, **CHECKPOINTED},
}
"""Changes of a recipe."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["memory", "checkpoint", "learn"])
    parser.add_argument("--model", default="qwen2.5-7b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--options", default=",".join(OPTIONS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="runs of `learn` at the same time")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args()
    if asked.rank:
        print(json.dumps(save_on_rank(asked, *asked.rank.split(","))))
    elif asked.only:
        print(json.dumps(measure_memory(asked, asked.only)))
    elif asked.verb == "memory":
        compare_memory(asked)
    elif asked.verb == "checkpoint" and asked.ranks > 1:
        measure_sharded_checkpoint(asked)
    elif asked.verb == "checkpoint":
        measure_checkpoint(asked)
    else:
        compare_learning(asked)


# --- memory


def compare_memory(asked: argparse.Namespace) -> None:
    prepare(asked.model)
    report = BenchmarkReport(
        f"training_memory_{file_name(asked.model)}", "Memory and time of training", asked.results, []
    )
    columns = ["options", "peak, GiB", "estimate", "estimate / peak", "a micro-batch, s", "an update, s", "tokens/s"]
    rows, measured = list[list[str]](), dict[str, Any]()
    for name in asked.options.split(","):
        command = [sys.executable, *sys.argv, "--only", name]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            rows.append([name, "failed", "", "", "", "", ""])
            continue
        one = measured[name] = json.loads(result.stdout.splitlines()[-1])
        ratio = one["estimate_gib"] / one["peak_gib"] if one["peak_gib"] else 0.0
        memory = [f"{one['peak_gib']:.1f}", f"{one['estimate_gib']:.1f}", f"{ratio:.2f}"]
        speed = [f"{one['micro_batch_s']:.3f}", f"{one['update_s']:.3f}", f"{one['tokens_per_s']:,.0f}"]
        rows.append([name, *memory, *speed])
        print(format_table([columns, *rows]), flush=True)
    report.add("memory", f"{asked.model}, updates of {MICRO_BATCHES} x {asked.tokens} tokens", columns, rows, measured)


def measure_memory(asked: argparse.Namespace, options: str) -> dict[str, float]:
    recipe = recipe_of(asked, OPTIONS[options])
    policy, pack = policy_of(recipe), pack_of(asked)
    micro_batches, updates = list[float](), list[float]()
    for number in range(asked.updates):
        started = clock()
        for _ in range(MICRO_BATCHES):
            policy.forward_backward([(pack, lambda logprobs, _: -logprobs.sum() / asked.tokens)])
        computed = clock()
        assert not policy.step().skipped
        if number:  # the first one compiles
            micro_batches.append((computed - started) / MICRO_BATCHES)
            updates.append(clock() - computed)
    micro_batch_s, update_s = min(micro_batches), min(updates)
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0,
        "estimate_gib": estimate(recipe) / GIB,
        "micro_batch_s": micro_batch_s,
        "update_s": update_s,
        "tokens_per_s": MICRO_BATCHES * asked.tokens / (MICRO_BATCHES * micro_batch_s + update_s),
    }


def estimate(recipe: Recipe) -> int:
    shape = ModelShape.from_folder(Path(recipe.model.path))
    algorithm = resolve_algorithm(recipe)
    placement, _ = resolve_placement(recipe, algorithm)
    [group] = estimate_memory(recipe, algorithm, placement, shape, auto_bytes=2, on_gpu=True)
    return group.totals["train"]


# --- checkpoints


def measure_checkpoint(asked: argparse.Namespace) -> None:
    """Updates with and without a checkpoint before them: what waits, and for how long."""
    prepare(asked.model)
    recipe = recipe_of(asked, {**CHECKPOINTED, "optimizer": {"state_dtype": asked.state_dtype}})
    policy, pack = policy_of(recipe), pack_of(asked)

    def compute() -> float:
        started = clock()
        policy.forward_backward([(pack, lambda logprobs, _: -logprobs.sum() / asked.tokens)])
        return clock() - started

    def update() -> float:
        started = clock()
        assert not policy.step().skipped
        return clock() - started

    for _ in range(2):  # the first one compiles
        alone = {"micro_batch_s": compute(), "update_s": update()}
    deferred, result, hashes = DeferredWrites(10**15), dict[str, float](), dict[str, dict[str, Any]]()
    started = clock()
    with temporary_folder() as parent, writing_checkpoint(Path(parent) / "step_000001", {}, hashes) as work:
        policy.save(work, None, deferred)
        result["save_s"] = clock() - started
        result["micro_batch_beside_s"] = compute()
        deferred.wait_for_copies()
        result["copied_after_s"] = clock() - started
        result["update_s"] = update()
        copied = sum(tensor.nbytes for parts in deferred.copies.values() for _, tensor in parts)
        if asked.write:
            deferred.write()
            result["written_after_s"] = clock() - started
            with ThreadPoolExecutor() as threads:
                names = list_files(work)
                hashes |= dict(zip(names, threads.map(lambda name: size_and_hash(work / name), names), strict=True))
            result["hashed_after_s"] = clock() - started
        else:  # the files have their lengths and nothing in them
            for file in work.rglob("*.safetensors"):
                os.truncate(file, 0)
    report = BenchmarkReport(f"checkpoint_{file_name(asked.model)}", "A checkpoint beside training", asked.results, [])
    rows = [["bytes", f"{copied / 1e9:.1f} GB"]]
    rows += [[f"{name} without a checkpoint", f"{value:.3f}"] for name, value in alone.items()]
    rows += [[name, f"{value:.3f}"] for name, value in result.items()]
    print(format_table([["", ""], *rows]))
    numbers = {"bytes": copied, **alone, **{f"with_{name}": value for name, value in result.items()}}
    report.add("checkpoint", f"{asked.model}, moments in {asked.state_dtype}", ["", ""], rows, numbers)


def measure_sharded_checkpoint(asked: argparse.Namespace) -> None:
    prepare(asked.model)
    with socket.socket() as free, temporary_folder() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        commands = [[sys.executable, *sys.argv, "--rank", f"{rank},{port},{folder}"] for rank in range(asked.ranks)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a rank failed")
    measured = [json.loads(text.splitlines()[-1]) for text in said]
    numbers = {name: max(one[name] for one in measured) for name in measured[0]}
    numbers["bytes"] = sum(one["bytes"] for one in measured)
    rows = [["bytes", f"{numbers['bytes'] / 1e9:.1f} GB"]]
    rows += [[name, f"{value:.3f}"] for name, value in numbers.items() if name != "bytes"]
    print(format_table([["", ""], *rows]))
    title = f"checkpoint_{file_name(asked.model)}_{asked.ranks}_ranks"
    report = BenchmarkReport(title, "A checkpoint of a sharded model beside training", asked.results, [])
    report.add("checkpoint", f"{asked.model} over {asked.ranks} ranks that share the device", ["", ""], rows, numbers)


def save_on_rank(asked: argparse.Namespace, rank: str, port: str, folder: str) -> dict[str, float]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:  # NCCL refuses two ranks with one host and GPU
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=rank == "0")
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=int(rank), world_size=asked.ranks)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    mesh = ProcessMesh.build(MeshShape(shard=asked.ranks), device)
    policy, pack = policy_of(recipe_of(asked, CHECKPOINTED), mesh), pack_of(asked)

    def update() -> None:
        policy.forward_backward([(pack, lambda logprobs, _: -logprobs.sum() / asked.tokens)])
        assert not policy.step().skipped

    result: dict[str, float] = {}
    for number in range(2):  # the first one makes its buffers
        update()
        deferred, work = DeferredWrites(10**15), Path(folder) / str(number)
        work.mkdir(exist_ok=True)
        dist.barrier()
        started = clock()
        policy.save(work, range(asked.ranks), deferred)
        dist.barrier()
        result["all ranks wait, s"] = clock() - started
        deferred.wait_for_copies()
        result["copied after, s"] = clock() - started
        result["bytes"] = sum(tensor.nbytes for parts in deferred.copies.values() for _, tensor in parts)
    return result


# --- what is learned


def compare_learning(asked: argparse.Namespace) -> None:
    names = asked.options.split(",")
    report = BenchmarkReport("training_options", "The quickstart with options of training", asked.results, [])
    columns = ["options", "held out", "first reward", "last rewards", "train, s"]
    with temporary_folder() as folder, ThreadPoolExecutor(asked.at_once) as threads:
        measured = dict(zip(names, threads.map(lambda name: train(Path(folder), name, asked), names), strict=True))
    rows = []
    for name, metrics in measured.items():
        if not metrics:
            rows.append([name, "failed", "", "", ""])
            continue
        scores = [100 * row["validation/mean@1"] for row in metrics if "validation/mean@1" in row]
        steps = [row for row in metrics if "reward/mean" in row]
        last = sum(row["reward/mean"] for row in steps[-5:]) / len(steps[-5:])
        train_s = sorted(row["time/train_s"] for row in steps)[len(steps) // 2]
        first = steps[0]["reward/mean"]
        rows.append([name, f"{scores[0]:.1f} -> {scores[-1]:.1f} %", f"{first:.3f}", f"{last:.3f}", f"{train_s:.3f}"])
    print(format_table([columns, *rows]))
    report.add("quickstart", f"{asked.steps} steps {' '.join(asked.overrides)}".strip(), columns, rows, measured)


def train(folder: Path, name: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    recipe = str(HERE.parent / "recipes" / "quickstart.yaml")
    changes = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in OPTIONS[name].items() for key, value in keys.items()
    ]
    if "lora" in name:
        changes.append("optimizer.learning_rate=1e-4")
    command = [*CORRAL, "train", recipe, f"name={name}", f"logging.runs={folder}", f"schedule.steps={asked.steps}"]
    result = subprocess.run([*command, *changes, *asked.overrides], stdout=sys.stderr)
    rows = [] if result.returncode else read_metrics(folder / name / "metrics.jsonl")
    return [{key: row[key] for key in LEARNED if key in row} for row in rows]


# --- both


def prepare(model: str) -> None:
    folder = model_folder(model, dtype())
    if model in SHAPES and not folder.is_dir():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        save_random_model(model, folder, device, dtype())
        if device == "cuda":
            torch.cuda.empty_cache()


def file_name(model: str) -> str:
    return model.replace(".", "_")


def dtype() -> str:
    return "bfloat16" if torch.cuda.is_available() else "float32"


def recipe_of(asked: argparse.Namespace, changes: dict[str, Any]) -> Recipe:
    written: dict[str, Any] = {
        "name": "options",
        "model": {"path": str(model_folder(asked.model, dtype())), "dtype": dtype()},
        "data": {"train": {"path": "arithmetic:addition"}, "max_prompt_tokens": 128},
        "environment": {"reward": {"name": "exact"}},
        "rollout": {"max_response_tokens": 896},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens_per_micro_batch": asked.tokens},
        "schedule": {"steps": 10},
    }
    for section, values in changes.items():
        written[section] = {**written.get(section, {}), **values}
    return Recipe.model_validate(written)


def policy_of(recipe: Recipe, mesh: ProcessMesh | None = None) -> NativePolicyTrainer:
    """One of a mesh takes its shards to the device."""
    device = torch.device("cuda" if torch.cuda.is_available() and mesh is None else "cpu")
    return NativePolicyTrainer(
        load_model(recipe.model, device),
        temperature=1.0,
        logits_chunk=recipe.train.logits_chunk,  # None: as the device has it
        optimizer=recipe.optimizer,
        total_updates=10**6,
        mesh=mesh,
        gradient_checkpointing=recipe.train.gradient_checkpointing,
        offload=recipe.train.offload,
        max_tokens=recipe.batch.max_tokens_per_micro_batch,
    )


def pack_of(asked: argparse.Namespace) -> Any:
    """One micro-batch of sequences of 1,024 tokens, or one shorter sequence."""
    length = min(1024, asked.tokens)
    work = TrainWork(asked.tokens // length, length, 0, 0)
    return random_pack(SimpleNamespace(folder=str(model_folder(asked.model, dtype())), train=work))  # type: ignore[arg-type]


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
