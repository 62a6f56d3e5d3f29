r"""Search-R1's wire format: what a client sends to `/retrieve`, and what it gets.

    {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Title\"\ntext"}, "score": 11.5}, ...], ...]}

Without scores, an item is the document itself. Its re-ranking server takes `topk_retrieval` and `topk_rerank` instead
of `topk`; documents are objects there too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral.retrieval.answer import Ask
from corral.retrieval.base import Found


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, and how much may wait."""

    body_bytes: int = 16 * 2**20
    queries: int = 4096
    topk: int = 100
    passages: int = 20_480
    """In one answer: queries times `topk`."""
    query_chars: int = 8192
    waiting: int = 8192
    """Queries of all clients."""
    timeout_s: float = 25.0
    """For a request to arrive, and to be answered: less than the 30 s of `RetrievalClient`, which then learns why."""
    connections: int = 1000


class Refused(Exception):
    """With the status and one line that says why."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[str]
    topk: int | None = Field(None, ge=1)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1)
    topk_rerank: int | None = Field(None, ge=1)


def parse(content: bytes, limits: Limits, default_topk: int, reranks: bool) -> tuple[Ask, bool]:
    """The request, and whether scores are wanted."""
    try:
        body = Body.model_validate_json(content)
    except ValidationError as error:
        raise Refused(422, "invalid", in_one_line(error)) from error
    if len(body.queries) > limits.queries:
        raise Refused(413, "limit", f"{len(body.queries)} queries; at most {limits.queries} in one request")
    for number, query in enumerate(body.queries):
        if len(query) > limits.query_chars:
            raise Refused(413, "limit", f"queries.{number} has {len(query)} characters, at most {limits.query_chars}")
    for name in ("topk", "topk_retrieval", "topk_rerank"):
        if (getattr(body, name) or 0) > limits.topk:
            raise Refused(413, "limit", f"{name} is {getattr(body, name)}, at most {limits.topk}")
    topk = body.topk or body.topk_rerank or default_topk
    if (number := len(body.queries) * max(topk, body.topk_retrieval or 0)) > limits.passages:
        raise Refused(413, "limit", f"{number} passages (queries x topk); at most {limits.passages} in one request")
    if (body.topk_retrieval or body.topk_rerank) and not reranks:
        raise Refused(422, "invalid", "topk_retrieval and topk_rerank: this server has no re-ranker (--reranker)")
    if body.topk and body.topk_rerank:
        raise Refused(422, "invalid", "topk and topk_rerank are two names of one thing; send one of them")
    return Ask(body.queries, topk, body.topk_retrieval), body.return_scores


def in_one_line(error: ValidationError) -> str:
    problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    said = "; ".join(f"{where}: {what}" if where else what for where, what in problems[:3])
    return said if len(problems) <= 3 else f"{said}; and {len(problems) - 3} more"


def result(found: Sequence[Sequence[Found]], return_scores: bool) -> dict[str, Any]:
    return {"result": [[item(one, return_scores) for one in own] for own in found]}


def item(found: Found, return_scores: bool) -> dict[str, Any]:
    document = {"id": found.passage.id, "contents": found.passage.contents}
    return {"document": document, "score": found.score} if return_scores else document
