"""Named tensors to and from safetensors files, flushed to disk before they count.

Files are written by several processes at once: the format begins with a header that says where each tensor is, so the
first one creates the file and all put their tensors into their places. The bytes are those that the safetensors library
writes, whoever writes them.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.train.mesh import Mesh

MAX_FILE = 5 * 10**9
"""Bytes; more go into another file, as transformers does it."""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "U8", "I8", "BOOL")
"""In which the library lays tensors out, before their names."""


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(path)
    return loaded


@dataclass(frozen=True)
class Place:
    file: str
    offset: int
    num_bytes: int
    writer: int
    """Index of the writer whose turn it is."""


def write_tensors(
    folder: Path,
    stem: str,
    kinds: dict[str, tuple[torch.dtype, torch.Size]],
    tensors: Iterable[tuple[str, Tensor]],
    mesh: Mesh,
    writers: Sequence[int] | None = None,
) -> None:
    """`stem`.safetensors, or several files and their index. Called by all ranks, which all get the same whole tensors
    one after the other; `kinds` says beforehand which there will be. `writers`: ranks that see the folder; None: all.
    OSError on all ranks if one of them fails."""
    ranks = list(range(mesh.shape.size)) if writers is None else list(writers)
    own = ranks.index(mesh.rank) if mesh.rank in ranks else None
    places, headers = lay_out(stem, kinds, len(ranks))
    together(mesh, lambda: create(folder, stem, headers, places) if own == 0 else None)

    def write() -> None:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open_file(folder / name)) for name in headers} if own is not None else {}
            for name, tensor in remaining:
                if (place := places[name]).writer == own:
                    put(files[place.file].descriptor, tensor, place.offset)
            for file in files.values():
                os.fsync(file.descriptor)

    remaining = iter(tensors)
    together(mesh, write, meanwhile=remaining)


def together(mesh: Mesh, work: Callable[[], None], meanwhile: Iterable[object] = ()) -> None:
    """Work that may fail on one rank: then all hear of it, at its end. A rank that failed goes on with `meanwhile`, in
    which the others need it."""
    error: OSError | None = None
    try:
        work()
    except OSError as caught:
        error = caught
        for _ in meanwhile:
            pass
    if mesh.any(error is not None):
        raise error or OSError("another rank could not write its part")


class open_file:
    """For writing in the middle of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "open_file":
        self.descriptor = os.open(self.path, os.O_WRONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def lay_out(
    stem: str, kinds: dict[str, tuple[torch.dtype, torch.Size]], num_writers: int
) -> tuple[dict[str, Place], dict[str, bytes]]:
    """(where each tensor goes, header of each file)"""
    sizes = {name: dtype.itemsize * shape.numel() for name, (dtype, shape) in kinds.items()}
    parts: list[list[str]] = [[]]
    for name in kinds:
        if parts[-1] and sum(sizes[other] for other in parts[-1]) + sizes[name] > MAX_FILE:
            parts.append([])
        parts[-1].append(name)
    total, before = max(1, sum(sizes.values())), 0
    places, headers = {}, {}
    for i, names in enumerate(parts, 1):
        file = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors"
        ordered = sorted(names, key=lambda name: (ORDER.index(CODES[kinds[name][0]]), name))
        headers[file] = header([(name, *kinds[name]) for name in ordered])
        offset = len(headers[file])
        for name in ordered:
            places[name] = Place(file, offset, sizes[name], before * num_writers // total)
            offset, before = offset + sizes[name], before + sizes[name]
    return places, headers


def header(tensors: list[tuple[str, torch.dtype, torch.Size]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + dtype.itemsize * shape.numel()
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def create(folder: Path, stem: str, headers: dict[str, bytes], places: dict[str, Place]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, start in headers.items():
        with (folder / file).open("wb") as stream:
            stream.write(start)
            stream.truncate(max([len(start), *(p.offset + p.num_bytes for p in places.values() if p.file == file)]))
    if len(headers) > 1:
        index = {
            "metadata": {"total_size": sum(place.num_bytes for place in places.values())},
            "weight_map": {name: place.file for name, place in sorted(places.items())},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def put(descriptor: int, tensor: Tensor, offset: int) -> None:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class StoredTensors:
    """What `write_tensors` wrote, read a tensor at a time."""

    def __init__(self, folder: Path, stem: str) -> None:
        index = folder / f"{stem}.safetensors.index.json"
        names = [f"{stem}.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files: list[Any] = [safe_open(folder / name, "pt") for name in names]
        self.file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self.names = set(self.file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of[name].get_tensor(name)
        return tensor


def fsync(path: Path) -> None:
    """Of a file or a folder: what it says has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
