"""A second look: a cross-encoder reads each query together with each of its own candidates, and orders those."""

from collections.abc import Sequence
from itertools import islice

from corral.recipe.errors import UserError, first_line
from corral.retrieval.base import Found, retriever_extra
from corral.retrieval.encoder import check_device

BATCH = 32


class Reranker:
    def __init__(self, model: str, device: str | None = None) -> None:
        with retriever_extra():
            from sentence_transformers import CrossEncoder
            from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()
        check_device(device)
        try:
            self.model = CrossEncoder(model, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"the re-ranker {model} cannot be loaded: {first_line(error)}") from error
        if self.model.num_labels != 1:
            raise UserError(f"the re-ranker {model} gives {self.model.num_labels} scores where one is wanted")

    def order(self, queries: Sequence[str], candidates: Sequence[Sequence[Found]]) -> list[list[Found]]:
        """The candidates of each query, the best first, with the cross-encoder's scores."""
        pairs = [
            (query, found.passage.contents) for query, own in zip(queries, candidates, strict=True) for found in own
        ]
        if not pairs:
            return [[] for _ in queries]
        scores = iter(self.model.predict(pairs, batch_size=BATCH, show_progress_bar=False).tolist())
        ordered = []
        for own in candidates:
            scored = [Found(found.passage, score) for found, score in zip(own, islice(scores, len(own)), strict=True)]
            ordered.append(sorted(scored, key=lambda found: -found.score))
        return ordered
