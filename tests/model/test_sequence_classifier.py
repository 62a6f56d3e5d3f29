"""The reward model's scores against transformers' own, one conversation at a time; and what is no reward model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEVICE, save_tiny_classifier, save_tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from corral.data.rows import Conversation, Message
from corral.model.sequence_classifier import SequenceClassifier, load_classifier
from corral.recipe.errors import UserError
from corral.recipe.schema import RewardModel


def load(folder: Path, max_tokens: int = 256, **settings: Any) -> SequenceClassifier:
    return load_classifier(RewardModel(path=str(folder), dtype="float32", **settings), DEVICE, max_tokens)


def conversation(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)])


CONVERSATIONS = [
    conversation("What is 2 + 3?", "5"),
    conversation("What is 2 + 3?", "It is five, as everybody knows who ever counted the fingers of a hand."),
    conversation("Hello", "Hi!", "And now?", "Now we are done."),
    conversation("?", ""),
    conversation("x" * 90, "y" * 60),
]


def scores_of_transformers(folder: Path) -> list[float]:
    """As the cards of reward models do it: the template of their tokenizer, one conversation at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = [
        tokenizer.apply_chat_template(one.messages, tokenize=True, return_tensors="pt", return_dict=False)
        for one in CONVERSATIONS
    ]
    with torch.no_grad():
        return [float(model(tokens).logits[0][0]) for tokens in rendered]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("pad_token", [0, 3, None], ids=["padding", "the template's end", "no padding"])
def test_scores_are_those_of_transformers_one_by_one(tmp_path: Path, family: str, pad_token: int | None) -> None:
    save_tiny_classifier(tmp_path, family, pad_token_id=pad_token)
    classifier = load(tmp_path)
    sequences = [classifier.tokens_of(one) for one in CONVERSATIONS]
    found, expected = classifier.scores(sequences), scores_of_transformers(tmp_path)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-2
    batches = list(classifier.batches(sequences))
    assert sorted(number for batch in batches for number in batch) == [0, 1, 2, 3, 4]
    assert len(batches) == (5 if pad_token is None else 3)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scores_in_bfloat16_are_within_three_hundredths_of_their_range(tmp_path: Path, family: str) -> None:
    save_tiny_classifier(tmp_path, family, pad_token_id=0)
    whole = load(tmp_path)
    rounded = load_classifier(RewardModel(path=str(tmp_path), dtype="bfloat16"), DEVICE, max_tokens=256)
    sequences = [whole.tokens_of(one) for one in CONVERSATIONS]
    exact, found = whole.scores(sequences), rounded.scores(sequences)
    assert rounded.model.dtype == torch.bfloat16
    assert found != exact
    assert found == pytest.approx(exact, abs=0.03 * (max(exact) - min(exact)))


def test_a_conversation_that_is_too_long_is_refused_and_never_cut(tmp_path: Path) -> None:
    save_tiny_classifier(tmp_path)
    tokens = load(tmp_path).tokens_of(CONVERSATIONS[0])
    assert load(tmp_path, max_length=len(tokens)).tokens_of(CONVERSATIONS[0]) == tokens
    with pytest.raises(ValueError, match=f"it has {len(tokens)} tokens, and at most {len(tokens) - 1} fit"):
        load(tmp_path, max_length=len(tokens) - 1).tokens_of(CONVERSATIONS[0])
    with pytest.raises(ValueError, match="and at most 512 fit"):
        load(tmp_path).tokens_of(conversation("x" * 600, "y"))


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "causal")
    with pytest.raises(UserError, match=r"has no weights for score.weight, so it is not a sequence classifier"):
        load(tmp_path / "causal")
    save_tiny_classifier(tmp_path / "two", num_labels=2)
    with pytest.raises(UserError, match=r"has 2 labels"):
        load(tmp_path / "two")
    save_tiny_classifier(tmp_path / "one")
    with pytest.raises(UserError, match=r"reward_model.max_length: .* was made for 512 tokens"):
        load(tmp_path / "one", max_length=513)
    (tmp_path / "one" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"reward_model.path: the tokenizer of .* has no chat template"):
        load(tmp_path / "one")
    with pytest.raises(UserError, match=r"reward_model.path: .* is not a folder"):
        load(tmp_path / "nowhere")
