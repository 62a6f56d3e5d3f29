"""A sequence classifier of transformers with one label, which scores conversations: a reward model.

It takes any architecture that `AutoModelForSequenceClassification` has, with the forward pass and the attention of
transformers, and renders conversations with the chat template of its own tokenizer. A score is what transformers
computes for the conversation alone, to rounding, whatever else is in its batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from corral.data.rows import Conversation
from corral.model.lora import AdapterFolder
from corral.model.model_loading import collector_paused, hide_bars, model_source, resolve_dtype
from corral.recipe.errors import UserError, one_line
from corral.recipe.schema import RewardModel

KEY = "reward_model.path"


@dataclass(frozen=True)
class SequenceClassifier:
    model: Any
    tokenizer: Any
    device: torch.device
    max_length: float
    """Most tokens of a conversation; infinite where the model does not say."""
    max_tokens: int
    """Most tokens of a batch, padding included; a conversation that is longer has one of its own."""
    offload: bool = False
    """Whether the weights are in the host's memory while nothing is scored."""

    def tokens_of(self, conversation: Conversation) -> list[int]:
        """Raises an error for a conversation that the model cannot read as a whole: a ValueError, or what the chat
        template raises."""
        if any(message.get("images") for message in conversation.messages):
            raise ValueError("it has images")
        text = self.tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools or None, tokenize=False
        )
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(
                f"it has {len(tokens)} tokens, and at most {self.max_length} fit (reward_model.max_length)"
            )
        return tokens

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns one number for each sequence of tokens."""
        self.model.to(self.device)
        scores = [0.0] * len(sequences)
        for batch in self.batches(sequences):
            for number, logit in zip(batch, self.logits([sequences[number] for number in batch]), strict=True):
                scores[number] = logit
        if self.offload:
            self.model.to("cpu")
        return scores

    def batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields the numbers of sequences that are computed together, the longest first: they are padded to equal
        length, and neighbors are about equally long."""
        batch: list[int] = []
        for number in sorted(range(len(sequences)), key=lambda one: -len(sequences[one])):
            longest = len(sequences[batch[0]]) if batch else 0
            # Without a padding token transformers takes one sequence at a time, whose last token it scores.
            if batch and (self.padding is None or (len(batch) + 1) * longest > self.max_tokens):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Pads on the right, where neither a causal model's tokens nor positions see it. Transformers scores at the
        last token that is not the padding token, also of a sequence that ends with that token by itself."""
        longest = max(map(len, sequences))
        padding = 0 if self.padding is None else self.padding
        tokens = torch.tensor([[*one, *[padding] * (longest - len(one))] for one in sequences])
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in sequences])
        output = self.model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))
        numbers: list[float] = output.logits[:, 0].float().tolist()
        return numbers

    @property
    def padding(self) -> int | None:
        token: int | None = self.model.config.get_text_config().pad_token_id
        return token


def load_classifier(
    settings: RewardModel, device: torch.device, max_tokens: int, offload: bool = False
) -> SequenceClassifier:
    """Raises a UserError for anything but a classifier with one label, all of its weights, and a chat template."""
    path = settings.path
    assert path is not None, "the rules see to it that there is one"
    with collector_paused():
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    if AdapterFolder.find(path) is not None:
        raise UserError(f"{KEY}: {path} is an adapter; merge it into its model, and name that")
    hide_bars()
    source, code = model_source(path, KEY), settings.trust_remote_code
    with one_line(f"{KEY}: {path} could not be loaded as a sequence classifier"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=code)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=resolve_dtype(settings.dtype, device), trust_remote_code=code, output_loading_info=True
        )
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{KEY}: {path} has no weights for {missing[0]}, so it is not a sequence classifier; its scores would be "
            "random"
        )
    if model.config.num_labels != 1:
        raise UserError(
            f"{KEY}: {path} has {model.config.num_labels} labels; the score of a reward model is its only one"
        )
    if not tokenizer.chat_template:
        raise UserError(f"{KEY}: the tokenizer of {path} has no chat template to render conversations with")
    model.config.use_cache = False
    return SequenceClassifier(
        model.eval().requires_grad_(False).to("cpu" if offload else device),
        tokenizer,
        device,
        max_length(settings, model, tokenizer),
        max_tokens,
        offload,
    )


def max_length(settings: RewardModel, model: Any, tokenizer: Any) -> float:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if settings.max_length is not None and settings.max_length > positions:
        raise UserError(f"reward_model.max_length: {settings.path} was made for {positions} tokens")
    return settings.max_length or min(positions, tokenizer.model_max_length)
