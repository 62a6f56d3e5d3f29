"""Finding a reward function and calling it with the arguments that its signature names.

A reward function takes `response`, and any of `answer`, `prompt`, `extra` and `source` of the row, by name; its other
parameters come from the recipe's `reward.options`. One that takes `responses` in place of `response` compares the
samples of a prompt: it is called once for all of them, and returns a list with one result for each. Functions written
for verl (`solution_str`, `ground_truth`, `data_source`, `extra_info`) work as they are, and so do those for TRL, which
take `completions` and columns of the row, each as a list. It may be `async`. A result is a number, or a dict with
`score`, whose other numbers are metrics (what else is in it, such as the answer as text, is ignored). None in place of
the number says that the function does not apply: the sample is dropped.

Built-in ones are in `scorers.py` and `question_answering.py`, each declared by `@built_in` and nowhere else.
"""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from corral.data.plugins import blamed_on, did_you_mean, is_spec, load_object
from corral.data.rows import Message, Row
from corral.recipe.errors import UserError, install_command

MODULES = ("corral.rewards.scorers", "corral.rewards.question_answering", "corral.rewards.judge", "corral.rewards.code")
"""Where the built-in rewards are."""
ROW_PARAMETERS = ("response", "answer", "prompt", "extra", "source")
VERL_PARAMETERS = ("solution_str", "ground_truth", "extra_info", "data_source")
GROUP_PARAMETERS = ("responses", "completions")
"""Of functions that get all samples of a prompt: Corral's, and TRL's."""
TRAINER_PARAMETERS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's trainer gives to a function, and Corral does not."""

Function = TypeVar("Function", bound=Callable[..., Any])


def reward_on_error(on_error: float | Literal["drop"]) -> float | None:
    """The reward of a sample that failed."""
    return None if on_error == "drop" else on_error


@dataclass(frozen=True)
class Score:
    reward: float | None
    """None: the sample has no reward, and is dropped."""
    error: str | None = None
    """What went wrong; the reward is then the recipe's `on_error`."""
    metrics: dict[str, float] = field(default_factory=dict)
    by_name: dict[str, float | None] = field(default_factory=dict)
    """What each of several rewards gave, before its weight."""
    response: str | None = None
    """What a function that compares samples has yet to score, with the others of the group
    (`RewardScorer.score_group`)."""
    awaits_model: bool = False
    """Whether the reward is not known before the reward model scores the trajectory, when that is over
    (`add_model_scores`)."""


@dataclass(frozen=True)
class BuiltInReward:
    function: Callable[..., Any]
    needs: str | None
    extra: str
    check: Callable[..., None] | None


_BUILT_IN: dict[str, BuiltInReward] = {}


def built_in(
    needs: str | None = None, extra: str = "", check: Callable[..., None] | None = None
) -> Callable[[Function], Function]:
    """Declares a function as the reward of its name. `needs`: a module that is not always installed and is imported
    when the function is loaded; `extra`: the extra of Corral that installs it. `check`: called with the options when
    the function is loaded, raises what is wrong with them, or with this machine; without it the function is tried."""

    def declare(function: Function) -> Function:
        _BUILT_IN[function.__name__] = BuiltInReward(function, needs, extra, check)
        return function

    return declare


def built_in_rewards() -> Mapping[str, BuiltInReward]:
    """The declared functions by name, with what they need."""
    for module in MODULES:
        importlib.import_module(module)  # here, since they import this one
    return _BUILT_IN


def check_name(name: str) -> None:
    """UserError if there can be no such function; imports nothing."""
    if not is_spec(name) and name not in (known := built_in_rewards()):
        raise UserError(
            f"there is no reward `{name}`{did_you_mean(name, [*known, 'reward_model'])}; "
            f"there are {', '.join(sorted(known))}, reward_model, `module:function` and `file.py:function`"
        )


