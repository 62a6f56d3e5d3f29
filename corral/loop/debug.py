"""`corral train --debug` and `--post-mortem`: what they change of a run. How to use them is in docs/debugging.md."""

import math
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from corral.loop.components import OpenWorkers, open_runtime
from corral.loop.interrupt import SignalHandler
from corral.observe.console import Console
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import Placement, runs_on_ray
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Cluster, Parallel, Recipe
from corral.runtime.group import LocalRuntime, Runtime
from corral.runtime.local_debugger import (
    DEBUG_BUILDER,
    POST_MORTEM_BUILDER,
    break_on_signal,
    debugger_installed,
    open_at_error,
)
from corral.runtime.remote_debugger import DebuggerOptions


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
    def open_workers(self) -> OpenWorkers:
        return self._open_here if self.here else self._open_elsewhere

    @property
    def on_ctrl_c(self) -> SignalHandler | None:
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
                self._open_terminal(error, console)
            raise

    @asynccontextmanager
    async def _open_here(
        self, recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
    ) -> AsyncIterator[Runtime]:
        cluster = recipe.cluster.model_copy(update={"call_timeout_s": math.inf})
        recipe = recipe.model_copy(update={"cluster": cluster})
        builder = POST_MORTEM_BUILDER if self.post_mortem else DEBUG_BUILDER
        runtime = LocalRuntime(recipe, placement, logs, builder=builder)
        try:
            await runtime.wait_for_services()
            yield runtime
        finally:
            runtime.close()

    def _open_elsewhere(
        self, recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
    ) -> AbstractAsyncContextManager[Runtime]:
        debugger = DebuggerOptions(self.post_mortem, self.insecure, console.warn)
        return open_runtime(recipe, placement, logs, console, lost_nodes, debugger)

    @staticmethod
    def _open_terminal(error: Exception, console: Console) -> None:
        console.close()
        if not sys.stdin.isatty():
            console.warn("--post-mortem: there is no debugger without a terminal to type in")
            return
        with suppress(KeyboardInterrupt):
            open_at_error(error)


def in_one_process(recipe: Recipe) -> Recipe:
    """Returns the recipe on one device, on-policy, with the same arithmetic, and in a run folder of its own."""
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
