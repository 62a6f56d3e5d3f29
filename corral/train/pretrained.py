"""A model's files in Hugging Face layout, as `save_pretrained` writes them, from parameters that may be sharded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corral.train.layout import Layout
from corral.train.tensors import together, write_tensors


def write_pretrained(model: Any, layout: Layout, folder: Path, writers: Sequence[int] | None) -> None:
    """Configuration, generation defaults and weights. Called by all ranks."""
    mesh = layout.mesh
    first = mesh.rank == (0 if writers is None else writers[0])
    dtype = next(iter(layout.spreads.values())).dtype
    together(mesh, lambda: write_configuration(model, dtype, folder) if first else None)
    buffers = persistent_buffers(model)
    empty = {
        **{name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in layout.spreads.items()},
        **{name: buffer.to("meta") for name, buffer in buffers.items()},
    }
    stored = as_stored(model, empty)
    parts = [[name] for name in empty]
    if {name for part in parts for name in as_stored(model, {n: empty[n] for n in part})} != set(stored):
        parts = [list(empty)]  # a tensor on disk is made of several in memory

    def tensors() -> Iterator[tuple[str, Tensor]]:
        parameters = dict(model.named_parameters())
        for part in parts:
            whole = {n: buffers[n] if n in buffers else layout.weight(n, parameters[n]) for n in part}
            yield from as_stored(model, whole).items()

    write_tensors(folder, "model", {n: (t.dtype, t.shape) for n, t in stored.items()}, tensors(), mesh, writers)


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """They are the same on all ranks."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: buffer for name, buffer in buffers.items() if name not in ignored}


def as_stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the shapes that models have on disk: transformers keeps a mixture's experts as one tensor
    in memory, and one for each expert in its files."""
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
