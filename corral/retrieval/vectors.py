"""Vectors in files that faiss maps into memory.

A flat index of faiss is a short header and then the vectors, one after the other. So the file of the vectors, which is
written batch by batch, is the index from the first byte on: nothing is copied, nothing must fit in memory, and a build
that was stopped goes on where the file ends. The header is faiss's own, of an empty index, with the number put in.
"""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.recipe.errors import RunError, UserError
from corral.retrieval.base import retriever_extra

AT_NUMBER = slice(8, 16)
"""Behind four letters and the dimension."""


class VectorFile:
    """The vectors of `total` passages, of which `done` are there."""

    def __init__(self, path: Path, total: int, dimension: int, half: bool) -> None:
        self.path, self.total, self.dimension = path, total, dimension
        self.dtype = np.dtype(np.float16 if half else np.float32)
        self.header = header(total, dimension, half)
        if not path.exists():
            path.write_bytes(self.header)
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                raise UserError(f"{path} is not of this build; delete {path.parent} and build it again")
        self.done = min(total, (path.stat().st_size - len(self.header)) // self.row_bytes)
        os.truncate(path, len(self.header) + self.done * self.row_bytes)

    @property
    def row_bytes(self) -> int:
        return self.dimension * self.dtype.itemsize

    def append(self, vectors: npt.NDArray[np.float32]) -> None:
        with self.path.open("ab") as file:
            file.write(vectors.astype(self.dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(vectors)

    def check_whole(self) -> None:
        """Somebody else may have written to the file too."""
        size, wanted = self.path.stat().st_size, len(self.header) + self.total * self.row_bytes
        if size != wanted:
            raise RunError(f"{self.path} has {size} bytes where it should have {wanted}; delete {self.path.parent}")

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        offset = len(self.header) + start * self.row_bytes
        number = (stop - start) * self.dimension
        return np.fromfile(self.path, self.dtype, number, offset=offset).reshape(-1, self.dimension).astype(np.float32)


def header(total: int, dimension: int, half: bool) -> bytes:
    empty = bytes(faiss().serialize_index(empty_flat(dimension, half)))
    items = total * dimension * (2 if half else 1)  # counted in bytes in the one, in numbers in the other
    return empty[: AT_NUMBER.start] + struct.pack("<q", total) + empty[AT_NUMBER.stop : -8] + struct.pack("<Q", items)


def empty_flat(dimension: int, half: bool) -> Any:
    if half:
        return faiss().IndexScalarQuantizer(dimension, faiss().ScalarQuantizer.QT_fp16, faiss().METRIC_INNER_PRODUCT)
    return faiss().IndexFlatIP(dimension)


def empty_hnsw(dimension: int, half: bool, num_links: int) -> Any:
    metric = faiss().METRIC_INNER_PRODUCT
    if half:
        return faiss().IndexHNSWSQ(dimension, faiss().ScalarQuantizer.QT_fp16, num_links, metric)
    return faiss().IndexHNSWFlat(dimension, num_links, metric)


def open_mapped(path: Path) -> Any:
    """IO_FLAG_MMAP alone maps inverted lists only, and reads the vectors of a flat index into memory."""
    return faiss().read_index(str(path), faiss().IO_FLAG_MMAP_IFC)


def faiss() -> Any:
    with retriever_extra():
        import faiss
    return faiss
