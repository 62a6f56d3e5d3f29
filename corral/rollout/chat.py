"""Between messages and tokens: a conversation is rendered once and then only extended, never tokenised again."""

import asyncio
from collections.abc import Sequence
from typing import Any

from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.recipe.errors import UserError

STAND_IN = "stand-in-reply"


class Chat:
    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self._asked: list[tuple[Sequence[int], asyncio.Future[str]]] = []

    def opening(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return render_prompt(self.tokenizer, Row(messages, None, "", {}), self.chat, tools)

    async def text(self, tokens: Sequence[int]) -> str:
        """A reply as the environment reads it: without the end-of-turn token. Many replies may end at the same moment,
        and are decoded together."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._answer)
        self._asked.append((tokens, loop.create_future()))
        return await self._asked[-1][1]

    def _answer(self) -> None:
        asked, self._asked = [(tokens, future) for tokens, future in self._asked if not future.cancelled()], []
        try:
            texts = decode_replies(self.tokenizer, [tokens for tokens, _ in asked])
        except Exception as error:
            for _, future in asked:
                future.set_exception(error)
            return
        for (_, future), text in zip(asked, texts, strict=True):
            future.set_result(text)

    def continuation(self, messages: list[Message], ended: bool) -> list[int]:
        """What follows the model's turn: its end (unless generated: `ended`), the messages, the next turn's opening.

        Taken from how the template renders a stand-in conversation, behind the stand-in reply. (Many templates render a
        reply that is the last message differently, with room for thoughts: there it is never the last.)
        """
        if not self.chat:
            return self._encode("\n".join(["", *(message["content"] for message in messages), ""]))
        before = [Message(role="user", content="question"), Message(role="assistant", content=STAND_IN)]
        rendered = self.tokenizer.apply_chat_template([*before, *messages], tokenize=False, add_generation_prompt=True)
        _, found, tail = rendered.partition(STAND_IN)
        if not found:
            raise UserError(
                "the model's chat template changes earlier turns when a new one is added, so a conversation cannot be "
                "extended token by token: give a prefix-stable one as `model.chat_template`"
            )
        tokens = self._encode(tail)
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        end = next((i for i, token in enumerate(tokens) if token in special), None)
        if end is None:
            raise UserError(
                f"the model's chat template does not end a turn with {self.tokenizer.eos_token} or another special "
                "token: give one that does as `model.chat_template`"
            )
        return tokens[end + 1 :] if ended else tokens

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


def decode_replies(tokenizer: Any, replies: Sequence[Sequence[int]]) -> list[str]:
    """What `tokenizer.decode` says to each; in parallel where it leaves all the work to the Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(replies, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]
