"""The Python API: what the command line does, with Python objects where a recipe has names.

`import corral` exports these functions. They add nothing to what a run does: objects become names that the recipe
machinery finds again (`data/plugins.py`), and everything behind is the code that `corral train` runs.
"""

import asyncio
import ctypes
import io
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from corral.data.plugins import did_you_mean, is_importable, name_object
from corral.model.families import checked_plan
from corral.observe.console import Console
from corral.observe.notebook import notebook_display, run_html
from corral.observe.run_folder import latest_recipe
from corral.recipe.document import OVERRIDE, Document, Where, compose, read_document, set_override
from corral.recipe.errors import RecipeError, RunInterrupted, UserError
from corral.recipe.keys import KeyPath, dotted, expand, in_free_form
from corral.recipe.load import recipe_from
from corral.recipe.placement import runs_on_ray
from corral.recipe.plan import Plan
from corral.recipe.references import escape_references
from corral.recipe.schema import Recipe
from corral.rewards.reward_function import takes_responses

if TYPE_CHECKING:
    import pyarrow

Answer = TypeVar("Answer")
KEYWORDS = ("reward", "environment", "loss", "advantage")
LOOK_EVERY_S = 0.5
"""How often the thread of a notebook looks for Ctrl-C while a run is in another one: a signal need not wake it."""
RecipeSource = str | Path | Mapping[str, Any] | Recipe
"""A YAML file, the same as nested mappings, or a recipe that was loaded before."""
Reward = str | Callable[..., Any]
"""A function, or the name of a built-in one."""
Rewards = Reward | list[Reward | tuple[Reward, float]]
"""In a list each may have a weight: `[right, (short, 0.1)]`."""
Rows = Iterable[Mapping[str, Any]]
"""A list of rows, or a `datasets.Dataset`."""


def train(
    recipe: RecipeSource,
    *,
    reward: Rewards | None = None,
    environment: type | Mapping[str, Any] | None = None,
    data: Rows | Mapping[str, Any] | None = None,
    validation: Rows | Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    quiet: bool = False,
    resume_anyway: bool = False,
    **overrides: Any,
) -> "Run":
    """Train as the recipe says, and return the finished run.

    Objects take the place of names: a reward function or a list of them, an environment class, rows to train and
    validate on, a policy loss, an advantage. Any section of the recipe is a keyword with a mapping of what to change in
    it (`schedule={"steps": 5}`), and any key is one with dots (`**{"schedule.steps": 5}`). A run of the same name that
    was stopped continues, as it does with `corral train`; one that was trained with another model, data, reward,
    environment or algorithm is refused, unless `resume_anyway`. On a Ray cluster objects must be importable there.
    """
    from corral.loop.train import train as run_training
    from corral.loop.training_loop import Interrupt

    objects = {
        "environment.reward.name": reward,
        "environment": environment,
        "data": data,
        "validation": validation,
        "algorithm.loss": loss,
        "algorithm.advantage": advantage,
    }
    loaded = _load(recipe, overrides, objects)
    planned = checked_plan(loaded)
    # What may be wrong is printed all the same.
    console = Console(io.StringIO(), warnings=sys.stderr) if quiet else Console(show=notebook_display())
    for warning in planned.warnings:
        console.warn(warning)
    interrupt = Interrupt(console.warn)

    def stop() -> bool:
        interrupt.is_ctrl_c = True
        return interrupt.request()

    try:
        folder = _outside_of_event_loops(
            lambda: run_training(loaded, planned, console, interrupt=interrupt, resume_anyway=resume_anyway), stop
        )
    except RunInterrupted:
        raise KeyboardInterrupt from None
    return Run(folder)


def plan(recipe: RecipeSource, **overrides: Any) -> Plan:
    """Work out what would run: batch arithmetic, algorithm, placement, memory, warnings. Touches no device."""
    loaded = load_recipe(recipe, **overrides)
    return checked_plan(loaded)


