"""Whether the tokenizer and chat template render the prompts, and several turns (`rollout/chat_rendering.py`)."""

from collections.abc import Iterator, Sequence
from typing import Any

from corral.cluster.doctor.findings import Finding
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.data.sources import fit_prompts, render_prompt
from corral.recipe.errors import UserError
from corral.recipe.schema import Recipe
from corral.rollout.chat_rendering import DROPS_THOUGHTS, FIX, THOUGHTS, TURNS, ChatRenderer, find_breaks


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
        found = next(find_breaks(tokenizer, [*system, *TURNS]), None)
        thought = found or next(find_breaks(tokenizer, [*system, *THOUGHTS]), None)
    except Exception as error:  # templates raise their own
        what = f"the chat template refuses a plain conversation: {error_line(error)}"
        yield Finding("error" if several else "note", "chat template", what, FIX)
        return
    if several:
        yield from check_continuation(tokenizer, recipe)
    if found is not None:
        yield Finding("warning" if several else "note", "chat template", f"{found}", FIX if several else "")
    elif thought is not None:
        what = f"{DROPS_THOUGHTS} ({thought}); Corral keeps what was generated"
        yield Finding("warning" if several else "note", "chat template", what, FIX if several else "")
    else:
        yield Finding("ok", "chat template", "a conversation is only ever extended")


def check_continuation(tokenizer: Any, recipe: Recipe) -> Iterator[Finding]:
    """As the rollout does it."""
    try:
        ChatRenderer(tokenizer, recipe.data.chat).continuation([Message(role="user", content="And now?")], ended=True)
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
