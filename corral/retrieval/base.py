"""What every way to search has in common: passages found for queries."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from corral.recipe.errors import UserError

KINDS = ("bm25", "flat", "hnsw")


@dataclass(frozen=True)
class Passage:
    id: str
    contents: str
    """`"Title"`, a newline, the text."""


@dataclass(frozen=True)
class Found:
    passage: Passage
    score: float


class Searcher(Protocol):
    kind: str
    num_passages: int | None
    """None: nobody knows."""
    num_threads: int
    """That may search at once."""
    merges: bool
    """Whether queries are better searched in one call, also those of several requests, or each in a thread."""
    about: str
    """What else there is to say of it. Empty: nothing."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
        """For each query up to `k` passages, the best first. The best 3 are the first 3 of the best 10."""
        ...


def check_kind(kind: str, has_encoder: bool) -> None:
    if kind not in KINDS:
        raise UserError(f"`{kind}` is not a kind of index; there are: {', '.join(KINDS)}")
    if kind != "bm25" and not has_encoder:
        raise UserError(f"a {kind} index needs --encoder, a sentence-transformers model")


@contextmanager
def retriever_extra() -> Iterator[None]:
    """Around imports of what is not always installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"this needs {error.name}: pip install 'corral[retriever]'") from error