def evaluate(
    recipe: RecipeSource,
    model: str | Path | None = None,
    *,
    reward: Rewards | None = None,
    environment: type | Mapping[str, Any] | None = None,
    validation: Rows | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Score a model (the recipe's, or a checkpoint) on the recipe's held-out rows, and return the metrics."""
    from corral.loop.train import evaluate as run_evaluation

    objects = {"environment.reward.name": reward, "environment": environment, "validation": validation}
    loaded = _load(recipe, overrides, objects)
    checked_plan(loaded)
    return _outside_of_event_loops(
        lambda: run_evaluation(loaded, None if model is None else str(model), Console(sys.stderr, live=False))
    )


def load_recipe(recipe: RecipeSource, **overrides: Any) -> Recipe:
    """Read a recipe and check its types. Raises `corral.RecipeError` with one line for each problem."""
    return _load(recipe, overrides, {})


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward function, and check at once that it can be called as one.

    It takes `response` and any of `answer`, `prompt`, `extra` and `source`, by name, and returns a number, a dict
    with `score` whose other numbers become metrics, or None for a sample without a reward. One that takes `responses`
    gets all samples of a prompt, and returns a list, and so does one of TRL's, which takes `completions`. It may be
    `async`.
    """
    if not takes_responses(function):
        name = getattr(function, "__name__", function)
        known = "`response` or `responses`, or TRL's `completions`"
        raise UserError(f"the reward function `{name}` must have a parameter {known}")
    return function


@dataclass(frozen=True)
class Run:
    """The folder of a run, finished or not: `corral.Run("runs/quickstart")` opens one that is there."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not (self.folder / "recipe.yaml").is_file():
            raise UserError(f"{self.folder} is not the folder of a run: there is no recipe.yaml in it")

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was last started with, with all overrides."""
        return load_recipe(latest_recipe(self.folder) or self.folder / "recipe.yaml")

    @property
    def finished(self) -> bool:
        """Whether all steps were made. One that was stopped, or has failed, is not."""
        return bool(self._summary()["state"] == "finished")

    @property
    def metrics(self) -> "pyarrow.Table":
        """One row for each logged step, one column for each metric; null where a step did not log it."""
        import pyarrow

        from corral.observe.run_files import read_metrics

        rows = read_metrics(self.folder / "metrics.jsonl")
        names = dict.fromkeys(name for row in rows for name in row)
        return pyarrow.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last checkpoint, which transformers loads as it is. None: there is none."""
        from corral.training.checkpoint import find_checkpoint

        return find_checkpoint(self.folder / "checkpoints", "auto")

    def trajectories(self, step: int | None = None, part: str | None = None) -> list[dict[str, Any]]:
        """The trajectories of a step (None: of the last one), as records with text, tokens, rewards and log-probs.

        `part="validation"` gives those of the validation after that step.
        """
        from corral.observe.trajectory_store import TrajectoryStore

        store = TrajectoryStore(self.folder / "trajectories")
        steps = [number for number, own in store.parts() if own == (part or "")]
        if not steps:
            raise UserError(f"{self.folder}: no trajectories were written (`logging.trajectories`)")
        return list(store.records(steps[-1] if step is None else step, part or ""))

    def _summary(self) -> dict[str, Any]:
        from corral.view.runs import RunReader

        return RunReader(self.folder.name, self.folder.resolve()).summary()

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        summary = self._summary()
        validations = [one["value"] for one in (summary["before"], summary["after"]) if one is not None]
        scores = " -> ".join(f"{value:.3f}" for value in validations if value is not None)
        title = f"{self.folder}: {summary['state']}" + (f", validation {scores}" if scores else "")
        return run_html(title, summary["step"], summary["num_steps"], summary["curve"], summary["sparkline"])


def _load(recipe: RecipeSource, overrides: Mapping[str, Any], objects: Mapping[str, Any]) -> Recipe:
    document = _document(recipe)
    changes = dict(_flat(overrides))
    for path, value in changes.items():
        if any(map(callable, value if isinstance(value, list) else [value])):
            near = did_you_mean(path[0], KEYWORDS)
            raise UserError(f"{dotted(path)}: functions and classes are given as {', '.join(KEYWORDS)}{near}")
    named: dict[KeyPath, Any] = {}
    for key, value in objects.items():
        if isinstance(value, Mapping):  # a section's changes, and no object
            changes |= dict(_flat({key: value}))
        elif value is not None:
            named |= _named(key, value)
    if ("environment", "rewards") in named:
        for own in ("name", "options"):
            document.remove(("environment", "reward", own))
    for path, value in {**changes, **named}.items():
        try:
            text = json.dumps(value, default=str)
        except TypeError as error:
            raise UserError(f"{dotted(path)}: {error}") from error
        set_override(document, path, text, Where(OVERRIDE, f"override {dotted(path)}={text}"))
    loaded = recipe_from(document)
    if runs_on_ray(loaded):
        for key, value in objects.items():
            for item in value if isinstance(value, list) else [value]:
                one = item[0] if isinstance(item, tuple) else item
                if callable(one) and key not in ("data", "validation"):
                    _check_importable(key, one)
    return loaded


def _document(recipe: RecipeSource) -> Document:
    if isinstance(recipe, str | Path):
        return read_document(Path(recipe))
    if isinstance(recipe, Recipe):
        recipe = escape_references(recipe.model_dump(mode="json", exclude_unset=True))
    elif not isinstance(recipe, Mapping):
        raise UserError(f"a recipe is a path, nested mappings or a loaded recipe, not a {type(recipe).__name__}")
    try:
        node = compose(json.dumps(recipe, default=str, indent=1), "recipe")
    except TypeError as error:
        raise RecipeError(f"recipe: {error}") from error
    document = Document("recipe")
    document.add_keys((), node)  # type: ignore[arg-type]
    return document


def _flat(values: Mapping[str, Any], above: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """The path and the value of every key, so that a section's other keys stay. An empty mapping is a value.

    A dotted key stands for nested ones, but for one of the user's own, such as a column of `data.train.filters`.
    """
    for key, value in values.items():
        path = (*above, str(key)) if in_free_form(above) else expand(above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        else:
            yield path, value


def _named(key: str, value: Any) -> dict[KeyPath, Any]:
    """The recipe's key for an object, and the object's name."""
    if key in ("data", "validation"):
        rows = value
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            raise UserError(f"{key}: rows are a list of mappings, or a datasets.Dataset")
        part = "train" if key == "data" else "validation"
        return {("data", part): {"path": name_object(lambda: iter(rows), f"{part}_rows")}}
    if key == "environment.reward.name" and isinstance(value, list):
        rewards: dict[str, dict[str, Any]] = {}
        for number, one in enumerate(value, start=1):
            function, weight = one if isinstance(one, tuple) else (one, 1.0)
            own = function if isinstance(function, str) else getattr(function, "__name__", "")
            name = own if own.isidentifier() and own not in rewards else f"reward_{number}"
            rewards[name] = {"name": _spec(function, f"reward_{name}"), "weight": weight}
        return {("environment", "rewards"): rewards}
    keyword, own = key.removesuffix(".name").rpartition(".")[2], getattr(value, "__name__", "")
    # With the keyword, as two objects may have one name; a lambda has none.
    name = f"{keyword}_{own}" if own.isidentifier() else keyword
    return {expand((), f"{key}.name" if key == "environment" else key): _spec(value, name)}


def _spec(value: Any, name: str) -> str:
    return value if isinstance(value, str) else name_object(value, name)


def _check_importable(key: str, value: Any) -> None:
    if not is_importable(value):
        raise UserError(
            f"{key.removesuffix('.name')}: `{getattr(value, '__qualname__', value)}` cannot be imported by the workers "
            "of a cluster, because it was defined in a notebook, in the program that was started, or inside a "
            "function. Put it into a module of its own and import it from there"
        )


def _outside_of_event_loops(work: Callable[[], Answer], stop: Callable[[], bool] | None = None) -> Answer:
    """Run `work` here, or in a thread of its own where an event loop runs already, as in a notebook.

    A run has an event loop of its own, and two cannot run in one thread. Ctrl-C then arrives in the notebook's thread,
    which asks the run to stop as the command line does. Where `stop` returns False, because there is nothing to save,
    it is raised in the thread, which ends as soon as it runs Python again. A second one, or one where there is nothing
    to ask, is raised here, too, at once.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    idents: list[int] = []

    def run() -> Answer:
        idents.append(threading.get_ident())
        return work()

    threads = ThreadPoolExecutor(1, thread_name_prefix="corral")
    result = threads.submit(run)
    threads.shutdown(wait=False)
    while not result.done():
        try:
            wait([result], timeout=LOOK_EVERY_S)
        except KeyboardInterrupt:
            if idents and (stop is None or not stop()):
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(idents[0]), interrupt)
            if stop is None:
                raise
            stop = None
    return result.result()
