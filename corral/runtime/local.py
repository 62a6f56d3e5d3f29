"""Workers without a cluster: one, in this process, on one device."""

import asyncio
from pathlib import Path
from typing import Any

from corral.recipe.errors import RunError
from corral.recipe.placement import Placement
from corral.recipe.schema import Recipe
from corral.runtime.group import Group, LocalGroup
from corral.runtime.services import Services
from corral.runtime.worker import BUILDER, Worker


class LocalRuntime:
    """Has what `RayRuntime` has, with one device."""

    def __init__(self, recipe: Recipe, placement: Placement, logs: Path = Path(), *, builder: str = BUILDER) -> None:
        self.placement, self.builder = placement, builder
        self.services = Services(recipe.cluster.services, logs)
        self.timeout_s = recipe.cluster.call_timeout_s
        self.worker = Worker(0, 1, "127.0.0.1", timeout_s=self.timeout_s, threads=recipe.train.threads)
        self.groups: dict[str, Group] = {"worker": LocalGroup("worker", [self.worker], self.timeout_s)}

    async def build(
        self,
        role: str,
        recipe: Recipe,
        resume_from: Path | None,
        *,
        rank: int | None = None,
    ) -> list[dict[str, Any]]:
        facts = self.worker.build(self.builder, role, recipe, resume_from)
        self.groups[role] = LocalGroup(role, [self.worker.site.hosted[role]], self.timeout_s)
        return [facts]

    async def await_services(self) -> None:
        problems = await asyncio.to_thread(self.services.wait)
        if problems:
            raise RunError(problems[0])

    async def watch(self) -> None:
        """There is no node to lose."""
        await asyncio.Event().wait()

    @property
    def num_nodes(self) -> int:
        return 1

    def devices_of(self, address: str) -> tuple[int, ...]:
        return (0,)

    async def replace(self, device: int) -> None:
        raise AssertionError("this process is not lost while it asks")

    def close(self) -> None:
        self.worker.close()
        self.services.close()
