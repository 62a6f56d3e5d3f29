"""Named tensors to and from safetensors files, and a model's files in Hugging Face layout.

Files are written by several processes at once: the format begins with a header that says where each tensor is, so the
first process creates the file and all write their tensors to their offsets. The bytes are those that the safetensors
library writes, however many processes write them. All files are flushed to disk (fsync) before they count.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.model.lora import ADAPTER_STEM, as_peft, peft_names, transferred_names, write_adapter_config
from corral.training.process_mesh import ProcessMesh
from corral.training.sharding import OwnRows, ShardingLayout, local_tensor

MAX_FILE = 5 * 10**9
"""Bytes of one file; more go into another one, as transformers does it."""
COPY_BUFFER = 2**28
"""Bytes of a buffer through which tensors travel from a GPU."""
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
"""Order in which the safetensors library lays tensors out, before their names."""


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(path)
    return loaded


@dataclass(frozen=True)
class TensorLocation:
    file: str
    offset: int
    num_bytes: int
    writer: int
    """Index of the process that writes it."""


def write_tensors(
    folder: Path,
    stem: str,
    kinds: dict[str, tuple[torch.dtype, torch.Size]],
    tensors: Iterable[tuple[str, Tensor | OwnRows]],
    mesh: ProcessMesh,
    writers: Sequence[int] | None = None,
    deferred: "DeferredWrites | None" = None,
) -> None:
    """Writes `stem`.safetensors, or several files and their index. Called by all ranks, which all iterate over the same
    tensors, whole or each with its own rows; `kinds` says beforehand which there will be. `writers`: ranks that see the
    folder; None: all.
    `deferred` takes tensors, to write them later. OSError on all ranks if one of them fails."""
    ranks = list(range(mesh.shape.size)) if writers is None else list(writers)
    own = ranks.index(mesh.rank) if mesh.rank in ranks else None
    locations, headers = lay_out(stem, kinds, len(ranks))
    run_on_all_ranks(mesh, lambda: create_files(folder, stem, headers, locations) if own == 0 else None)

    def write() -> None:
        with ExitStack() as stack:
            descriptors: dict[str, int] = {}
            for file in headers if own is not None else ():
                descriptors[file] = os.open(folder / file, os.O_WRONLY)  # unlike mode "wb", this does not truncate
                stack.callback(os.close, descriptors[file])
            for name, tensor in remaining:
                location = locations[name]
                offset = location.offset
                if isinstance(tensor, OwnRows):
                    offset, tensor = offset + tensor.first_byte, tensor.rows
                elif location.writer != own:
                    continue
                if not tensor.numel():
                    continue
                if deferred is None or not deferred.add(folder / location.file, offset, tensor):
                    write_at(descriptors[location.file], tensor, offset)
            for descriptor in descriptors.values():
                os.fsync(descriptor)

    remaining = iter(tensors)
    run_on_all_ranks(mesh, write, remaining)


def all_write(mesh: ProcessMesh, writers: Sequence[int] | None) -> bool:
    """Whether each rank can write what it holds."""
    return writers is None or len(writers) == mesh.shape.size


class DeferredWrites:
    """Tensors of a checkpoint that one rank copies to host memory, and writes, while training goes on.

    Parameters and optimizer states stay as they are until the next update, so a thread copies them meanwhile, and only
    that update has to wait for it. What was gathered or converted for the checkpoint alone is copied at once: the
    device has no room to keep it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes_left = max_bytes
        self.unchanged: set[int] = set()
        """Addresses of the memory that stays as it is until somebody waits for the copies."""
        self.to_copy: list[tuple[Path, int, Tensor]] = []
        self.copies: dict[Path, list[tuple[int, Tensor]]] = {}
        """Offsets and tensors, by file."""
        self.copying: threading.Thread | None = None
        self.error: Exception | None = None

    def add(self, file: Path, offset: int, tensor: Tensor) -> bool:
        """Takes a tensor. Returns False where the memory that may be used does not hold it."""
        if tensor.nbytes > self.bytes_left:
            return False
        self.bytes_left -= tensor.nbytes
        if tensor.untyped_storage().data_ptr() not in self.unchanged:
            tensor = tensor.detach().to("cpu", copy=True)
            self.copies.setdefault(file, []).append((offset, tensor))
        else:
            self.to_copy.append((file, offset, tensor.detach()))
        return True

    def start_copies(self) -> None:
        """Called once all tensors are there."""
        self.copying = threading.Thread(
            target=self._copy, args=(HostCopier([tensor for _, _, tensor in self.to_copy]),), daemon=True
        )
        self.copying.start()

    def _copy(self, copier: "HostCopier") -> None:
        try:
            for file, offset, tensor in self.to_copy:
                self.copies.setdefault(file, []).append((offset, copier.copy(tensor)))
        except Exception as error:  # such as too little memory
            self.error = error
        self.to_copy.clear()

    @property
    def bytes_to_copy(self) -> int:
        """Of the host's memory that the copies are going to take."""
        return sum(tensor.nbytes for _, _, tensor in list(self.to_copy))

    def wait_for_copies(self) -> None:
        """Returns when the tensors may change. That they could not be copied is an error of `write`."""
        if self.copying is not None:
            self.copying.join()

    def write(self) -> None:
        """Writes and frees the copies, and flushes the files to disk."""
        self.wait_for_copies()
        if self.error is not None:
            raise OSError(f"its copy in memory: {self.error}") from self.error
        while self.copies:
            file, parts = self.copies.popitem()
            descriptor = os.open(file, os.O_WRONLY)
            try:
                while parts:
                    offset, tensor = parts.pop()
                    write_at(descriptor, tensor, offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class HostCopier:
    """Copies tensors to the host's memory. From a GPU they come through two pinned buffers: while one is filled, the
    other one is emptied, and nothing waits for what else the device computes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queued work of the device is done before anything is copied."""
        self.buffers: list[Tensor] = []
        self.buffer_size = min(COPY_BUFFER, max((tensor.nbytes for tensor in tensors), default=0))
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        # numpy's large arrays are in huge pages: most of the time would be spent on the first touch of small ones.
        copied = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
        with torch.cuda.stream(self.stream):  # which is what reads it
            source = tensor.contiguous().reshape(-1).view(torch.uint8)
        size = self.buffer_size
        if not self.buffers:
            self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        pairs = list(zip(source.split(size), copied.split(size), strict=True))
        events = [self._fill(0, pairs[0][0])] if pairs else []
        for number, (_, target) in enumerate(pairs):
            if number + 1 < len(pairs):
                events.append(self._fill((number + 1) % 2, pairs[number + 1][0]))
            events[number].synchronize()
            target.copy_(self.buffers[number % 2][: len(target)])
        return copied.view(tensor.dtype).view(tensor.shape)

    def _fill(self, buffer: int, part: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            self.buffers[buffer][: len(part)].copy_(part, non_blocking=True)
            event: torch.cuda.Event = self.stream.record_event()
        return event


def run_on_all_ranks(mesh: ProcessMesh, work: Callable[[], None], remaining: Iterable[object] = ()) -> None:
    """Runs work that may fail on one rank, and raises on all ranks if it does. Iterating over whole tensors is a
    collective, so a rank that failed half-way goes through the `remaining` ones, or the others would hang."""
    error: OSError | None = None
    try:
        work()
    except OSError as caught:
        error = caught
        for _ in remaining:
            pass
    if mesh.any(error is not None):
        raise error or OSError("another rank could not write its part")


def lay_out(
    stem: str, kinds: dict[str, tuple[torch.dtype, torch.Size]], num_writers: int
) -> tuple[dict[str, TensorLocation], dict[str, bytes]]:
    """(location of each tensor, header of each file). Consecutive tensors go to the same writer, about as many bytes to
    each."""
    sizes = {name: dtype.itemsize * shape.numel() for name, (dtype, shape) in kinds.items()}
    parts: list[list[str]] = [[]]
    for name in kinds:
        if parts[-1] and sum(sizes[other] for other in parts[-1]) + sizes[name] > MAX_FILE:
            parts.append([])
        parts[-1].append(name)
    total, before = max(1, sum(sizes.values())), 0
    locations, headers = {}, {}
    for i, names in enumerate(parts, 1):
        file = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors"
        ordered = sorted(names, key=lambda name: (ORDER.index(CODES[kinds[name][0]]), name))
        headers[file] = header([(name, *kinds[name]) for name in ordered])
        offset = len(headers[file])
        for name in ordered:
            locations[name] = TensorLocation(file, offset, sizes[name], before * num_writers // total)
            offset, before = offset + sizes[name], before + sizes[name]
    return locations, headers


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


def create_files(folder: Path, stem: str, headers: dict[str, bytes], locations: dict[str, TensorLocation]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, start in headers.items():
        with (folder / file).open("wb") as stream:
            stream.write(start)
            ends = [at.offset + at.num_bytes for at in locations.values() if at.file == file]
            stream.truncate(max([len(start), *ends]))
    if len(headers) > 1:
        index = {
            "metadata": {"total_size": sum(location.num_bytes for location in locations.values())},
            "weight_map": {name: location.file for name, location in sorted(locations.items())},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_at(descriptor: int, tensor: Tensor, offset: int) -> None:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class TensorFiles:
    """What `write_tensors` wrote, read one tensor at a time."""

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
    """Waits until a file's content, or a folder's list of names, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pretrained(
    model: Any,
    layout: ShardingLayout,
    folder: Path,
    writers: Sequence[int] | None,
    deferred: DeferredWrites | None = None,
) -> None:
    """Writes configuration, generation defaults and weights as `save_pretrained` does, from parameters that may be
    sharded. Called by all ranks."""
    mesh = layout.mesh
    first = mesh.rank == (0 if writers is None else writers[0])
    run_on_all_ranks(mesh, lambda: write_configuration(model, layout.dtype, folder) if first else None)
    buffers = persistent_buffers(model)
    empty = {
        **{name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in layout.kinds.items()},
        **{name: buffer.to("meta") for name, buffer in buffers.items()},
    }
    stored = as_stored(model, empty)
    parts = [[name] for name in empty]
    if {name for part in parts for name in as_stored(model, {n: empty[n] for n in part})} != set(stored):
        parts = [list(empty)]  # a tensor on disk is made of several in memory

    def tensors() -> Iterator[tuple[str, Tensor | OwnRows]]:
        parameters = dict(model.named_parameters())
        for part in parts:
            name, parameter = part[0], parameters.get(part[0])
            if all_write(mesh, writers) and name in layout.kinds and stored.get(name) is empty[name]:
                dtype = layout[name].dtype
                yield (
                    name,
                    layout.to_write(name, None if parameter is None else local_tensor(parameter).to(dtype), dtype),
                )
                continue
            whole = {n: buffers[n] if n in buffers else layout.gather_weight(n, parameters.get(n)) for n in part}
            yield from as_stored(model, whole).items()

    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    write_tensors(folder, "model", kinds, tensors(), mesh, writers, deferred)


def write_adapters(
    model: Any,
    layout: ShardingLayout,
    folder: Path,
    writers: Sequence[int] | None,
    deferred: DeferredWrites | None = None,
) -> None:
    """Writes the model's adapters in PEFT's layout. Called by all ranks."""
    mesh = layout.mesh
    first = mesh.rank == (0 if writers is None else writers[0])
    run_on_all_ranks(mesh, lambda: write_adapter_config(model, folder) if first else None)
    names, parameters = peft_names(transferred_names(model, layout.parameters)), dict(model.named_parameters())
    kinds = {
        peft: (layout[name].dtype, as_peft(peft, torch.empty(layout[name].shape, device="meta")).shape)
        for name, peft in names.items()
    }
    tensors = ((peft, as_peft(peft, layout.gather_weight(name, parameters.get(name)))) for name, peft in names.items())
    write_tensors(folder, ADAPTER_STEM, kinds, tensors, mesh, writers, deferred)


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Buffers that are saved. They are the same on all ranks."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: buffer for name, buffer in buffers.items() if name not in ignored}


def as_stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names and in the shapes of the model's files: transformers has the experts of a mixture as one
    tensor in memory, and as one for each expert on disk."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return stored


def write_configuration(model: Any, dtype: torch.dtype, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
