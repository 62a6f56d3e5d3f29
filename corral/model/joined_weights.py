"""Weights that a file has in several tensors, such as the experts of a mixture, put together where they are copied.

transformers stores the matrices of a mixture's experts one by one, and holds those of a layer in one tensor. A model
that is loaded within `joining_later` has a `JoinedTensor` there: a list of files mapped into memory. To slice it is to
slice the list, so a rank that shards the model reads its own experts and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten: Any = torch.ops.aten
CONVERSION = Lock()
"""Held while the conversion of transformers is another one: it is a method of a class, and other threads may load."""


@contextmanager
def joining_later() -> Iterator[None]:
    """While a model is loaded in this block, transformers does not put tensors of its files together: parameters that
    are made of several, or of one with its elements in another order, are a `JoinedTensor`."""
    from transformers.core_model_loading import WeightConverter

    with CONVERSION:
        convert = WeightConverter.convert

        def convert_later(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            with _JoiningMode():  # type: ignore[no-untyped-call]
                tensors: dict[str, Tensor] = convert(*args, **kwargs)
                return tensors

        WeightConverter.convert = convert_later
        try:
            yield
        finally:
            WeightConverter.convert = convert


class _JoiningMode(TorchDispatchMode):
    """Lists the tensors that an operator would copy. A view of a mapped file copies nothing, and is made at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.cat.default, aten.stack.default, aten.clone.default):
            return LISTED[func](*args)
        return func(*args, **(kwargs or {}))


class JoinedTensor(Tensor):
    """Tensors that follow one another along a dimension. It has no memory of its own: `copy_` and `to` copy its parts
    to where they are needed, slices are lists of slices, and any other operator is given all of it, put together."""

    parts: Sequence[Tensor]
    dimension: int
    is_reshaped: bool

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], dim: int, shape: Sequence[int] | None = None) -> "JoinedTensor":
        """`shape`: what is read is put together and then seen in this shape. Slices of that are not slices of parts, so
        they need all of it."""
        first, dtype = parts[0], reduce(torch.promote_types, (part.dtype for part in parts))
        dim %= first.dim()
        joined = [*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :]]
        self: JoinedTensor = Tensor._make_wrapper_subclass(
            cls, joined if shape is None else shape, dtype=dtype, device=first.device
        )
        self.parts, self.dimension, self.is_reshaped = parts, dim, shape is not None
        return self

    def __init__(self, *_: object) -> None:
        """Tensor's own takes no arguments."""

    def copy_to(self, out: Tensor) -> None:
        if self.is_reshaped:
            out.copy_(JoinedTensor(self.parts, self.dimension).read().view(self.shape))
            return
        places = out.split([part.shape[self.dimension] for part in self.parts], self.dimension)
        for place, part in zip(places, self.parts, strict=True):
            place.copy_(part)

    def read(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """All of it, in memory."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=device or self.device)
        self.copy_to(out)
        return out

    def of_each(self, view: Callable[[Tensor], Tensor], dimension: int) -> "JoinedTensor":
        """The same view of each part. `dimension`: along which they follow one another then."""
        return JoinedTensor([view(part) for part in self.parts], dimension)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if func is aten.copy_.default and not isinstance(first, JoinedTensor):
            args[1].copy_to(first)
            return first
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change weights that were not read yet, and the change be lost")
        if func is aten._to_copy.default:
            return first.read(kwargs.get("dtype"), kwargs.get("device"))
        if func in LISTED and not (func in OF_PARTS and first.is_reshaped):
            return LISTED[func](*args, **kwargs)
        return func(*tree_map_only(JoinedTensor, JoinedTensor.read, args), **kwargs)


def sliced(
    joined: JoinedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    if step != 1:
        stepped: Tensor = aten.slice.Tensor(joined.read(), dim, start, end, step)
        return stepped
    dim %= joined.dim()
    first, last, _ = slice(start, end).indices(joined.shape[dim])
    if dim != joined.dimension:
        return joined.of_each(lambda part: aten.slice.Tensor(part, dim, first, last), joined.dimension)
    parts, offset = [], 0
    for part in joined.parts:
        size = part.shape[dim]
        begin, stop = max(first - offset, 0), min(last - offset, size)
        if begin < stop:
            parts.append(aten.slice.Tensor(part, dim, begin, stop))
        offset += size
    return JoinedTensor(parts or [aten.slice.Tensor(joined.parts[0], dim, 0, 0)], dim)


def split(joined: JoinedTensor, size: int, dim: int = 0) -> list[Tensor]:
    return [sliced(joined, dim, start, start + size) for start in range(0, joined.shape[dim], size)]


def transposed(joined: JoinedTensor, dim0: int, dim1: int) -> JoinedTensor:
    places = list(range(joined.dim()))
    places[dim0], places[dim1] = places[dim1], places[dim0]
    return joined.of_each(lambda part: part.transpose(dim0, dim1), places.index(joined.dimension))


def unsqueezed(joined: JoinedTensor, dim: int) -> JoinedTensor:
    dim %= joined.dim() + 1
    return joined.of_each(lambda part: part.unsqueeze(dim), joined.dimension + (dim <= joined.dimension))


def same(joined: JoinedTensor, **_: object) -> JoinedTensor:
    return JoinedTensor(joined.parts, joined.dimension, joined.shape if joined.is_reshaped else None)


def reshaped(joined: JoinedTensor, shape: Sequence[int]) -> JoinedTensor:
    return JoinedTensor([joined], 0, torch.empty(joined.shape, device="meta").view(shape).shape)


OF_PARTS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: sliced,
    aten.split.Tensor: split,
    aten.transpose.int: transposed,
    aten.unsqueeze.default: unsqueezed,
}
LISTED: dict[Any, Callable[..., Any]] = {
    **OF_PARTS,
    aten.cat.default: lambda tensors, dim=0: JoinedTensor(tensors, dim),
    aten.stack.default: lambda tensors, dim=0: JoinedTensor([tensor.unsqueeze(dim) for tensor in tensors], dim),
    aten.clone.default: lambda tensor, **_: JoinedTensor([tensor], 0),
    aten.detach.default: same,
    aten.alias.default: same,
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
}
"""Operators whose result is a list of tensors, too."""