def load_function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward function of that name, made sure that it can be called with `options`. All failures are UserErrors."""
    check_name(name)
    if is_spec(name):
        function = load_object(name, "reward")
        _check_signature(function, name, options)
        return function  # type: ignore[no-any-return]
    declared = built_in_rewards()[name]
    if declared.needs is not None:
        try:
            importlib.import_module(declared.needs)
        except ImportError as error:
            package = declared.needs.replace("_", "-")
            raise UserError(f"the `{name}` reward needs {package}: {install_command(declared.extra)}") from error
    _check_signature(declared.function, name, options)
    _try_out(declared, name, options)
    return declared.function


def is_group_function(function: Callable[..., Any]) -> bool:
    """Whether the function scores all samples of a prompt together."""
    parameters = set(inspect.signature(function).parameters)
    return bool(parameters.intersection(GROUP_PARAMETERS)) and not parameters.intersection(("response", "solution_str"))


def call_reward(function: Callable[..., Any], response: str, row: Row, options: Mapping[str, Any]) -> Score:
    """Score one response. Raises what the function raises, or ValueError for a result that is no finite number."""
    [score] = call_with(function, response, row, options)
    return score


def call_with(
    function: Callable[..., Any], response: str | Sequence[str], row: Row, options: Mapping[str, Any]
) -> list[Score]:
    """`call_reward` for one response, or for all of a group."""
    answer = function(**{**arguments_for(function, response, row), **options})
    answer = asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
    with blamed_on(function):
        return read_results(answer, response)


async def call_with_async(
    function: Callable[..., Any], response: str | Sequence[str], row: Row, options: Mapping[str, Any]
) -> list[Score]:
    """`call_with` from an event loop."""
    answer = function(**{**arguments_for(function, response, row), **options})
    answer = await answer if inspect.isawaitable(answer) else answer
    with blamed_on(function):
        return read_results(answer, response)


def read_results(result: Any, response: str | Sequence[str]) -> list[Score]:
    """One score for each response."""
    if isinstance(response, str):
        return [read_result(result)]
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != len(response):
        raise ValueError(f"the function must return a list of {len(response)}, one for each response: {result!r:.100}")
    return [read_result(one) for one in result]


def read_result(result: Any) -> Score:
    """The score and metrics in what somebody's function returned. ValueError if the score is neither a finite number
    nor None."""
    if not isinstance(result, Mapping):
        return Score(None if result is None else _finite(result, "the reward"))
    if "score" not in result:
        raise ValueError(f"the function returned a dict without `score`: {', '.join(map(str, result))}")
    metrics = {str(key): _finite(value, f"`{key}`") for key, value in result.items() if is_number(value)}
    metrics.pop("score", None)
    score = result["score"]
    return Score(None if score is None else _finite(score, "`score`"), metrics=metrics)


def arguments_for(function: Callable[..., Any], response: str | Sequence[str], row: Row) -> dict[str, Any]:
    """Values for those of the function's parameters that name something of the row."""
    parameters = inspect.signature(function).parameters
    if is_for_trl(parameters):
        lists = trl_arguments([response] if isinstance(response, str) else response, row)
        return lists if _takes_anything(parameters) else {key: lists[key] for key in parameters if key in lists}
    values = {
        "response" if isinstance(response, str) else "responses": response,
        "answer": row.answer,
        "prompt": row.prompt,
        "extra": row.extra,
        "source": row.source,
        "solution_str": response,
        "ground_truth": row.answer,
        "extra_info": row.extra.get("extra_info"),
        "data_source": row.source,
    }
    names = set(parameters)
    if _takes_anything(parameters) and not names.intersection(VERL_PARAMETERS):
        names.update(ROW_PARAMETERS)
    return {name: value for name, value in values.items() if name in names}


def is_for_trl(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return "completions" in parameters and not {"response", "responses", "solution_str"}.intersection(parameters)


def trl_arguments(responses: Sequence[str], row: Row) -> dict[str, list[Any]]:
    """Lists with a value for each response: texts where the row's prompt is one, else messages, and the columns."""
    completions: list[Any] = list(responses)
    if row.text is None:
        completions = [[Message(role="assistant", content=one)] for one in responses]
    values = {
        "data_source": row.source,
        "answer": row.answer,
        **row.extra,
        "prompts": row.prompt if row.text is None else row.text,
    }
    return {**{key: [value] * len(responses) for key, value in values.items()}, "completions": completions}


def _check_signature(function: Any, name: str, options: Mapping[str, Any]) -> None:
    if not callable(function):
        raise UserError(f"reward `{name}` is not a function")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        raise UserError(
            f"reward `{name}` does not say which parameters it takes; wrap it in a Python function"
        ) from None
    if not takes_responses(function):
        raise UserError(
            f"reward `{name}` must take a parameter named `response`; it takes ({', '.join(parameters)}). (One named "
            "`responses` gets all samples of a prompt, to compare them; one named `completions` is TRL's)"
        )
    if is_trl := is_for_trl(parameters):
        known = {*parameters} - {*TRAINER_PARAMETERS} | {*options}  # columns, of which the rows decide
    else:
        known = {*ROW_PARAMETERS, *VERL_PARAMETERS, *(["responses"] if is_group_function(function) else []), *options}
    for parameter in parameters.values():
        given = parameter.name in known
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"reward `{name}`: its parameter `{parameter.name}` can't be given by name")
        if not given and not variable and parameter.default is parameter.empty and is_trl:
            raise UserError(f"reward `{name}` needs `{parameter.name}` of TRL's trainer, which is not there in Corral")
        if not given and not variable and parameter.default is parameter.empty:
            raise UserError(f"reward `{name}` needs `{parameter.name}`; give it in reward.options")
    for option in options:
        if option not in parameters and not _takes_anything(parameters):
            raise UserError(f"reward `{name}` has no option `{option}`{did_you_mean(option, parameters)}")


def takes_responses(function: Callable[..., Any]) -> bool:
    """Whether a reward function takes what it is to score."""
    parameters = inspect.signature(function).parameters
    named = {"response", "solution_str", *GROUP_PARAMETERS}.intersection(parameters)
    return bool(named) or _takes_anything(parameters)


def _try_out(declared: BuiltInReward, name: str, options: Mapping[str, Any]) -> None:
    """A built-in function says what is wrong with its options (a bad pattern, say) when it is called: do that now."""
    try:
        if declared.check is not None:
            declared.check(**options)
        elif "answer" in inspect.signature(declared.function).parameters:
            call_reward(declared.function, "", Row(prompt=[], answer="0", source="arithmetic/", extra={}), options)
    except Exception as error:
        raise UserError(f"reward `{name}`: bad options: {error}") from error


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def is_number(value: Any) -> bool:
    """Whatever becomes a float without being parsed: ints, bools, numpy's and torch's scalars; not text."""
    return hasattr(value, "__float__")


def finite_numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers."""
    numbers = {str(name): float(value) for name, value in values.items() if is_number(value)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _finite(value: Any, what: str) -> float:
    if not is_number(value):
        raise ValueError(f"{what} must be a number; the function returned {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite; the function returned {number}")
    return number
