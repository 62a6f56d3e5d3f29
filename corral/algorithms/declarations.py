"""How a part of an algorithm is declared: once, beside its function.

A declaration has a part's name, its options (a frozen dataclass: defaults are the paper's numbers, limits are
`annotated_types`, the text under each field is its documentation), what the part needs, and one sentence about it. The
recipe's schema and rules, the plan and the reference pages are derived from it.

A user's own loss or advantage is declared with the same decorators, without a name: a recipe names it
`file.py:function`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Divisor = Literal["tokens", "sequences"]


@dataclass(frozen=True)
class NoOptions:
    """For parts that have no options."""


@dataclass(frozen=True)
class Needs:
    """What an advantage estimator has to be given, and what it sees: nothing else is handed to it."""

    groups: bool = False
    """Several samples of each prompt, which are compared with each other."""
    critic: bool = False
    """A critic's value for every token (`batch.values`)."""
    greedy_baseline: bool = False
    """The reward of a greedy answer to each prompt (`batch.baselines`)."""
    teacher: bool = False
    """By how much a teacher's log-prob of every token is above the policy's (`batch.teacher_lead`). The teacher is the
    model of `reference.path`."""
    turns: bool = False
    """Where each turn ends and in which state it was taken (`batch.turns`)."""
    whole_batch: bool = True
    """All samples of the step at once, for statistics over them. False: the advantages of a prompt's samples follow
    from these samples alone, so that training can begin while others are still generated (`schedule.pipelined`)."""


@dataclass(frozen=True)
class Declaration:
    kind: str
    """`loss`, `advantage`, `aggregation`, `correction`, `shaping`, `KL estimator` or `KL controller`."""
    name: str
    """The name in a recipe: of a user's function, `file.py:function` or `module:function`."""
    summary: str
    """One sentence for plans and reference pages."""
    function: Callable[..., Any]
    options: type[Any] = NoOptions

    def __post_init__(self) -> None:
        if not is_dataclass(self.options):
            raise TypeError(f"options must be a dataclass, and {self.options!r} is not")

    @property
    def option_names(self) -> list[str]:
        return [field.name for field in fields(self.options)]


@dataclass(frozen=True)
class LossDeclaration(Declaration):
    aggregation: str | None = None
    """The only aggregation with which the loss is what its paper says. None: any."""
    uses_old_policy: bool = True
    """Whether the loss compares with the policy that sampled, and so stays near it when a step has several updates."""
    skips_zero_advantage: bool = False
    """Whether tokens with an advantage of zero have no gradient, so that trajectories of such tokens need not be
    computed."""
    trains_on_rows: bool = False
    """Whether the loss is of the answers that the rows of the data have: nothing is rolled out, and there are neither
    rewards nor old log-probs."""
    trains_on_pairs: bool = False
    """Whether these are two answers to each prompt, of which one was preferred (`terms.is_chosen`). The two are always
    in one micro-batch."""
    needs_reference: bool = False
    """Whether the loss compares with the log-probs of the reference model (`terms.reference_logprobs`)."""


@dataclass(frozen=True)
class AdvantageDeclaration(Declaration):
    needs: Needs = Needs()
    whitened: bool = False
    """Whether the formula itself whitens over the batch."""


@dataclass(frozen=True)
class AggregationDeclaration(Declaration):
    divided_by: Divisor | None = None
    """The count of the whole update by which the sum is divided."""


AnyDeclaration = TypeVar("AnyDeclaration", bound=Declaration)


@dataclass(frozen=True)
class AlgorithmPart(Generic[AnyDeclaration]):
    """A declared part with its options decided."""

    declaration: AnyDeclaration
    options: Any

    @property
    def name(self) -> str:
        return self.declaration.name

    def describe(self) -> str:
        """`ppo: clipped ratio ...; clip_low 0.2, clip_high 0.28`. Options that are None are off, and left out."""
        values = {name: getattr(self.options, name) for name in self.declaration.option_names}
        text = f"{self.name}: {self.declaration.summary}" if self.declaration.summary else self.name
        set_options = [f"{name} {format_option(value)}" for name, value in values.items() if value is not None]
        return f"{text}; {', '.join(set_options)}" if set_options else text


