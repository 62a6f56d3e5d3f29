"""From rows with answers to tokens, and which of them are trained on: those that the model itself would have to say.

In a conversation these are the tokens of the assistant's turns, by the chat template's own account: where it has
`{% generation %}` blocks, what these mark; else what the template adds for the turn behind the generation prompt. The
token that ends the turn is among them: a model that is not trained on it does not learn to stop.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from corral.data.batch import BoolArray, StopReason, Trajectory
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.data.sampler import SampledPrompt
from corral.data.sources import OverlongCounts, PreparedPrompt, check_tools, fit_prompts, render_prompt, try_each
from corral.recipe.errors import UserError
from corral.recipe.schema import Data

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
FIX = "give a template that marks the model's turns with `{% generation %}` as `model.chat_template`"


def prepare_prompts(
    tokenizer: Any, rows: Iterable[Row], data: Data, *, with_answers: bool
) -> tuple[list[PreparedPrompt], OverlongCounts]:
    """Prompts to roll out, or whole rows to train on (`with_answers`), that fit `data.max_prompt_tokens`."""
    skip_bad = data.on_bad_row == "skip"
    if with_answers:
        return fit_rows(rows, tokenizer, data.chat, data.max_prompt_tokens, data.overlong, skip_bad=skip_bad)
    render = partial(render_prompt, tokenizer, chat=data.chat, needs_tools=True)
    return fit_prompts(rows, render, data.max_prompt_tokens, data.overlong, skip_bad=skip_bad)


def fit_rows(
    rows: Iterable[Row], tokenizer: Any, chat: bool, max_tokens: int, overlong: str, *, skip_bad: bool = False
) -> tuple[list[PreparedPrompt], OverlongCounts]:
    """Rendered rows, each of at most `max_tokens`; `overlong` (`data.overlong`) says what happens to longer ones.
    `skip_bad`: those that cannot be rendered are left out."""
    found, num_filtered, num_truncated = [], 0, 0
    rendered, problems = try_each(rows, partial(render_answers, tokenizer, chat=chat), skip_bad)
    num_rows = len(rendered) + len(problems)
    for row, answers in rendered:
        longest = max(len(tokens) for tokens, _ in answers)
        if longest > max_tokens:
            if overlong == "error":
                raise UserError(
                    f"{row.where} has {longest} tokens, more than data.max_prompt_tokens: {max_tokens}. Raise the "
                    "limit, or set data.overlong to filter, truncate_left or truncate_right"
                )
            if overlong == "filter":
                num_filtered += 1
                continue
            num_truncated += 1
            # As much off the left of both answers of a pair, so that they still have their prompt in common.
            start = longest - max_tokens if overlong == "truncate_left" else 0
            answers = [(tokens[start:][:max_tokens], trained[start:][:max_tokens]) for tokens, trained in answers]
        for _, trained in answers:
            trained[:1] = False  # nothing predicts the first token
            if not trained.any():
                cut = f" within data.max_prompt_tokens: {max_tokens}" if longest > max_tokens else ""
                raise UserError(f"{row.where} has no token to train on{cut}: it needs an answer of the assistant")
        prepared = [PreparedPrompt(row, tokens, trained) for tokens, trained in answers]
        found.append(replace(prepared[0], rejected=prepared[1]) if row.rejected else prepared[0])
    if not found:
        raise UserError(f"no row is left: all {num_rows} have more tokens than data.max_prompt_tokens: {max_tokens}")
    return found, OverlongCounts(num_rows, num_filtered, num_truncated, problems)


def render_answers(tokenizer: Any, row: Row, *, chat: bool) -> list[tuple[list[int], BoolArray]]:
    """The row with its answer; of a pair, with each of the two."""
    rows = [row, replace(row, completion=row.rejected)] if row.rejected else [row]
    return [render_row(tokenizer, one, chat) for one in rows]


def trajectories_of(prepared: PreparedPrompt, sampled: SampledPrompt) -> list[Trajectory]:
    """The row as if it had been rolled out: one trajectory, or two of a pair, the chosen one first."""
    rejected = prepared.rejected
    if rejected is None:
        return [_trajectory_of(prepared, sampled)]
    chosen, other = (_trajectory_of(one, sampled) for one in (prepared, rejected))
    return [replace(chosen, is_chosen=True), replace(other, is_chosen=False, sample=1)]


def _trajectory_of(prepared: PreparedPrompt, sampled: SampledPrompt) -> Trajectory:
    """What is trained on counts as generated."""
    assert prepared.trained is not None, "a prompt to roll out has no answer"
    length = len(prepared.tokens)
    return Trajectory(
        tokens=np.array(prepared.tokens, np.int64),
        generated=prepared.trained,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1),
        turn_rewards=[],
        stop=StopReason.END_OF_TURN,
        prompt_id=sampled.prompt_id,
        sample=0,
        row=sampled.index,
    )


def render_row(tokenizer: Any, row: Row, chat: bool) -> tuple[list[int], BoolArray]:
    """The row's tokens, and which of them are trained on: of a conversation all turns of the assistant, else none that
    is in the prompt."""
    conversation = [*row.prompt, *row.completion]
    if any(message.get("images") for message in conversation):
        raise UserError(f"{row.where} has images, and answers of rows are trained on as text only")
    if not chat:
        return render_text(tokenizer, row)
    if not tokenizer.chat_template:
        raise UserError(
            "the model's tokenizer has no chat template: set `data.chat: false`, or give `model.chat_template`"
        )
    tools = row.tools

    def render(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] = tools, **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=True, **options)
        except Exception as error:  # templates raise their own, such as "system role not supported"
            raise UserError(f"{row.where}: the chat template refuses the row: {error_line(error)}") from error

    def render_all(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        return list(render(messages, tools, return_dict=False))

    if tools or any(message.get("tool_calls") for message in conversation):
        check_tools(conversation, tools, render_all, render_all(conversation, tools), row.where)
    template = tokenizer.get_chat_template(tools=tools or None)
    if GENERATION_BLOCK.search(template) and tokenizer.is_fast:
        rendered = render(conversation, return_dict=True, return_assistant_tokens_mask=True)
        tokens, trained = list(rendered["input_ids"]), np.array(rendered["assistant_masks"], np.bool_)
        if row.rejected or (not row.is_conversation and has_assistant(row.prompt)):
            prompt = list(render(row.prompt, return_dict=False))
            if tokens[: len(prompt)] != prompt:
                what = "the prompt changes in the model's chat template when an answer follows it"
                raise UserError(f"{row.where}: {what}; {FIX}")
            trained[: len(prompt)] = False
        return tokens, with_ends(tokenizer, tokens, trained)
    return render_turn_by_turn(
        tokenizer, conversation, render, row.where, 0 if row.is_conversation else len(row.prompt)
    )


def has_assistant(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def render_text(tokenizer: Any, row: Row) -> tuple[list[int], BoolArray]:
    """Prompt and completion as text, without a template; the completion ends with the tokenizer's end token."""
    if len(row.completion) > 1 or has_assistant(row.prompt):
        raise UserError(f"{row.where} is a conversation of several turns, which needs the chat template (`data.chat`)")
    if tokenizer.eos_token_id is None:
        raise UserError("the model's tokenizer has no end token, so a model could not learn where an answer ends")
    prompt = render_prompt(tokenizer, row, chat=False, needs_tools=True)
    text = "".join(message["content"] for message in row.completion)
    answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return [*prompt, *answer], np.arange(len(prompt) + len(answer)) >= len(prompt)


