"""`corral train --debug` and `--post-mortem`: what they change of a run, and the debugger on the terminal for what runs
in this process. How to use them is in docs/debugging.md.

The debugger is Python's own, with two differences. Its `quit` ends the run, where Python's would raise an error that
counts as one of the environment or reward function it was in. And Ctrl-C opens it where the program is, also before any
breakpoint. Reward functions and environments are called in this process, without deadlines; with --post-mortem besides,
a debugger opens where they fail, which otherwise costs a sample, as ever.
"""

import math
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import Env, EnvWrapper, StepResult
from corral.observe.console import Console
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import runs_on_ray
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Cluster, Parallel, Recipe
from corral.rewards.scorer_pool import InProcessScorer, ScorerPools, make_scorer
from corral.runtime.rollout_worker import RolloutWorker
from corral.runtime.worker import BUILDER, RewardWorker, Role, WorkerContext, build_role, environments_with_rewards


@dataclass(frozen=True)
class Debugging:
    """How a run is debugged."""

    here: bool = False
    """Whether all of the run is in this process."""
    post_mortem: bool = False
    """Whether a debugger opens where something fails."""
    insecure: bool = False
    """Whether a worker's debugger, which has no password, may be opened where others can reach it."""

    def adapt(self, recipe: Recipe) -> Recipe:
        """Returns the recipe as it is run."""
        return in_one_process(recipe) if self.here else recipe

    @property
    def builder(self) -> str:
        """Name of the function that makes the roles of a worker in this process."""
        if not self.here:
            return BUILDER
        return f"{__name__}:{(build_post_mortem_role if self.post_mortem else build_debug_role).__name__}"

    @property
    def on_ctrl_c(self) -> Callable[[int, FrameType | None], None] | None:
        return break_on_signal if self.here and sys.stdin.isatty() else None

    @contextmanager
    def watching(self, recipe: Recipe, console: Console) -> Iterator[None]:
        """Runs the block, and opens a debugger on the terminal for an error, which is then raised as ever."""
        # On Ray a worker has opened its own debugger for an error of its own.
        expected = (UserError, RunError, OSError) if runs_on_ray(recipe) else UserError
        try:
            with debugger_installed() if self.here else nullcontext():
                yield
        except expected:
            raise
        except Exception as error:
            if self.post_mortem:
                console.close()
                if sys.stdin.isatty():
                    with suppress(KeyboardInterrupt):
                        open_at_error(error)
                else:
                    console.warn("--post-mortem: there is no debugger without a terminal to type in")
            raise


def in_one_process(recipe: Recipe) -> Recipe:
    """Returns the recipe on one device, on-policy, with the same arithmetic, and in a run folder of its own."""
    algorithm, written = resolve_algorithm(recipe), recipe.algorithm
    services = {name: one.model_copy(update={"devices": 0}) for name, one in recipe.cluster.services.items()}
    correction = written.correction.model_copy(update={"name": algorithm.correction.name})
    changes: dict[str, Any] = {
        "name": f"{recipe.name}-debug",
        "cluster": Cluster(runtime="local", services=services),
        "train": recipe.train.model_copy(update={"parallel": Parallel(), "offload": []}),
        "checkpoint": recipe.checkpoint.model_copy(
            update={"resume": "never" if recipe.checkpoint.resume == "auto" else recipe.checkpoint.resume}
        ),
    }
    if recipe.schedule.max_staleness:
        changes["algorithm"] = written.model_copy(
            update={"correction": correction, "old_logprobs": algorithm.old_logprobs}
        )
    if recipe.rollout.engine.tensor_parallel > 1:
        one_engine = recipe.rollout.engine.model_copy(update={"tensor_parallel": 1})
        changes["rollout"] = recipe.rollout.model_copy(update={"engine": one_engine})
    if recipe.reward_model.shard > 1:
        changes["reward_model"] = recipe.reward_model.model_copy(update={"shard": 1})
    changes["schedule"] = recipe.schedule.model_copy(update={"max_staleness": 0, "pipelined": False})
    return recipe.model_copy(update=changes)


class Debugger(pdb.Pdb):
    """pdb, whose `quit` raises KeyboardInterrupt."""

    thread: threading.Thread | None = None
    """Thread that waits for the user now."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("mode", None)  # from Python 3.14 on; `quit` would end the process
        super().__init__(*arguments, **{**options, "nosigint": True})

    def interaction(self, *arguments: Any) -> None:
        """Runs until the user says how to go on. KeyboardInterrupt after `quit`."""
        Debugger.thread = threading.current_thread()
        try:
            super().interaction(*arguments)
        finally:
            Debugger.thread = None
        if self.quitting:
            raise KeyboardInterrupt


@contextmanager
def debugger_installed() -> Iterator[None]:
    """For the time of the block `breakpoint()` and `pdb.set_trace()` open ours; what $PYTHONBREAKPOINT names, if it is
    set, is the user's choice and stays."""
    before, pdb.Pdb = pdb.Pdb, Debugger  # type: ignore[misc]
    try:
        yield
    finally:
        pdb.Pdb = before  # type: ignore[misc]


def break_on_signal(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: opens the debugger. At the prompt it discards what was typed, as usual."""
    if Debugger.thread is None:
        Debugger().set_trace(frame)
    elif Debugger.thread is threading.current_thread():
        raise KeyboardInterrupt


def open_at_error(error: BaseException) -> None:
    """Opens the debugger in the frame that raised it. KeyboardInterrupt after `quit`."""
    while error.__cause__ is not None:
        error = error.__cause__
    print(f"{type(error).__name__}: {error}")
    debugger = Debugger()
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


# --- roles in this process


def build_debug_role(
    role: str,
    context: WorkerContext,
    recipe: Recipe,
    resume_from: Path | None,
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> Role:
    """`on_error`: called where a reward function fails."""
    if role == "rewards":
        environments = environments_with_rewards(recipe).items()
        make = partial(InProcessScorer, on_error=on_error)
        return RewardWorker(ScorerPools({tag: make_scorer(one, make) for tag, one in environments}))
    built = build_role(role, context, recipe, resume_from)
    if isinstance(built, RolloutWorker):
        for factory in built.driver.envs.factories.values():
            factory.timeout_s = math.inf
            if factory.make_in_process is not None:
                factory.make, factory.limit = factory.make_in_process, None
    return built


def build_post_mortem_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    built = build_debug_role(role, context, recipe, resume_from, open_at_error)
    if isinstance(built, RolloutWorker):
        for factory in built.driver.envs.factories.values():
            factory.make = partial(DebuggedEnv, factory.make)
    return built


class DebuggedEnv(EnvWrapper):
    """An environment, with a debugger for what it raises."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        with post_mortem():
            super().__init__(make_env())

    async def reset(self, row: Row, seed: int) -> list[Message]:
        with post_mortem():
            messages: list[Message] = await self.env.reset(row, seed)
        self.copy_attributes()
        return messages

    async def step(self, reply: str) -> StepResult:
        with post_mortem():
            result: StepResult = await self.env.step(reply)
        return result

    async def close(self) -> None:
        with post_mortem():
            await self.env.close()


class post_mortem:
    """Opens the debugger for what is raised in the block. A class: the frame of a generator would be in the way."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            open_at_error(error)
