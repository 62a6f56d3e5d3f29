"""Runs the real loop and takes the time of its steps."""

import asyncio
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from corral.bench.side import Measured
from corral.loop.closing import close_runner
from corral.loop.components import OpenWorkers
from corral.loop.interrupt import Interrupt
from corral.loop.train import running
from corral.loop.training_loop import steps
from corral.observe.console import Console
from corral.observe.run_folder import RunFolder
from corral.recipe.schema import Recipe


class Clock(Console):
    """Notes when each step was logged: from one to the next is a step, with all that is between two steps."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(io.StringIO())
        self.on_step = on_step
        self.noted: list[tuple[float, float, Mapping[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.noted.append((time.perf_counter(), time.process_time(), dict(metrics)))
        self.on_step(step)


def timed_steps(
    recipe: Recipe, open_workers: OpenWorkers | None = None, on_step: Callable[[int], None] = lambda step: None
) -> Measured:
    """One dict for each step but the first: its `seconds`, `cpu_s` of this process, and the loop's own numbers."""
    clock = Clock(on_step)

    async def run_steps(folder: RunFolder, interrupt: Interrupt) -> None:
        async with running(recipe, folder, clock, interrupt, open_workers=open_workers) as run:
            await run.mender.guard(steps(run))

    runner = asyncio.Runner()
    try:
        with (
            RunFolder.open(Path(recipe.logging.runs), recipe.name, "never") as folder,
            Interrupt(clock.warn) as interrupt,
        ):
            runner.run(run_steps(folder, interrupt))
    finally:
        close_runner(runner)
    return [
        {"seconds": end - start, "cpu_s": cpu_end - cpu_start, **metrics}
        for (start, cpu_start, _), (end, cpu_end, metrics) in zip(clock.noted, clock.noted[1:], strict=False)
    ]
