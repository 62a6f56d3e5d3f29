"""Messages to tokens: a conversation is rendered once and then only extended, never tokenized again.

A chat template that renders an earlier turn differently when a new one follows (many drop what a model thought) makes
other programs see other tokens than the model was trained on; and where new messages cannot be separated from those
before them, a conversation of several turns is refused. `check_template` finds both before the first rollout.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from corral.data.images import for_template, load_images
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.recipe.errors import UserError

PLACEHOLDER_REPLY = "stand-in-reply"
NUM_SHOWN_TOKENS = 3
"""Tokens shown on each side of the first that differs."""
DROPS_THOUGHTS = "the chat template drops what a model thought in earlier turns"
FIX = "give a template that only appends as `model.chat_template`"

TURNS = [
    Message(role="user", content="What is 2 + 3?"),
    Message(role="assistant", content="It is 5."),
    Message(role="user", content="And 4 + 4?"),
    Message(role="assistant", content="8"),
    Message(role="user", content="Thanks."),
]
THOUGHTS = [
    Message(role="user", content="What is 2 + 3?"),
    Message(role="assistant", content="<think>\nTwo and three.\n</think>\n\nIt is 5."),
    Message(role="user", content="And 4 + 4?"),
]


class ChatRenderer:
    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self._to_decode: list[tuple[Sequence[int], asyncio.Future[str]]] = []

    def prompt_tokens(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """A conversation up to the start of the model's turn."""
        return render_prompt(self.tokenizer, Row(messages, None, "", {}, tools=tools or []), self.chat)

    async def decode_reply(self, tokens: Sequence[int]) -> str:
        """A reply's text without the end-of-turn token. Replies that finish in the same turn of the event loop are
        decoded together, in parallel."""
        loop = asyncio.get_running_loop()
        if not self._to_decode:
            loop.call_soon(self._decode_all)
        self._to_decode.append((tokens, loop.create_future()))
        return await self._to_decode[-1][1]

    def _decode_all(self) -> None:
        batch, self._to_decode = [(tokens, future) for tokens, future in self._to_decode if not future.cancelled()], []
        try:
            texts = decode_replies(self.tokenizer, [tokens for tokens, _ in batch])
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), text in zip(batch, texts, strict=True):
            future.set_result(text)

    def continuation(self, messages: list[Message], ended: bool) -> list[int]:
        """What follows the model's turn: its end (unless generated: `ended`), the messages, the start of the next turn.

        Taken from how the template renders a placeholder conversation, behind the placeholder reply. (Many templates
        render a reply that is the last message differently, with room for thoughts: here it is never the last.)
        """
        self._check_images(messages, is_inline=not self.chat)
        if not self.chat:
            return self._encode("\n".join(["", *(message["content"] for message in messages), ""]))
        before = [Message(role="user", content="question"), Message(role="assistant", content=PLACEHOLDER_REPLY)]
        rendered = self.tokenizer.apply_chat_template(
            [*before, *for_template(messages)], tokenize=False, add_generation_prompt=True
        )
        _, found, tail = rendered.partition(PLACEHOLDER_REPLY)
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
        tokens = tokens[end + 1 :] if ended else tokens
        images = load_images(messages)
        return self.tokenizer.vision.expand(tokens, images) if images else tokens

    def inline_continuation(self, messages: list[Message]) -> list[int]:
        """What follows within the model's own turn, without a template."""
        self._check_images(messages, is_inline=True)
        return self._encode("".join(message["content"] for message in messages))

    def _check_images(self, messages: list[Message], is_inline: bool) -> None:
        if any(message.get("images") for message in messages):
            if getattr(self.tokenizer, "vision", None) is None:
                raise ValueError("an observation has images, and the model reads none")
            if is_inline:
                raise ValueError("an observation has images, which need the chat template")

    def truncate(self, messages: list[Message], limit: int, closing: str) -> list[Message]:
        """The messages, cut to `limit` tokens of text; a last message that ends with `closing` still does. Messages
        with images stay whole."""
        if any(message.get("images") for message in messages):
            return messages
        texts = [message["content"] for message in messages]
        if messages and closing and texts[-1].endswith(closing):
            texts[-1] = texts[-1].removesuffix(closing)
        else:
            closing = ""
        left = limit - len(self._encode(closing))
        for i, text in enumerate(texts):
            tokens = self._encode(text)
            if len(tokens) > max(left, 0):
                # A character of several tokens may have been cut in two, and is decoded as U+FFFD.
                texts[i] = self.tokenizer.decode(tokens[: max(left, 0)], skip_special_tokens=False).rstrip("\ufffd")
            left -= len(tokens)
        if texts:
            texts[-1] += closing
        return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        return tokens


def decode_replies(tokenizer: Any, replies: Sequence[Sequence[int]]) -> list[str]:
    """`tokenizer.decode` of each reply; in parallel where that leaves all the work to the Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(replies, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]


@dataclass(frozen=True)
class TemplateBreak:
    """Where a rendered conversation is not a prefix of the same conversation with one more message."""

    num_messages: int
    """Number of messages of the shorter conversation."""
    generation_prompt: bool
    """Whether the shorter one ended with the start of the model's turn."""
    token: int
    """Index of the first token that differs."""
    before: str
    """Text around that token in the shorter conversation."""
    after: str
    """Text around that token in the longer conversation."""

    def __str__(self) -> str:
        where = "the generation prompt" if self.generation_prompt else f"message {self.num_messages}"
        return f"behind {where} token {self.token} was {self.before!r} and becomes {self.after!r} with the next message"


def find_breaks(tokenizer: Any, messages: Sequence[Message]) -> Iterator[TemplateBreak]:
    """Compares every prefix of the conversation with the one that is a message longer."""

    def render(count: int, generation_prompt: bool) -> list[int]:
        part = list(messages[:count])
        return list(tokenizer.apply_chat_template(part, add_generation_prompt=generation_prompt, return_dict=False))

    for count in range(1, len(messages)):
        whole = render(count + 1, False)
        for generation_prompt in (False, True) if messages[count]["role"] == "assistant" else (False,):
            start = render(count, generation_prompt)
            if whole[: len(start)] != start:
                same = [a == b for a, b in zip(start, whole, strict=False)]
                at = same.index(False) if False in same else len(same)
                cut = slice(max(0, at - NUM_SHOWN_TOKENS), at + NUM_SHOWN_TOKENS)
                yield TemplateBreak(
                    count, generation_prompt, at, tokenizer.decode(start[cut]), tokenizer.decode(whole[cut])
                )


def check_template(tokenizer: Any, system: str | None) -> str | None:
    """For conversations of several turns. UserError if the template cannot render them; else a warning, or None."""
    start = [Message(role="system", content=system)] if system else []
    try:
        found = next(find_breaks(tokenizer, [*start, *TURNS]), None)
        thought = found or next(find_breaks(tokenizer, [*start, *THOUGHTS]), None)
    except Exception as error:  # templates raise their own
        raise UserError(f"the chat template refuses a plain conversation: {error_line(error)}; {FIX}") from error
    ChatRenderer(tokenizer, True).continuation([Message(role="user", content="And now?")], ended=True)
    if found is not None:
        return f"{found}; {FIX}"
    if thought is not None:
        return f"{DROPS_THOUGHTS} ({thought}); Corral keeps what was generated"
    return None
