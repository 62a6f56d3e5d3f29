"""Trainers that end themselves at a chosen moment: `build_role` stands for `corral.runtime.worker:build_role`.

`fault.json` in the folder of the run's recipe says which ones: role and rank, the method and the number of its call in
one process, and whether they end before it, within it (after gradients were summed over replicas), after it, or, when
they have answered, `later`.
"""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import corral.training.optimizer
from corral.recipe.schema import Recipe
from corral.runtime.ray_runtime import RayRuntime
from corral.runtime.worker import Role, WorkerContext
from corral.runtime.worker import build_role as build_real_role


def use_faults() -> None:
    """Lets runs of this process have such workers."""
    start = RayRuntime.start

    async def start_with_faults(*arguments: Any, **options: Any) -> RayRuntime:
        return await start(*arguments, **options, builder="replica_faults:build_role")

    RayRuntime.start = start_with_faults  # type: ignore[method-assign, assignment]


def build_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    built = build_real_role(role, context, recipe, resume_from)
    folder = Path(recipe.logging.runs).parent
    faults = json.loads((folder / "fault.json").read_text())
    for number, fault in enumerate(faults):
        if fault["role"] == role and fault["rank"] == context.rank:
            add_fault(built, fault, folder / f"ended-{number}")
    return built


def add_fault(role: Any, fault: dict[str, Any], mark: Path) -> None:
    method, num_calls = getattr(role, fault["method"]), 0

    def end() -> None:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def call(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != fault["call"] or mark.exists():
            return method(*arguments)
        if fault["when"] == "before":
            end()
        if fault["when"] == "within":
            corral.training.optimizer.total_norm = lambda *_: end()  # type: ignore[assignment]
        result = method(*arguments)
        if fault["when"] == "after":
            end()
        if fault["when"] == "later":
            threading.Timer(0.2, end).start()
        return result

    setattr(role, fault["method"], call)
