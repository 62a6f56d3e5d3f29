"""Finding a reward function and calling it with what it asks for.

A reward function takes `response`, and any of `answer`, `prompt`, `extra` and `source` of the row, by name; its other
parameters come from the recipe's `reward.options`. Functions written for verl (`solution_str`, `ground_truth`,
`data_source`, `extra_info`) work as they are. It may be `async`. It returns a number, or a dict with `score`, whose
other numbers are metrics (what else is in it, such as the answer as text, is ignored).
"""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corral.data.plugins import did_you_mean, is_spec, load_object
from corral.data.rows import Row
from corral.recipe.errors import UserError

BUILT_IN = {
    "exact": "corral.rewards.functions",
    "regex": "corral.rewards.functions",
    "number": "corral.rewards.functions",
    "gsm8k": "corral.rewards.functions",
    "em": "corral.rewards.question_answering",
    "sub_em": "corral.rewards.question_answering",
    "f1": "corral.rewards.question_answering",
    "search_r1": "corral.rewards.question_answering",
    "math": "corral.rewards.symbolic",
    "reasoning_gym": "corral.rewards.procedural",
    "by_source": "corral.rewards.by_source",
}
OFFERED = ("response", "answer", "prompt", "extra", "source")
VERL_NAMES = ("solution_str", "ground_truth", "extra_info", "data_source")


@dataclass(frozen=True)
class Result:
    score: float
    metrics: dict[str, float]


def check_name(name: str) -> None:
    """UserError if there can be no such function; imports nothing."""
    if name not in BUILT_IN and not is_spec(name):
        known = ", ".join(BUILT_IN)
        raise UserError(
            f"there is no reward `{name}`{did_you_mean(name, BUILT_IN)}; "
            f"there are {known}, `module:function` and `file.py:function`"
        )


def load_function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward function of that name, made sure that it can be called with `options`. All failures are UserErrors."""
    check_name(name)
    if is_spec(name):
        function = load_object(name, "reward")
        _check_signature(function, name, options)
    else:
        function = getattr(importlib.import_module(BUILT_IN[name]), name)
        _check_signature(function, name, options)
        _try_out(function, name, options)
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], response: str, row: Row, options: Mapping[str, Any]) -> Result:
    """Score one response. Raises what the function raises, or ValueError for a result that is no finite number."""
    answer = function(**{**offered(function, response, row), **options})
    return read_result(asyncio.run(_wait_for(answer)) if inspect.isawaitable(answer) else answer)


async def call_here(function: Callable[..., Any], response: str, row: Row, options: Mapping[str, Any]) -> Result:
    """The same, from an event loop."""
    answer = function(**{**offered(function, response, row), **options})
    return read_result(await answer if inspect.isawaitable(answer) else answer)


def read_result(result: Any) -> Result:
    """What somebody's function says a sample is worth. ValueError if that is no finite number."""
    if not isinstance(result, Mapping):
        return Result(_finite(result, "the reward"), {})
    if "score" not in result:
        raise ValueError(f"the function returned a dict without `score`: {', '.join(map(str, result))}")
    metrics = {str(key): _finite(value, f"`{key}`") for key, value in result.items() if is_number(value)}
    return Result(_finite(result["score"], "`score`"), {key: value for key, value in metrics.items() if key != "score"})


def offered(function: Callable[..., Any], response: str, row: Row) -> dict[str, Any]:
    """What the function asks for, by the names of its parameters."""
    values = {
        "response": response,
        "answer": row.answer,
        "prompt": row.prompt,
        "extra": row.extra,
        "source": row.source,
        "solution_str": response,
        "ground_truth": row.answer,
        "extra_info": row.extra.get("extra_info"),
        "data_source": row.source,
    }
    parameters = inspect.signature(function).parameters
    asked = set(parameters)
    if _takes_anything(parameters) and not asked.intersection(VERL_NAMES):
        asked.update(OFFERED)
    return {name: value for name, value in values.items() if name in asked}


def _check_signature(function: Any, name: str, options: Mapping[str, Any]) -> None:
    if not callable(function):
        raise UserError(f"reward `{name}` is not a function")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        raise UserError(
            f"reward `{name}` does not say which parameters it takes; wrap it in a Python function"
        ) from None
    if not {"response", "solution_str"}.intersection(parameters) and not _takes_anything(parameters):
        raise UserError(f"reward `{name}` must take a parameter named `response`; it takes ({', '.join(parameters)})")
    for parameter in parameters.values():
        given = parameter.name in options or parameter.name in OFFERED or parameter.name in VERL_NAMES
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"reward `{name}`: its parameter `{parameter.name}` can't be given by name")
        if not given and not variable and parameter.default is parameter.empty:
            raise UserError(f"reward `{name}` needs `{parameter.name}`; give it in reward.options")
    for option in options:
        if option not in parameters and not _takes_anything(parameters):
            raise UserError(f"reward `{name}` has no option `{option}`{did_you_mean(option, parameters)}")


def _try_out(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """A built-in function says what is wrong with its options (a bad pattern, say) when it is called: do that now."""
    if "answer" in inspect.signature(function).parameters:
        try:
            call(function, "", Row(prompt=[], answer="0", source="arithmetic/", extra={}), options)
        except Exception as error:
            raise UserError(f"reward `{name}`: bad options: {error}") from error


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def is_number(value: Any) -> bool:
    """Whatever becomes a float without being parsed: ints, bools, numpy's and torch's scalars; not text."""
    return hasattr(value, "__float__")


def _finite(value: Any, what: str) -> float:
    if not is_number(value):
        raise ValueError(f"{what} must be a number; the function returned {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite; the function returned {number}")
    return number
