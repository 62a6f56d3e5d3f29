"""Whether a conversation can be extended token by token with the recipe's tokenizer and chat template.

Corral renders a prompt once and only appends to it. A template that renders an earlier turn differently when a new one
follows (many drop what a model thought) makes other programs see other tokens than the model was trained on; and where
the model is to play several turns, the run stops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from corral.cluster.doctor.findings import Finding
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.data.sources import fit_prompts, render_prompt
from corral.recipe.errors import UserError
from corral.recipe.schema import Recipe
from corral.rollout.chat import Chat

AROUND = 3
"""Tokens shown on each side of the first that differs."""
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


def check_chat(tokenizer: Any, recipe: Recipe) -> Iterator[Finding]:
    if not recipe.data.chat:
        return
    if not tokenizer.chat_template:
        what = "the model's tokenizer has no chat template"
        yield Finding("error", "chat template", what, "set `data.chat: false`, or give `model.chat_template`")
        return
    system = [Message(role="system", content=recipe.data.system)] if recipe.data.system else []
    several = recipe.rollout.max_turns > 1
    try:
        found = next(breaks(tokenizer, [*system, *TURNS]), None)
        thought = found or next(breaks(tokenizer, [*system, *THOUGHTS]), None)
    except Exception as error:  # templates raise their own
        what = f"the chat template refuses a plain conversation: {error_line(error)}"
        yield Finding("error" if several else "note", "chat template", what, FIX)
        return
    if several:
        yield from check_continuation(tokenizer, recipe)
    if found is not None:
        yield Finding("warning" if several else "note", "chat template", f"{found}", FIX if several else "")
    elif thought is not None:
        what = f"the template drops what a model thought in earlier turns ({thought}); Corral keeps what was generated"
        yield Finding("warning" if several else "note", "chat template", what, FIX if several else "")
    else:
        yield Finding("ok", "chat template", "a conversation is only ever extended")


def check_continuation(tokenizer: Any, recipe: Recipe) -> Iterator[Finding]:
    """As the rollout does it."""
    try:
        Chat(tokenizer, recipe.data.chat).continuation([Message(role="user", content="And now?")], ended=True)
    except UserError as error:
        yield Finding("error", "chat template", str(error), FIX)


def check_prompts(tokenizer: Any, recipe: Recipe, rows: Sequence[Row]) -> Iterator[Finding]:
    """`rows`: the first ones."""
    data = recipe.data
    try:
        prompts, counts = fit_prompts(
            rows, lambda row: render_prompt(tokenizer, row, data.chat), data.max_prompt_tokens, data.overlong
        )
    except UserError as error:
        yield Finding("error", "prompts", f"of the first {len(rows)} rows: {error}")
        return
    left_out = counts.num_filtered + counts.num_truncated
    longest = max(len(prompt.tokens) for prompt in prompts)
    what = f"the longest of the first {len(rows)} prompts has {longest} tokens, of {data.max_prompt_tokens}"
    if left_out:
        what = f"{left_out} of the first {len(rows)} prompts have more than {data.max_prompt_tokens} tokens"
        yield Finding("warning", "prompts", what, "raise `data.max_prompt_tokens`, unless that is meant")
    else:
        yield Finding("ok", "prompts", what)
