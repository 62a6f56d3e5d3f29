"""Finding a reward function and calling it with the arguments that its signature names.

A reward function takes `response`, and any of `answer`, `prompt`, `extra` and `source` of the row, by name; its other
parameters come from the recipe's `reward.options`. Functions written for verl (`solution_str`, `ground_truth`,
`data_source`, `extra_info`) work as they are. It may be `async`. It returns a number, or a dict with `score`, whose
other numbers are metrics (what else is in it, such as the answer as text, is ignored).

Built-in ones are in `scorers.py` and `question_answering.py`, each declared by `@built_in` and nowhere else.
"""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from corral.data.plugins import did_you_mean, is_spec, load_object
from corral.data.rows import Row
from corral.recipe.errors import UserError

MODULES = ("corral.rewards.scorers", "corral.rewards.question_answering")
"""Where the built-in rewards are."""
ROW_PARAMETERS = ("response", "answer", "prompt", "extra", "source")
VERL_PARAMETERS = ("solution_str", "ground_truth", "extra_info", "data_source")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Score:
    reward: float
    error: str | None = None
    """What went wrong; the reward is then the recipe's `on_error`."""
    metrics: dict[str, float] = field(default_factory=dict)


_BUILT_IN: dict[str, tuple[Callable[..., Any], str | None, str]] = {}


def built_in(needs: str | None = None, extra: str = "") -> Callable[[Function], Function]:
    """Declares a function as the reward of its name. `needs`: a module that is not always installed and is imported
    when the function is loaded; `extra`: the extra of Corral that installs it."""

    def declare(function: Function) -> Function:
        _BUILT_IN[function.__name__] = (function, needs, extra)
        return function

    return declare


def built_in_rewards() -> Mapping[str, tuple[Callable[..., Any], str | None, str]]:
    """The declared functions by name, with what they need."""
    for module in MODULES:
        importlib.import_module(module)  # here, since they import this one
    return _BUILT_IN


def check_name(name: str) -> None:
    """UserError if there can be no such function; imports nothing."""
    if not is_spec(name) and name not in (known := built_in_rewards()):
        raise UserError(
            f"there is no reward `{name}`{did_you_mean(name, known)}; "
            f"there are {', '.join(sorted(known))}, `module:function` and `file.py:function`"
        )


def load_function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward function of that name, made sure that it can be called with `options`. All failures are UserErrors."""
    check_name(name)
    if is_spec(name):
        function = load_object(name, "reward")
        _check_signature(function, name, options)
        return function  # type: ignore[no-any-return]
    function, needs, extra = built_in_rewards()[name]
    if needs is not None:
        try:
            importlib.import_module(needs)
        except ImportError as error:
            package = needs.replace("_", "-")
            raise UserError(f"the `{name}` reward needs {package}: pip install 'corral[{extra}]'") from error
    _check_signature(function, name, options)
    _try_out(function, name, options)
    return function


def call_reward(function: Callable[..., Any], response: str, row: Row, options: Mapping[str, Any]) -> Score:
    """Score one response. Raises what the function raises, or ValueError for a result that is no finite number."""
    answer = function(**{**arguments_for(function, response, row), **options})
    return read_result(asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer)


async def call_reward_async(function: Callable[..., Any], response: str, row: Row, options: Mapping[str, Any]) -> Score:
    """`call_reward` from an event loop."""
    answer = function(**{**arguments_for(function, response, row), **options})
    return read_result(await answer if inspect.isawaitable(answer) else answer)


def read_result(result: Any) -> Score:
    """The score and metrics in what somebody's function returned. ValueError if the score is no finite number."""
    if not isinstance(result, Mapping):
        return Score(_finite(result, "the reward"))
    if "score" not in result:
        raise ValueError(f"the function returned a dict without `score`: {', '.join(map(str, result))}")
    metrics = {str(key): _finite(value, f"`{key}`") for key, value in result.items() if is_number(value)}
    metrics.pop("score", None)
    return Score(_finite(result["score"], "`score`"), metrics=metrics)


def arguments_for(function: Callable[..., Any], response: str, row: Row) -> dict[str, Any]:
    """Values for those of the function's parameters that name something of the row."""
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
    names = set(parameters)
    if _takes_anything(parameters) and not names.intersection(VERL_PARAMETERS):
        names.update(ROW_PARAMETERS)
    return {name: value for name, value in values.items() if name in names}


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
        given = parameter.name in options or parameter.name in ROW_PARAMETERS or parameter.name in VERL_PARAMETERS
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
            call_reward(function, "", Row(prompt=[], answer="0", source="arithmetic/", extra={}), options)
        except Exception as error:
            raise UserError(f"reward `{name}`: bad options: {error}") from error


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


async def _awaited(awaitable: Any) -> Any:
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
