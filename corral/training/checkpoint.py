"""Checkpoints: a folder that is either whole or not there.

Written to a temporary folder, flushed, described by a manifest with the size and hash of every file, and put in place
by a rename, which is atomic. What has no valid manifest does not exist as far as resuming is concerned. The model's
files are in Hugging Face layout: `AutoModelForCausalLM.from_pretrained(folder)` loads them as they are.
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError

from corral.data import reference_cache
from corral.model.lora import AdapterFolder
from corral.model.model_loading import load_config, load_model, load_tokenizer
from corral.recipe.errors import UserError, first_line
from corral.recipe.schema import Model
from corral.training.tensor_files import TensorFiles, fsync, load_tensors, save_tensors

MANIFEST = "manifest.json"
NOT_THE_MODEL = {"actor", "critic", "state.json", "ledger.jsonl", "row_rewards.npy", reference_cache.FILE, MANIFEST}
"""What `export_model` leaves out."""


@contextmanager
def writing_checkpoint(
    folder: Path, state: dict[str, Any], hashes: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> Iterator[Path]:
    """A folder to write the files into; `state` becomes state.json. It takes the place of `folder` when the block
    succeeds, and is deleted when it raises. `hashes`: of files that were hashed before it ends, by name. OSError if it
    cannot be written."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        yield work
        (work / "state.json").write_text(json.dumps(state, indent=1))
        names = list_files(work)
        files = {name: hashes[name] if name in hashes else size_and_hash(work / name) for name in names}
        (work / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
        # The order matters after a power failure: first the content and names of all files, then the rename that makes
        # them a checkpoint, then the rename itself. The manifest's hashes catch disks that reorder all the same.
        for path in [*work.rglob("*"), work]:
            fsync(path)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
        fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, SafetensorError):  # what safetensors raises when the disk is full
            raise OSError(str(error)) from error
        raise


def list_files(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]


HASHED_AT_ONCE = 8
"""Files of a checkpoint that are read at the same time: a thread hashes 1 to 2 GB/s, and network disks read more."""


