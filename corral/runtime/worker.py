"""A worker: one process, one device, and every role that is placed on it.

Roles on the same devices are in the same process, so that the engine can decode with the trainer's own tensors. The
workers of such a set of devices are one world of torch.distributed; roles share all of their devices or none.
"""

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from corral.model.load import default_device
from corral.recipe.schema import Recipe

BUILDER = "corral.runtime.roles:build_role"
"""Makes a role on a worker. Another one, with the same signature, can take its place to measure the rest."""


@dataclass
class WorkerContext:
    """Where a role finds itself: a worker among those with the same roles."""

    rank: int
    """Among the workers of its set of devices."""
    size: int
    address: str
    """Of its node, as others reach it."""
    device: torch.device
    timeout_s: float
    """For collectives."""
    hosted: dict[str, Any] = field(default_factory=dict)
    """Roles that were built here before, by name."""


class Worker:
    """Made where the roles are to live. `address`: of its node, as other nodes reach it."""

    def __init__(self, rank: int, size: int, address: str, *, timeout_s: float, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.site = WorkerContext(rank, size, address, default_device(), timeout_s)
        self.store: TCPStore | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="corral-worker")

    # --- the worker's own methods

    def rendezvous(self) -> str:
        """Opens the place where the workers of this set meet; called on the first of them."""
        timeout = timedelta(seconds=self.site.timeout_s)
        self.store = TCPStore(self.site.address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return f"{self.site.address}:{self.store.port}"

    def join(self, rendezvous: str) -> None:
        """Makes this set's world of torch.distributed; returns when all workers of the set are there."""
        site, timeout = self.site, timedelta(seconds=self.site.timeout_s)
        host, port = rendezvous.rsplit(":", 1)
        store = self.store or TCPStore(host, int(port), is_master=False, timeout=timeout)
        if site.device.type == "cuda":
            torch.cuda.set_device(site.device)
        backend = "nccl" if site.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=site.rank, world_size=site.size, timeout=timeout)

    def build(self, builder: str, role: str, recipe: Recipe, resume_from: Path | None) -> dict[str, Any]:
        """Builds a role, which may use those built here before. Returns what it has to say of itself."""
        module, _, name = builder.partition(":")
        make: Callable[[str, WorkerContext, Recipe, Path | None], Any] = getattr(importlib.import_module(module), name)
        self.site.hosted[role] = made = make(role, self.site, recipe, resume_from)
        facts: dict[str, Any] = made.facts() if hasattr(made, "facts") else {}
        return facts

    async def call(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """What is async runs beside everything else; what computes runs in order, in one thread of its own."""
        target = getattr(self if role == "worker" else self.site.hosted[role], method)
        if asyncio.iscoroutinefunction(target):
            return await target(*arguments)
        # Not cancelled with the call: workers that compute together would no longer do the same things.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self.thread, lambda: target(*arguments)))

    def close(self) -> None:
        for role in self.site.hosted.values():
            if hasattr(role, "close"):
                role.close()
