"""Between messages and tokens: a conversation is rendered once and then only extended, never tokenised again."""

from collections.abc import Sequence
from typing import Any

from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.recipe.errors import UserError


class Chat:
    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def opening(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return render_prompt(self.tokenizer, Row(messages, None, "", {}), self.chat, tools)

    def text(self, tokens: Sequence[int]) -> str:
        """A reply as the environment reads it: without the end-of-turn token."""
        decoded: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded

    def continuation(self, messages: list[Message], ended: bool) -> list[int]:
        """What follows the model's turn: its end (unless generated: `ended`), the messages, the next turn's opening.

        Taken from how the template renders a stand-in conversation, behind the end of the stand-in reply.
        """
        if not self.chat:
            return self._encode("\n".join(["", *(message["content"] for message in messages), ""]))
        before = [Message(role="user", content="question"), Message(role="assistant", content="reply")]
        start = self._render(before, opening=False)
        whole = self._render([*before, *messages], opening=True)
        if whole[: len(start)] != start:
            raise UserError(
                "the model's chat template changes earlier turns when a new one is added, so a conversation cannot be "
                "extended token by token: give a prefix-stable one as `model.chat_template`"
            )
        if self.tokenizer.eos_token_id not in start:
            raise UserError(
                f"the model's chat template does not end a turn with {self.tokenizer.eos_token}, the tokenizer's end: "
                "give one that does as `model.chat_template`"
            )
        end = len(start) - 1 - start[::-1].index(self.tokenizer.eos_token_id)
        return whole[end + 1 if ended else end :]

    def inline(self, messages: list[Message]) -> list[int]:
        """What follows within the model's own turn, as it is."""
        return self._encode("".join(message["content"] for message in messages))

    def cut(self, messages: list[Message], limit: int, closing: str) -> list[Message]:
        """The messages with at most `limit` tokens of text, from their beginning; `closing`, if the last of them ends
        with it, stays."""
        texts = [message["content"] for message in messages]
        if messages and closing and texts[-1].endswith(closing):
            texts[-1] = texts[-1].removesuffix(closing)
        else:
            closing = ""
        left = limit - len(self._encode(closing))
        for i, text in enumerate(texts):
            tokens = self._encode(text)
            if len(tokens) > max(left, 0):
                # A character of several tokens may have been cut in two.
                texts[i] = self.tokenizer.decode(tokens[: max(left, 0)], skip_special_tokens=False).rstrip("\ufffd")
            left -= len(tokens)
        if texts:
            texts[-1] += closing
        return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        return tokens

    def _render(self, messages: list[Message], opening: bool) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=opening, return_dict=False))
