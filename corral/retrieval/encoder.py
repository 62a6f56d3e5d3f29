"""Texts to vectors, by a sentence-transformers model.

Families of encoders want to be asked in their own way: e5 with prefixes, bge with an instruction before the query, DPR
without normalisation and with two models. What is known of a family by its name can be overruled, and what was used for
the passages is written in the index, so that queries are always treated the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from corral.recipe.errors import UserError, first_line
from corral.retrieval.base import retriever_extra

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MAX_TOKENS = 256
BGE = "Represent this sentence for searching relevant passages: "
BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class EncoderSettings:
    model: str
    query_model: str | None = None
    """If queries have a model of their own, as in DPR."""
    query_prefix: str | None = None
    """None: as the family has it, else as the model says."""
    passage_prefix: str | None = None
    pooling: str | None = None
    """mean or cls. None: as the model says; where it says nothing, as the family has it."""
    normalise: bool | None = None
    max_tokens: int = MAX_TOKENS
    """What a text is cut to."""


@dataclass(frozen=True)
class Family:
    name: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalise: bool = True


FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"\be5\b", Family("e5", "query: ", "passage: ")),
    (r"\bbge\b.*\bm3\b", Family("bge-m3", pooling="cls")),
    (r"\bbge\b.*\bzh\b", Family("bge", BGE_CHINESE, pooling="cls")),
    (r"\bbge\b", Family("bge", BGE, pooling="cls")),
    (r"\bdpr\b", Family("dpr", pooling="cls", normalise=False)),
)


def family_of(model: str) -> Family | None:
    """By the last part of the name: `intfloat/e5-base-v2` is an e5."""
    name = Path(model).name.lower().replace("_", "-")
    return next((family for pattern, family in FAMILIES if re.search(pattern, name)), None)


def resolved(settings: EncoderSettings) -> EncoderSettings:
    """With what is known of the family, for what was not given."""
    family = family_of(settings.model)
    if settings.normalise is None:
        settings = replace(settings, normalise=family is None or family.normalise)
    if family is not None and settings.query_prefix is None:
        settings = replace(settings, query_prefix=family.query_prefix)
    if family is not None and settings.passage_prefix is None:
        settings = replace(settings, passage_prefix=family.passage_prefix)
    return settings


class Encoder:
    def __init__(self, settings: EncoderSettings, device: str | None = None, batch: int = 64) -> None:
        settings = resolved(settings)
        self.batch, self.normalise = batch, bool(settings.normalise)
        self.passage_model = self.query_model = load(settings.model, settings, device)
        if settings.query_model is not None:
            self.query_model = load(settings.query_model, settings, device)
        self.query_prefix = own_prefix(settings.query_prefix, self.query_model, "query")
        self.passage_prefix = own_prefix(settings.passage_prefix, self.passage_model, "passage", "document")
        self.dimension = dimension_of(self.passage_model)
        if dimension_of(self.query_model) != self.dimension:
            raise UserError(f"{settings.query_model} and {settings.model} have vectors of different lengths")

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.passage_model, texts, self.passage_prefix)

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.query_model, texts, self.query_prefix)

    def _encode(self, model: "SentenceTransformer", texts: Sequence[str], prefix: str) -> Vectors:
        encoded = model.encode(
            [prefix + text for text in texts],
            prompt="",  # the prefix is there already; a default prompt of the model must not come on top
            batch_size=self.batch,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=self.normalise,
        )
        return np.asarray(encoded, np.float32)


def load(name: str, settings: EncoderSettings, device: str | None) -> "SentenceTransformer":
    with retriever_extra():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
        from sentence_transformers.util import is_sentence_transformer_model
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    try:
        if settings.pooling is None and is_sentence_transformer_model(name):
            model = SentenceTransformer(name, device=device)
        else:
            family = family_of(name)
            pooling = settings.pooling or (family.pooling if family else "mean")
            words = Transformer(name)
            model = SentenceTransformer(
                modules=[words, Pooling(words.get_embedding_dimension(), pooling)], device=device
            )
    except (OSError, ValueError) as error:
        raise UserError(f"the encoder {name} cannot be loaded: {first_line(error)}") from error
    own = model.max_seq_length
    model.max_seq_length = settings.max_tokens if own is None else min(own, settings.max_tokens)
    if model.device.type == "cuda":
        model = model.half()
    return model.eval()


def own_prefix(given: str | None, model: "SentenceTransformer", *names: str) -> str:
    """What the model says itself, if nobody else does."""
    if given is not None:
        return given
    return next(filter(None, (model.prompts.get(name) for name in names)), "")


def dimension_of(model: "SentenceTransformer") -> int:
    dimension = model.get_embedding_dimension()
    assert dimension is not None
    return int(dimension)