def size_and_hash(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def problem_with(folder: Path, hashes: bool) -> str | None:
    """What is wrong with a checkpoint, or None. Without `hashes` only names and sizes are compared."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {name: (file["size"], file["sha256"]) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
    except NotADirectoryError:
        return "it is not a folder"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"its {MANIFEST} is damaged"
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        return f"its {MANIFEST} names {outside[0]}, which is not in the folder"
    for name, (size, _) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    if hashes:
        with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
            found = threads.map(lambda name: size_and_hash(folder / name)["sha256"], files)
            for (name, (_, digest)), own in zip(files.items(), found, strict=True):
                if own != digest:
                    threads.shutdown(cancel_futures=True)
                    return f"{name} was changed or damaged"
    try:
        read_state(folder)
    except UserError as error:
        return str(error)
    return None


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return None if match is None else int(match[1])


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each checkpoint, oldest first, valid or not."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted((step, folder) for folder in folders if (step := step_of(folder)) is not None)


def find_checkpoint(
    checkpoints: Path, resume: str, without: Collection[Path] = (), *, hashes: bool = True
) -> Path | None:
    """The checkpoint to resume from: the newest valid one (auto) that is not in `without`, none (never), or one by its
    path, which must be valid. `hashes`: whether its files are read; those that this run wrote need not be."""
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(find_model(resume)).expanduser()
        if problem := problem_with(folder, hashes=True):
            raise UserError(f"checkpoint.resume: {resume} is not a usable checkpoint: {problem}")
        return folder
    for _, folder in reversed(list_checkpoints(checkpoints)):
        if folder not in without and problem_with(folder, hashes=hashes) is None:
            return folder
    return None


def find_model(path: str) -> str:
    """The model or checkpoint that a path means: of a run's folder, its newest checkpoint."""
    checkpoints = Path(path).expanduser() / "checkpoints"
    if not checkpoints.is_dir():
        return path
    newest = find_checkpoint(checkpoints, "auto")
    if newest is None:
        raise UserError(f"{path} has no checkpoint that is whole")
    return str(newest)


Count = Annotated[int, Field(ge=0, lt=2**53)]


class SavedPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class SavedSampler(SavedPart):
    seed: int
    num_rows: int
    next_prompt_id: Count | None = None
    """None in version 0.5 and before, where it has another name."""


class TrainedWith(SavedPart):
    recipe: str | None = None
    files: dict[str, str] | None = None


class SavedState(SavedPart):
    """What `state.json` has; earlier releases wrote less of it."""

    step: Count
    num_steps: Count | None = None
    trained_with: TrainedWith = TrainedWith()
    sampler: SavedSampler | None = None
    kl: dict[str, FiniteFloat] | None = None
    skipped_in_a_row: Count = 0
    trackers: dict[str, dict[str, Any]] = {}
    validation: dict[str, Any] = {}


def read_state(folder: Path) -> dict[str, Any]:
    """UserError where it is not what a run has written."""
    file = folder / "state.json"
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        SavedState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error
    if step_of(folder) not in (None, state["step"]):
        raise UserError(f"{file} is that of step {state['step']}")
    return state


def retire_later_checkpoints(checkpoints: Path, step: int) -> list[tuple[Path, str | None]]:
    """Renames checkpoints after `step`, and returns what they were called and what is wrong with each. One that stayed
    would be found by the next resume, and be kept instead of those that the run writes now."""
    later = [folder for its_step, folder in list_checkpoints(checkpoints) if its_step > step]
    found = [(folder, problem_with(folder, hashes=True)) for folder in later]
    for folder in later:
        names = (f"{folder.name}.unused{number}" for number in itertools.chain([""], itertools.count(2)))
        os.replace(folder, next(path for name in names if not (path := folder.with_name(name)).exists()))
    return found


def prune(checkpoints: Path, keep: int | None, best: str | None = None, weights: Path | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints (None: all) and the one with the best value of `best`, a metric of
    the validation; and what a killed process left of one that it was writing. `weights`: folder in which the models
    of deleted ones are kept."""
    valid = [folder for _, folder in list_checkpoints(checkpoints) if problem_with(folder, hashes=False) is None]
    found = [(read_state(folder).get("validation", {}).get(best), folder) for folder in valid if best is not None]
    values = {folder: value for value, folder in found if isinstance(value, int | float) and math.isfinite(value)}
    ranked = sorted(values, key=lambda folder: score_of(str(best), values[folder]))
    kept = {*valid[-(keep or len(valid)) :], *ranked[-1:]}
    for folder in [folder for folder in valid if folder not in kept]:
        if weights is None:
            shutil.rmtree(folder)
        else:
            weights.mkdir(exist_ok=True)
            os.replace(folder, weights / f".{folder.name}.part")
    for unfinished in checkpoints.glob(".step_*.part"):
        shutil.rmtree(unfinished)
    for stripped in [] if weights is None else weights.glob(".step_*.part"):
        strip_to_model(stripped)


def score_of(metric: str, value: float) -> float:
    """A metric's value as a score, of which more is better: a loss and a perplexity are better when they are lower."""
    return -value if metric.rpartition("/")[2] in ("loss", "perplexity") else value


def strip_to_model(checkpoint: Path) -> None:
    """Deletes all of a checkpoint but the model and the tokenizer, and then takes the dot and `.part` off its name."""
    out = checkpoint.with_name(checkpoint.name.removeprefix(".").removesuffix(".part"))
    for path in checkpoint.iterdir():
        if path.name in NOT_THE_MODEL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(out, ignore_errors=True)  # of a step that was trained again
    os.replace(checkpoint, out)


def export_model(checkpoint: Path, out: Path, dtype: str, merge: bool = False) -> None:
    """Copies a checkpoint without its optimizer: the model and tokenizer, for transformers, vLLM and others. Adapters
    are copied in PEFT's layout; `merge`: the whole model, with the adapters merged into it."""
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")
    if problem := problem_with(checkpoint, hashes=True):
        raise UserError(f"{checkpoint} is not a usable checkpoint: {problem}")
    if out.exists():
        raise UserError(f"{out} exists already")
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        if merge:
            export_merged(checkpoint, work, dtype)
            dtype = "auto"
        else:
            copy_model(checkpoint, work)
        if dtype != "auto":
            convert_weights(work, getattr(torch, dtype))
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def copy_model(checkpoint: Path, out: Path) -> None:
    """Copies the files of the model that the manifest names, and nothing that lies beside them. A link would take a
    file of this machine along."""
    for name in json.loads((checkpoint / MANIFEST).read_text())["files"]:
        if Path(name).parts[0] in NOT_THE_MODEL:
            continue
        if any(path.is_symlink() for path in (checkpoint / name, *(checkpoint / name).parents) if path != checkpoint):
            raise UserError(f"{checkpoint / name} is a link, or in a folder that is one, and links are not exported")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, out / name)


def export_merged(checkpoint: Path, out: Path, dtype: str) -> None:
    """Writes the base model of a checkpoint with its adapters merged into it, and the tokenizer."""
    adapter = AdapterFolder.find(str(checkpoint))
    if adapter is None:
        raise UserError(f"--merge: {checkpoint} has no adapters; without it, its model is written as it is")
    stored = dtype if dtype != "auto" else load_config(Model(path=adapter.base)).dtype
    name = str(stored or "float32").removeprefix("torch.")
    settings = Model.model_validate({"path": str(checkpoint), "dtype": name})
    load_model(settings, torch.device("cpu")).save_pretrained(out)
    tokenizer = load_tokenizer(settings)
    tokenizer.save_pretrained(out)
    if tokenizer.vision is not None:
        tokenizer.vision.save(out)


def convert_weights(folder: Path, dtype: torch.dtype) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_tensors(file)
        save_tensors({name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}, file)
    for file in folder.glob("*.safetensors.index.json"):
        index = json.loads(file.read_text())
        stored = TensorFiles(folder, file.name.removesuffix(".safetensors.index.json"))
        index["metadata"]["total_size"] = sum(stored[name].nbytes for name in stored.names)
        file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if (folder / "config.json").is_file():  # an adapter has none
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2))
