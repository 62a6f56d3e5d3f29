"""`corral train --debug` and `--post-mortem`: what they change of a run. How to use them is in docs/debugging.md."""

import math
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from corral.loop.components import OpenWorkers, Runtime, open_runtime
from corral.loop.interrupt import Handler
from corral.observe.console import Console
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import Placement, runs_on_ray
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Cluster, Parallel, Recipe
from corral.runtime.debugged import HERE, OPENED
from corral.runtime.local import LocalRuntime
from corral.runtime.remote_debugger import Wanted
from corral.runtime.terminal import debugger_installed, open_at, open_where


@dataclass(frozen=True)
class Debugging:
    here: bool = False
    """All of the run in this process."""
    post_mortem: bool = False
    """A debugger opens where something fails."""
    insecure: bool = False
    """Also if others can reach it: the debugger of a worker has no password."""

    def adapt(self, recipe: Recipe) -> Recipe:
        """The recipe as it is run."""
        return in_one_process(recipe) if self.here else recipe

    @property
    def open_workers(self) -> OpenWorkers:
        return self._open_here if self.here else self._open_elsewhere

    @property
    def on_ctrl_c(self) -> Handler | None:
        return open_where if self.here and sys.stdin.isatty() else None

    @contextmanager
    def watching(self, recipe: Recipe, console: Console) -> Iterator[None]:
        """The run is in the block. An error is opened in a debugger on the terminal, then raised as ever."""
        told = (UserError, RunError, OSError) if runs_on_ray(recipe) else UserError  # on Ray, where they came from
        try:
            with debugger_installed() if self.here else nullcontext():
                yield
        except told:
            raise
        except Exception as error:
            if self.post_mortem:
                open_here(error, console)
            raise

    @asynccontextmanager
    async def _open_here(
        self, recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
    ) -> AsyncIterator[Runtime]:
        patient = recipe.cluster.model_copy(update={"call_timeout_s": math.inf})
        recipe = recipe.model_copy(update={"cluster": patient})
        runtime = LocalRuntime(recipe, placement, logs, builder=OPENED if self.post_mortem else HERE)
        try:
            await runtime.await_services()
            yield runtime
        finally:
            runtime.close()

    def _open_elsewhere(
        self, recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
    ) -> AbstractAsyncContextManager[Runtime]:
        debugger = Wanted(self.post_mortem, self.insecure, console.warn)
        return open_runtime(recipe, placement, logs, console, lost_nodes, debugger)


def in_one_process(recipe: Recipe) -> Recipe:
    """On one device, on-policy, with the same arithmetic, and in a run folder of its own."""
    algorithm, written = resolve_algorithm(recipe), recipe.algorithm
    correction = written.correction.model_copy(update={"name": algorithm.correction_name})
    changes = {
        "name": f"{recipe.name}-debug",
        "cluster": Cluster(runtime="local"),
        "train": recipe.train.model_copy(update={"parallel": Parallel(), "offload": []}),
        "checkpoint": recipe.checkpoint.model_copy(
            update={"resume": "never" if recipe.checkpoint.resume == "auto" else recipe.checkpoint.resume}
        ),
    }
    if recipe.schedule.max_staleness:
        changes["algorithm"] = written.model_copy(
            update={"correction": correction, "old_logprobs": algorithm.old_logprobs}
        )
    changes["schedule"] = recipe.schedule.model_copy(update={"max_staleness": 0, "pipelined": False})
    return recipe.model_copy(update=changes)


def open_here(error: Exception, console: Console) -> None:
    console.close()
    if not sys.stdin.isatty():
        console.warn("--post-mortem: there is no debugger without a terminal to type in")
        return
    with suppress(KeyboardInterrupt):
        open_at(error)
