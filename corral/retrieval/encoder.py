"""Texts to vectors, by a sentence-transformers model.

Families of encoders want their own format: e5 prefixes, bge an instruction before the query, DPR no normalization and
two models. What the model's configuration has goes before what is known of its family by its name; the user's settings
go before both. What was used for the passages is written in the index, so that queries are always treated the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from corral.recipe.errors import UserError, first_line
from corral.retrieval.searcher import check_device, retriever_extra

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MAX_TOKENS = 256
BGE = "Represent this sentence for searching relevant passages: "
BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："

Vectors = npt.NDArray[np.float32]
ModelPrompts = Mapping[str, str]
"""The prompts of a sentence-transformers model, by name."""


@dataclass(frozen=True)
class EncoderSettings:
    model: str
    query_model: str | None = None
    """The model of queries, if they have one of their own, as in DPR."""
    query_prefix: str | None = None
    """None: that of the model's configuration, else of its family."""
    passage_prefix: str | None = None
    pooling: str | None = None
    """mean or cls. None: that of the model's configuration, else of its family."""
    normalise: bool | None = None
    """Whether vectors are normalized. None: as the family has it, else yes."""
    max_tokens: int = MAX_TOKENS
    """Texts are cut to this many tokens."""


@dataclass(frozen=True)
class EncoderFamily:
    name: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalise: bool = True


FAMILIES: tuple[tuple[str, EncoderFamily], ...] = (
    (r"\be5\b", EncoderFamily("e5", "query: ", "passage: ")),
    (r"\bbge\b.*\bm3\b", EncoderFamily("bge-m3", pooling="cls")),
    (r"\bbge\b.*\bzh\b", EncoderFamily("bge", BGE_CHINESE, pooling="cls")),
    (r"\bbge\b", EncoderFamily("bge", BGE, pooling="cls")),
    (r"\bdpr\b", EncoderFamily("dpr", pooling="cls", normalise=False)),
)


OTHER_FORMATS = re.compile(r"\b(instruct|icl|gemma\d*)\b")
"""Words in the name of a model whose format is another than that of the family whose name it has."""
SNAPSHOT = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+/?$")
"""How the hub's cache names a model's folder."""


def family_of(model: str) -> EncoderFamily | None:
    """The family by the last part of the name: `intfloat/e5-base-v2` is an e5."""
    snapshot = SNAPSHOT.search(model)
    name = (snapshot[1] if snapshot else Path(model).name).lower().replace("_", "-")
    if OTHER_FORMATS.search(name):
        return None
    return next((family for pattern, family in FAMILIES if re.search(pattern, name)), None)


class Encoder:
    def __init__(self, settings: EncoderSettings, device: str | None = None, batch: int = 64) -> None:
        check_device(device)
        self.batch = batch
        self.passage_model = self.query_model = load(settings.model, settings, device)
        if settings.query_model is not None:
            self.query_model = load(settings.query_model, settings, device)
        self.settings = resolved(settings, self.query_model.prompts, self.passage_model.prompts)
        self.dimension = dimension_of(self.passage_model)
        if dimension_of(self.query_model) != self.dimension:
            raise UserError(f"{settings.query_model} and {settings.model} have vectors of different lengths")

    def describe(self) -> str:
        used = self.settings
        return (
            f"encoder {used.model}: query prefix {used.query_prefix!r}, passage prefix {used.passage_prefix!r}, "
            f"pooling {pooling_in(self.query_model)}, {'' if used.normalise else 'not '}normalized, "
            f"{self.dimension} numbers"
        )

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.passage_model, texts, self.settings.passage_prefix or "")

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.query_model, texts, self.settings.query_prefix or "")

    def _encode(self, model: "SentenceTransformer", texts: Sequence[str], prefix: str) -> Vectors:
        encoded = model.encode(
            [prefix + text for text in texts],
            prompt="",  # the prefix is there already; a default prompt of the model must not come on top
            batch_size=self.batch,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=bool(self.settings.normalise),
        )
        return np.asarray(encoded, np.float32)


def load(name: str, settings: EncoderSettings, device: str | None) -> "SentenceTransformer":
    with retriever_extra():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    try:
        pooling = pooling_for(name, settings)
        if pooling is None:
            model = SentenceTransformer(name, device=device)
        else:
            words = Transformer(name)
            model = SentenceTransformer(
                modules=[words, Pooling(words.get_embedding_dimension(), pooling)], device=device
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the encoder {name} cannot be loaded: {first_line(error)}") from error
    longest = model.max_seq_length
    model.max_seq_length = settings.max_tokens if longest is None else min(longest, settings.max_tokens)
    if model.device.type == "cuda":
        model = model.half()
    return model.eval()


def resolved(settings: EncoderSettings, query_prompts: ModelPrompts, passage_prompts: ModelPrompts) -> EncoderSettings:
    """Settings without anything left open, so that a model that is moved is still used in the same way."""
    family = family_of(settings.model) or EncoderFamily("")
    query = own_prompt(query_prompts, family.query_prefix, "query", "web_search_query")
    passage = own_prompt(passage_prompts, family.passage_prefix, "passage", "document")
    poolings = {pooling_for(name, settings) for name in (settings.model, settings.query_model) if name}
    return replace(
        settings,
        query_prefix=query if settings.query_prefix is None else settings.query_prefix,
        passage_prefix=passage if settings.passage_prefix is None else settings.passage_prefix,
        normalise=family.normalise if settings.normalise is None else settings.normalise,
        pooling=poolings.pop() if len(poolings) == 1 else settings.pooling,
    )


def own_prompt(prompts: ModelPrompts, of_family: str, *names: str) -> str:
    """The model's prompt of one of these names. A model that has prompts at all wants none where it has none."""
    if not any(prompts.values()):
        return of_family
    return next(filter(None, map(prompts.get, names)), "")


def pooling_for(name: str, settings: EncoderSettings) -> str | None:
    """The pooling to set up. None: the model has its own."""
    with retriever_extra():
        from sentence_transformers.util import is_sentence_transformer_model
    if settings.pooling is not None or is_sentence_transformer_model(name):
        return settings.pooling
    return (family_of(name) or EncoderFamily("")).pooling


def pooling_in(model: "SentenceTransformer") -> str:
    modes = (getattr(module, "pooling_mode", None) for module in model)
    mode = next(filter(None, modes), "of its own")
    return mode if isinstance(mode, str) else " and ".join(mode)


def dimension_of(model: "SentenceTransformer") -> int:
    dimension = model.get_embedding_dimension()
    assert dimension is not None
    return int(dimension)