def with_ends(tokenizer: Any, tokens: Sequence[int], trained: BoolArray) -> BoolArray:
    """Adds the end token behind each marked span, where a template closes its block before it."""
    ends = np.flatnonzero(trained[:-1] & ~trained[1:]) + 1
    trained[[end for end in ends if tokens[int(end)] == tokenizer.eos_token_id]] = True
    return trained


def render_turn_by_turn(
    tokenizer: Any, conversation: Sequence[Message], render: Callable[..., Any], where: str, first: int
) -> tuple[list[int], BoolArray]:
    """For templates that mark nothing. A turn is what the tokens of the conversation up to it have more than those
    before it with the generation prompt, and both must be how the whole conversation begins: else the tokens trained on
    would not be those that the model sees when it generates. Messages before `first` are not trained on."""
    tokens = list(render(conversation, return_dict=False))
    trained = np.zeros(len(tokens), np.bool_)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for i, message in enumerate(conversation):
        if message["role"] != "assistant" or i < first:
            continue
        start = list(render(conversation[:i], add_generation_prompt=True, return_dict=False))
        end = tokens if i == len(conversation) - 1 else list(render(conversation[: i + 1], return_dict=False))
        if end[: len(start)] != start or tokens[: len(end)] != end:
            what = "does not begin with the generation prompt" if end[: len(start)] != start else "changes"
            when = "" if end[: len(start)] != start else " when messages follow it"
            raise UserError(
                f"{where}: message {i}, a turn of the assistant, {what}{when} in the model's chat template, so which "
                f"tokens the model would generate is not known; {FIX}"
            )
        stop = len(end)
        last = max((j for j in range(len(start), stop) if end[j] in special), default=None)
        if last is not None and not tokenizer.decode(end[last + 1 :]).strip():
            stop = last + 1  # what a template writes behind the end of a turn, a line break, nobody generates
        trained[len(start) : stop] = True
    return tokens, trained
