"""The model calls tools, as many turns as it likes, until it says something without a call: that is its answer."""

import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

from corral.data.rows import Message, Row
from corral.envs.base import StepResult
from corral.envs.tools.calls import Call, Style, parse_reply
from corral.envs.tools.toolbox import InvalidCall, ToolBox, ToolError, ToolSet
from corral.recipe.errors import UserError
from corral.rewards.pool import Rewards

ResultRole = Literal["tool", "user"]
ToldBy = Literal["template", "system"]
CLOSING = "\n</tool_response>"

HOW = {
    "hermes": (
        "For each call write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments as JSON>}\n</tool_call>'
    ),
    "openai": (
        "To call functions, reply with nothing but a JSON object:\n"
        '{"tool_calls": [{"name": <name>, "arguments": <arguments as JSON>}]}'
    ),
}


class ToolsEnv:
    bounds_itself = True
    """Every call of a tool has `tool_timeout_s`; the reward function has its own deadline."""

    def __init__(
        self,
        pool: Rewards,
        shared: ToolBox,
        tools: Sequence[str],
        style: Style = "hermes",
        result_role: ResultRole = "tool",
        told_by: ToldBy = "template",
        tool_timeout_s: float = 30.0,
        max_result_characters: int = 4000,
        max_calls_per_turn: int = 8,
        format_penalty: float = 0.0,
    ) -> None:
        """`told_by`: who tells the model of its tools, the chat template or, where that knows of none, a system
        message. `format_penalty` is taken off for every reply with a call that could not be made."""
        self.tools = shared.schemas if told_by == "template" else []
        self._schemas = shared.schemas
        self._pool, self._style, self._result_role, self._told_by = pool, style, result_role, told_by
        self._max_characters, self._max_calls, self._penalty = max_result_characters, max_calls_per_turn, format_penalty
        self._set = ToolSet(shared, tool_timeout_s)
        self._row: Row | None = None
        self._turns = self._calls = self._valid = self._errors = 0

    @classmethod
    def open_shared(
        cls,
        tools: Sequence[str],
        style: str = "hermes",
        result_role: str = "tool",
        told_by: str = "template",
    ) -> ToolBox:
        check_choice("style", style, get_args(Style))
        check_choice("result_role", result_role, get_args(ResultRole))
        check_choice("told_by", told_by, get_args(ToldBy))
        return ToolBox(tools)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        await self._set.open(row)
        return with_instructions(row.prompt, self._schemas, self._style) if self._told_by == "system" else row.prompt

    async def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        self._turns += 1
        parsed = parse_reply(reply, self._style)
        if not parsed.calls:
            score = await self._pool.score(reply, self._row)
            return StepResult([], score.reward, done=True, metrics=score.metrics, error=score.error)
        valid = self._valid
        results = [await self._answer(call, number) for number, call in enumerate(parsed.calls)]
        penalty = self._penalty if self._valid - valid < len(parsed.calls) else 0.0
        if self._result_role == "tool":
            return StepResult([Message(role="tool", content=result) for result in results], -penalty, done=False)
        content = "\n".join(f"<tool_response>\n{result}{CLOSING}" for result in results)
        return StepResult([Message(role="user", content=content)], -penalty, done=False, closing=CLOSING)

    async def close(self) -> None:
        self._row = None
        await self._set.close()

    def summary(self) -> dict[str, float]:
        numbers = {"turns": float(self._turns), "tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        return {**numbers, "valid_calls": self._valid / self._calls} if self._calls else numbers

    async def _answer(self, call: Call, number: int) -> str:
        """The tool's result, or what went wrong: the model is told either."""
        self._calls += 1
        try:
            if number >= self._max_calls:
                raise InvalidCall(f"not called: there may be {self._max_calls} calls in a turn")
            result = await self._set.call(call)
        except InvalidCall as error:
            return cut(f"Error: {error}", self._max_characters)
        except ToolError as error:
            self._errors += 1
            result = f"Error: {error}"
        self._valid += 1
        return cut(result, self._max_characters)


def with_instructions(prompt: list[Message], schemas: list[dict[str, Any]], style: Style) -> list[Message]:
    """The functions' schemas in the system message."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = f"You may call these functions:\n<tools>\n{listed}\n</tools>\n\n{HOW[style]}"
    if prompt and prompt[0]["role"] == "system":
        return [Message(role="system", content=f"{prompt[0]['content']}\n\n{text}"), *prompt[1:]]
    return [Message(role="system", content=text), *prompt]


def cut(text: str, limit: int) -> str:
    text = text.encode(errors="replace").decode()  # half a surrogate pair would be no text to a tokenizer
    return text if len(text) <= limit else f"{text[:limit]}\n... (the first {limit} of {len(text)} characters)"


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"environment.options.{option} must be {' or '.join(allowed)}, not {value!r}")
