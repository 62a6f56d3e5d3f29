"""Whether a conversation can be extended token by token with a tokenizer and its chat template.

Corral renders a prompt once and only appends to it. A template that renders an earlier turn differently when a new one
follows (many drop what a model thought) makes other programs see other tokens than the model was trained on; and where
new messages cannot be told apart from what was there, a conversation of several turns is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from corral.data.plugins import error_line
from corral.data.rows import Message
from corral.recipe.errors import UserError
from corral.rollout.chat import Chat

AROUND = 3
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


@dataclass(frozen=True)
class Break:
    """Where a conversation does not go on as it began."""

    num_messages: int
    """Of the beginning."""
    opening: bool
    """The beginning ended with the opening of the model's turn."""
    token: int
    """The first that differs."""
    began: str
    """What the beginning has there."""
    became: str

    def __str__(self) -> str:
        after = "the opening of the model's turn" if self.opening else f"message {self.num_messages}"
        return f"behind {after} token {self.token} was {self.began!r} and becomes {self.became!r} with the next message"


def breaks(tokenizer: Any, messages: Sequence[Message]) -> Iterator[Break]:
    """Every beginning of the conversation against the one that is longer by a message."""

    def render(count: int, opening: bool) -> list[int]:
        part = list(messages[:count])
        return list(tokenizer.apply_chat_template(part, add_generation_prompt=opening, return_dict=False))

    for count in range(1, len(messages)):
        whole = render(count + 1, False)
        for opening in (False, True) if messages[count]["role"] == "assistant" else (False,):
            start = render(count, opening)
            if whole[: len(start)] != start:
                at = first_difference(start, whole)
                cut = slice(max(0, at - AROUND), at + AROUND)
                yield Break(count, opening, at, tokenizer.decode(start[cut]), tokenizer.decode(whole[cut]))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_template(tokenizer: Any, system: str | None) -> str | None:
    """Before several turns are played. UserError if they cannot be; else what differs from the template, in words."""
    opening = [Message(role="system", content=system)] if system else []
    try:
        found = next(breaks(tokenizer, [*opening, *TURNS]), None)
        thought = found or next(breaks(tokenizer, [*opening, *THOUGHTS]), None)
    except Exception as error:  # templates raise their own
        raise UserError(f"the chat template refuses a plain conversation: {error_line(error)}; {FIX}") from error
    Chat(tokenizer, True).continuation([Message(role="user", content="And now?")], ended=True)
    if found is not None:
        return f"{found}; {FIX}"
    if thought is not None:
        return f"{DROPS_THOUGHTS} ({thought}); Corral keeps what was generated"
    return None