def with_options(declaration: AnyDeclaration, **values: Any) -> AlgorithmPart[AnyDeclaration]:
    return AlgorithmPart(declaration, declaration.options(**values))


def format_option(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_from(recipe_key: str) -> Any:
    """The default of an option that is None, and then has the value of another key of the recipe."""
    return field(default=None, metadata={"recipe_key": recipe_key})


# --- what has been declared, by name; and by function, for those that have a name only where they are used

ADVANTAGES: dict[str, AdvantageDeclaration] = {}
LOSSES: dict[str, LossDeclaration] = {}
AGGREGATIONS: dict[str, AggregationDeclaration] = {}
CORRECTIONS: dict[str, Declaration] = {}
SHAPINGS: dict[str, Declaration] = {}
KL_ESTIMATORS: dict[str, Declaration] = {}
KL_CONTROLLERS: dict[str, Declaration] = {}
DECLARED: dict[Callable[..., Any], Declaration] = {}


def advantage(
    name: str = "",
    summary: str = "",
    *,
    options: type[Any] = NoOptions,
    needs: Needs = Needs(),
    whitened: bool = False,
) -> Callable[[Function], Function]:
    """Declares a function of a `RewardedBatch` and its options that returns `Advantages`, or a tensor of them, one
    for each token or for each trajectory."""
    return _declaring(
        ADVANTAGES,
        lambda function: AdvantageDeclaration("advantage", name, summary, function, options, needs, whitened),
    )


def policy_loss(
    name: str = "",
    summary: str = "",
    *,
    options: type[Any] = NoOptions,
    aggregation: str | None = None,
    uses_old_policy: bool = True,
    skips_zero_advantage: bool = False,
    trains_on_rows: bool = False,
    trains_on_pairs: bool = False,
    needs_reference: bool = False,
) -> Callable[[Function], Function]:
    """Declares a function of `PolicyTerms` and its options that returns a loss for each token: a tensor, or a
    `TokenLoss` with numbers to report."""
    facts = aggregation, uses_old_policy, skips_zero_advantage, trains_on_rows, trains_on_pairs, needs_reference
    return _declaring(LOSSES, lambda function: LossDeclaration("loss", name, summary, function, options, *facts))


def aggregation(
    name: str, summary: str, *, divided_by: Divisor | None, options: type[Any] = NoOptions
) -> Callable[[Function], Function]:
    return _declaring(
        AGGREGATIONS,
        lambda function: AggregationDeclaration("aggregation", name, summary, function, options, divided_by),
    )


def correction(name: str, summary: str, *, options: type[Any] = NoOptions) -> Callable[[Function], Function]:
    return _declaring(CORRECTIONS, lambda function: Declaration("correction", name, summary, function, options))


def reward_shaping(name: str, summary: str, *, options: type[Any] = NoOptions) -> Callable[[Function], Function]:
    """Declares a function of `ShapedResponses` and its options that returns what is added to each one's reward."""
    return _declaring(SHAPINGS, lambda function: Declaration("shaping", name, summary, function, options))


def kl_estimator(name: str, summary: str) -> Callable[[Function], Function]:
    return _declaring(KL_ESTIMATORS, lambda function: Declaration("KL estimator", name, summary, function))


def kl_controller(name: str, summary: str, *, options: type[Any] = NoOptions) -> Callable[[Function], Function]:
    """Declares a class that is made of a coefficient and its options."""
    return _declaring(KL_CONTROLLERS, lambda function: Declaration("KL controller", name, summary, function, options))


def _declaring(
    table: dict[str, AnyDeclaration], declare: Callable[[Callable[..., Any]], AnyDeclaration]
) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        declaration = DECLARED[function] = declare(function)
        if declaration.name:
            assert declaration.name not in table, f"{declaration.name} is declared twice"
            table[declaration.name] = declaration
        return function

    return decorate
