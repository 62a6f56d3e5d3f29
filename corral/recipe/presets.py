"""The algorithm of a recipe with every value decided: the user's, else the preset's, else the part's own.

`loss: sapo` and `loss: {name: sapo, tau_positive: 2}` choose a part; `loss: {clip_high: 0.3}` means the preset's. A
loss or an advantage may be a user's own: `my_losses.py:my_loss`, or `module:function`. Options are checked against the
declaration of their part, whoever declared it.
"""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from corral.algorithms.declarations import (
    DECLARED,
    AdvantageDeclaration,
    AggregationDeclaration,
    AlgorithmPart,
    Declaration,
    LossDeclaration,
    NoOptions,
)
from corral.recipe.document import show
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.keys import KeyPath, describe, did_you_mean, dotted, nearest
from corral.recipe.parts import KINDS, PRESETS, KLPlace, PartKind
from corral.recipe.schema import Recipe

Value = TypeVar("Value")
AnyPart = AlgorithmPart[Declaration]
Problem = tuple[KeyPath, str]
"""The key, and what is wrong with it."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class ResolvedKL:
    where: KLPlace
    estimator: AnyPart
    coefficient: float
    """With an adaptive controller, the first one."""
    controller: AnyPart


@dataclass(frozen=True)
class ResolvedAlgorithm:
    """Every value of the algorithm."""

    advantage: AlgorithmPart[AdvantageDeclaration]
    loss: AlgorithmPart[LossDeclaration]
    aggregation: AlgorithmPart[AggregationDeclaration]
    correction: AnyPart
    kl: ResolvedKL | None
    max_mean_ratio: float | None
    reward_clip: float | None
    whiten: bool
    whiten_by: Literal["batch", "rewards"]
    advantage_clip: float | None
    lone_sample: Literal["zero", "raw"]
    mask_truncated: bool
    mask_mean_reward: tuple[float, float] | None
    entropy_coefficient: float
    llds_coefficient: float
    engine_difference: str | None = dataclasses.field(compare=False)
    """Why the log-probs that tokens are sampled with are not the trainers'; None where they are, rounding apart."""
    old_logprobs: Literal["engine", "recompute"]
    dynamic_sampling: bool
    max_rounds: int
    shaping: AnyPart

    @property
    def needs_critic(self) -> bool:
        return self.advantage.declaration.needs.critic

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None or self.needs_teacher or self.loss.declaration.needs_reference

    @property
    def needs_teacher(self) -> bool:
        return self.advantage.declaration.needs.teacher

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage.declaration.needs.greedy_baseline

    @property
    def kl_where(self) -> KLPlace | None:
        return None if self.kl is None else self.kl.where

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a trajectory whose advantages are all zero moves no weights, through no term of the loss."""
        others = self.kl_where == "loss" or self.entropy_coefficient or self.llds_coefficient
        return self.loss.declaration.skips_zero_advantage and not others

    def as_dict(self) -> dict[str, Any]:
        """For programs: numbers and names."""
        return {field.name: plain_value(getattr(self, field.name)) for field in dataclasses.fields(self)}


def plain_value(value: Any) -> Any:
    if isinstance(value, AlgorithmPart):
        return {"name": value.name, **dataclasses.asdict(value.options)}
    if isinstance(value, ResolvedKL):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def resolve_algorithm(recipe: Recipe) -> ResolvedAlgorithm:
    """Raises a RecipeError where a part does not exist or an option does not belong to its part."""
    written, preset = recipe.algorithm, PRESETS[recipe.algorithm.name]
    parallel = {} if written.old_logprobs else recipe.train.parallel.model_dump()
    difference = None  # nothing that an engine sampled is trained on where rows are
    if not recipe.trains_on_rows:
        difference = engine_difference(recipe.schedule.max_staleness, parallel, recipe.rollout.engine.name)
    chosen, problems = choose_parts(written.model_dump(exclude_unset=True), difference is not None)
    if problems:
        raise RecipeError(message for _, message in problems)
    parts = {path[-1]: with_recipe_defaults(part, recipe) for path, part in chosen.items()}
    loss = cast(AlgorithmPart[LossDeclaration], parts["loss"])
    aggregation = parts["aggregation"]
    if loss.declaration.aggregation is not None:
        try:
            declaration = find_declaration(("algorithm", "aggregation"), loss.declaration.aggregation)
        except UserError as error:
            raise RecipeError(f"the loss {loss.name} is declared with {error}") from None
        aggregation = with_recipe_defaults(AlgorithmPart(declaration, declaration.options()), recipe)
    kl_where = written.kl.where if "where" in written.kl.model_fields_set else preset.kl_where
    coefficient = either(written.kl.coefficient, 0.001)
    return ResolvedAlgorithm(
        advantage=cast(AlgorithmPart[AdvantageDeclaration], parts["advantage"]),
        loss=loss,
        aggregation=cast(AlgorithmPart[AggregationDeclaration], aggregation),
        correction=parts["correction"],
        kl=None if kl_where is None else ResolvedKL(kl_where, parts["estimator"], coefficient, parts["controller"]),
        max_mean_ratio=written.max_mean_ratio,
        reward_clip=written.reward_clip,
        whiten=written.whiten,
        whiten_by=written.whiten_by,
        advantage_clip=written.advantage_clip,
        lone_sample=written.lone_sample,
        mask_truncated=written.mask_truncated,
        mask_mean_reward=written.mask_mean_reward,
        entropy_coefficient=written.entropy_coefficient,
        llds_coefficient=written.llds_coefficient,
        engine_difference=difference,
        old_logprobs=either(written.old_logprobs, "engine" if difference is None else "recompute"),
        dynamic_sampling=either(written.dynamic_sampling.enabled, preset.dynamic_sampling),
        max_rounds=either(written.dynamic_sampling.max_rounds, 10),
        shaping=parts["shaping"],
    )


def engine_difference(max_staleness: Any, parallel: Mapping[str, Any], engine: Any) -> str | None:
    """Why the log-probs that tokens are sampled with are not those that the trainers compute; None where they are."""
    if engine not in (None, "native"):
        return f"{engine} computes with other kernels than the trainers"
    if max_staleness:
        return "older weights may have sampled the tokens"
    cut = next((key for key in ("tensor", "context", "expert") if parallel.get(key) not in (None, 1)), None)
    return None if cut is None else f"the trainers compute with `train.parallel.{cut}`, the engines without"


def either(written: Value | None, otherwise: Value) -> Value:
    return otherwise if written is None else written


def with_recipe_defaults(part: AnyPart, recipe: Recipe) -> AnyPart:
    """Options that are None and are declared with `default_from` have the value of the key that this names."""
    values: dict[str, Any] = {}
    for option in dataclasses.fields(part.options):
        if "recipe_key" in option.metadata and getattr(part.options, option.name) is None:
            found: Any = recipe
            for key in option.metadata["recipe_key"].split("."):
                found = getattr(found, key)
            values[option.name] = float(found)
    return AlgorithmPart(part.declaration, dataclasses.replace(part.options, **values))


# --- which parts, and with which options


def default_parts(algorithm: Mapping[str, Any], engine_differs: bool) -> dict[KeyPath, tuple[str, Mapping[str, Any]]]:
    """The name of each part, and options that differ from its own defaults, where the recipe names none."""
    preset = PRESETS.get(str(algorithm.get("name")), PRESETS["grpo"])
    written = algorithm.get("kl")
    kl_where = written.get("where", preset.kl_where) if isinstance(written, dict) else preset.kl_where
    return {
        ("algorithm", "advantage"): (preset.advantage, {}),
        ("algorithm", "loss"): (preset.loss, preset.loss_options),
        ("algorithm", "aggregation"): (preset.aggregation, {}),
        ("algorithm", "correction"): ("token_tis" if engine_differs else "none", {}),
        ("algorithm", "shaping"): ("none", {}),
        ("algorithm", "kl", "estimator"): ("k1" if kl_where == "reward" else "k3", {}),
        ("algorithm", "kl", "controller"): ("fixed", {}),
    }


def choose_parts(
    algorithm: Mapping[str, Any], engine_differs: bool
) -> tuple[dict[KeyPath, AlgorithmPart[Declaration]], list[Problem]]:
    """The parts that `algorithm`, a section as it was written, stands for, as far as they can be read; and what is
    wrong with the others."""
    chosen: dict[KeyPath, AlgorithmPart[Declaration]] = {}
    problems: list[Problem] = []
    for path, (default, preset_options) in default_parts(algorithm, engine_differs).items():
        written: Any = {"algorithm": algorithm}
        for key in path:
            written = written.get(key) if isinstance(written, Mapping) else None
        given = dict(written) if isinstance(written, Mapping) else {}
        name = given.pop("name", None) or default
        if not isinstance(name, str):
            continue  # which the schema reports
        options = {**preset_options, **given} if name == default else given
        try:
            declaration = find_declaration(path, name)
        except UserError as error:
            problems.append(((*path, "name"), str(error)))
            continue
        found, wrong = read_options(path, declaration, options)
        problems += wrong
        if not wrong:
            chosen[path] = AlgorithmPart(declaration, found)
    return chosen, problems


def find_declaration(path: KeyPath, name: str) -> Declaration:
    """Raises a UserError that says which names there are."""
    kind, key = KINDS[path], dotted(path)
    if name in kind.declared:
        return kind.declared[name]
    if ":" in name and kind.of_a_user is not None:
        return user_declaration(kind, key, name)
    known = f"`{key}: {name}` is not one of {', '.join(kind.declared)}"
    own = "; your own is `file.py:function` or `module:function`" if kind.of_a_user is not None else ""
    raise UserError(f"{known}{did_you_mean(nearest(name, kind.declared)) or own}")


def user_declaration(kind: PartKind, key: str, name: str) -> Declaration:
    from corral.data.plugins import load_object  # corral.data is a layer above corral.recipe, so this import is local

    function = load_object(name, key)
    assert kind.of_a_user is not None
    declared = DECLARED.get(function) if inspect.isfunction(function) else None
    if declared is not None and declared.kind != kind.noun:
        raise UserError(
            f"{key}: `{name}` is declared as {with_article(declared.kind)}, not as {with_article(kind.noun)}"
        )
    if declared is not None:
        return dataclasses.replace(declared, name=name)
    if not callable(function):
        raise UserError(f"{key}: `{name}` is not a function")
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        raise UserError(f"{key}: `{name}` needs one argument, or to be declared with @corral.{kind.noun}") from None
    summary = "a function that declares neither options nor needs"
    return kind.of_a_user(kind.noun, name, summary, lambda argument, options: function(argument), NoOptions)


def read_options(path: KeyPath, declaration: Declaration, given: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The options as their dataclass has them, or what is wrong with them."""
    hints = get_type_hints(declaration.options, include_extras=True)
    problems, values = [], {}
    for option, value in given.items():
        if option not in declaration.option_names:
            problems.append(((*path, option), describe_unknown_option(path, declaration, option)))
            continue
        if value is None and type(None) not in getattr(hints[option], "__args__", ()):
            continue  # as if it were not written
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[option], config=STRICT)
            values[option] = adapter.validate_json(json.dumps(value))
        except (ValidationError, ValueError):
            expected = describe(hints[option])
            problems.append(((*path, option), f"`{dotted((*path, option))}: {show(value)}` should be {expected}"))
    for field in dataclasses.fields(declaration.options):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and field.name not in given:
            why = f"the {declaration.kind} {declaration.name} has no default for it"
            problems.append((path, f"`{dotted((*path, field.name))}` is missing: {why}"))
    if problems:
        return None, problems
    try:
        return declaration.options(**values), []
    except (ValueError, TypeError) as error:
        return None, [(path, f"`{dotted(path)}`: {error}")]


def describe_unknown_option(path: KeyPath, declaration: Declaration, option: str) -> str:
    names = declaration.option_names
    has = f"whose options are {', '.join(names)}" if names else "which has no options"
    message = f"`{dotted((*path, option))}` is not an option of the {declaration.kind} {declaration.name}, {has}"
    owners = [name for name, other in KINDS[path].declared.items() if option in other.option_names]
    if owners:
        return f"{message}; it is an option of {', '.join(owners)}"
    return message + did_you_mean(nearest(option, names))


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
