"""From a reply's tokens to its text, for all that end at the same moment."""

import asyncio
from typing import Any

import pytest
from tiny import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from corral.rollout.chat_rendering import ChatRenderer, decode_replies


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).upper()


def tokenizers() -> list[Any]:
    plain = tiny_tokenizer()
    tidy = tiny_tokenizer()
    tidy.clean_up_tokenization_spaces = True
    return [plain, tidy, Shouting(tokenizer_object=plain.backend_tokenizer, eos_token="<|end|>")]


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=["plain", "tidy", "own"])
def test_replies_are_decoded_together_as_they_are_one_by_one(tokenizer: Any) -> None:
    texts = ["Hello , you .", "", "a<|end|>", "<|end|>b", "do n't <pad>"]
    replies = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]
    assert decode_replies(tokenizer, replies) == expected


def test_each_who_asks_gets_the_text_of_its_own_reply() -> None:
    tokenizer = tiny_tokenizer()
    chat, texts = ChatRenderer(tokenizer, True), [f"reply {number}" for number in range(20)]

    async def ask() -> list[str]:
        calls = [asyncio.ensure_future(chat.decode_reply(tokenizer.encode(text))) for text in texts]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        return [*await asyncio.gather(*calls[1::2]), await chat.decode_reply(tokenizer.encode("later"))]

    assert asyncio.run(ask()) == [*texts[1::2], "later"]


def test_a_reply_that_cannot_be_decoded_raises_in_its_own_call() -> None:
    with pytest.raises(OverflowError):
        asyncio.run(ChatRenderer(tiny_tokenizer(), True).decode_reply([-1]))
