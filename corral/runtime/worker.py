"""A worker: one process, one device, and every role that is placed on it.

Roles on the same devices are in the same process, so that the engine can decode with the trainer's own tensors. The
workers of such a set of devices are one world of torch.distributed; two roles have all of their devices in common, or
none.
"""

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from corral.data.rows import Row
from corral.envs.base import EnvSet, try_once, uses_rewards
from corral.model.model_loading import default_device
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Environment, Recipe
from corral.rewards.scorer_pool import ScorerPools
from corral.runtime.network import check_interfaces, open_store
from corral.runtime.worker_heartbeat import WorkerHeartbeat
from corral.training.checkpoint import problem_with
from corral.training.replicas import Replicas, connect, set_nccl_variables

BUILDER = "corral.runtime.worker:build_role"
"""Function that makes a role on a worker. A debugger and benchmarks have another one with the same signature."""
BUILD_ORDER = ("rewards", "actor", "reference", "critic", "reward_model", "rollout")
"""Order in which roles are built. Rewards first: their processes start while models are loaded, and a wrong one is
known before that. Rollout last: its engine may use the actor's tensors."""


@dataclass
class WorkerContext:
    """What a role knows of the worker that hosts it."""

    rank: int
    """Rank among the workers of its set of devices."""
    size: int
    """Number of workers of its set of devices."""
    address: str
    """Address of its node, as other nodes reach it."""
    device: torch.device
    timeout_s: float
    """Deadline for collectives and calls."""
    accelerators: tuple[str, ...] = ()
    """Names of the GPUs of an engine that begins on this device (`rollout.engine.tensor_parallel`), as Ray has them."""
    can_be_replaced: bool = False
    """Whether another process takes this one's place when it ends."""
    replicas: Replicas | None = None
    """The connection to workers with other copies of the same models, where there are several."""
    prints: Path | None = None
    """File for what rewards and environments in processes of their own print. None: where this process prints."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Roles that were built here before, by name."""


class Role:
    """Base class of the roles that a worker hosts."""

    def facts(self) -> dict[str, Any]:
        """Returns what the controller must know once the role is built."""
        return {}

    def hurry(self) -> None:
        """The run is to stop: nothing that hangs is waited for longer than it must be."""

    def close(self) -> None:
        """Ends what the role has started."""


class Worker:
    """Hosts roles, and calls their methods. Made in the process in which they are to live."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        timeout_s: float,
        threads: int | None = None,
        accelerators: tuple[str, ...] = (),
        can_be_replaced: bool = False,
        heartbeat: WorkerHeartbeat | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.context = WorkerContext(rank, size, address, default_device(), timeout_s, accelerators, can_be_replaced)
        self.heartbeat = heartbeat
        self.stores: dict[str, TCPStore] = {}
        """Stores of this process at which workers meet, by address. They stay open: torch may ask them later."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="corral-worker")

    def open_rendezvous(self) -> str:
        """Opens a store at which workers of this set meet, and returns its address."""
        store = open_store(self.context.address, timedelta(seconds=self.context.timeout_s))
        address = f"{self.context.address}:{store.port}"
        self.stores[address] = store
        return address

    def join_world(self, rendezvous: str, shape: MeshShape) -> None:
        """Makes the world of torch.distributed of those workers of this set that hold one copy of its models; returns
        when all of them are connected."""
        context, timeout = self.context, timedelta(seconds=self.context.timeout_s)
        check_interfaces(os.environ)
        store, (_, rank) = self._store(rendezvous), shape.place_in_copies(context.rank)
        backend = "nccl" if context.device.type == "cuda" else "gloo"
        set_nccl_variables()
        dist.init_process_group(backend, store=store, rank=rank, world_size=shape.copy.size, timeout=timeout)
        connect(dist.all_reduce, context.device, timeout)

    def join_replicas(self, rendezvous: str, shape: MeshShape) -> None:
        """Connects the copies of the models, once more where workers of one were lost; returns when all are there."""
        context = self.context
        if context.replicas is None:
            context.replicas = Replicas.of_rank(shape, context.rank, context.device, context.address, context.timeout_s)
        if context.replicas is not None:
            _, position = shape.place_in_copies(context.rank)
            store = self._store(rendezvous)
            context.replicas.connect(dist.PrefixStore(str(position), store))  # type: ignore[attr-defined]

    async def abort_replicas(self) -> None:
        """Ends the wait for workers that were lost."""
        if self.context.replicas is not None:
            await asyncio.to_thread(self.context.replicas.abort)

    def _store(self, rendezvous: str) -> TCPStore:
        host, port = rendezvous.rsplit(":", 1)
        timeout = timedelta(seconds=self.context.timeout_s)
        own = self.stores.get(rendezvous)
        return own or TCPStore(host, int(port), is_master=False, timeout=timeout)

    def free_device_memory(self) -> int | None:
        """Returns the bytes of the GPU that nothing has taken. None: the device is a CPU, which others use as well."""
        is_cuda = self.context.device.type == "cuda"
        return torch.cuda.mem_get_info(self.context.device)[0] if is_cuda else None

    def problem_with(self, checkpoint: Path) -> str | None:
        """Returns what is wrong with a checkpoint as this worker sees it, if anything is."""
        return problem_with(checkpoint, hashes=False)

    def build(self, builder: str, role: str, recipe: Recipe, resume_from: Path | None) -> dict[str, Any]:
        """Builds a role, which may use those built here before. Returns its facts."""
        module, _, name = builder.partition(":")
        make: Callable[[str, WorkerContext, Recipe, Path | None], Role] = getattr(importlib.import_module(module), name)
        self.context.roles[role] = built = make(role, self.context, recipe, resume_from)
        return built.facts()

    async def call(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Calls a method of a role, or of this class where the role is `worker`. Async methods run beside everything
        else; plain ones, which compute, run one after the other in a thread of their own."""
        target = getattr(self if role == "worker" else self.context.roles[role], method)
        if asyncio.iscoroutinefunction(target):
            with self._noted(role, method, computes=False):
                return await target(*arguments)

        def compute() -> Any:
            with self._noted(role, method, computes=True):
                return target(*arguments)

        # Shielded, so that a cancelled call is still computed: workers that compute together (FSDP, tensor parallel)
        # would hang in the next collective if one of them left out what the others do.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self.thread, compute))

    async def hurry(self) -> None:
        for role in self.context.roles.values():
            role.hurry()

    def _noted(self, role: str, method: str, computes: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.during(f"{role}.{method}", computes)

    def close(self) -> None:
        for role in self.context.roles.values():
            role.close()


class RewardWorker(Role):
    """Processes of the reward functions."""

    def __init__(self, pools: ScorerPools, recipe: Recipe | None = None) -> None:
        """`recipe`: None for a debugger, which is to see no call that the run does not make."""
        self.pools, self.recipe = pools, recipe

    async def try_out(self, rows: Mapping[str, Row]) -> dict[str, str]:
        """Calls each environment and its reward function once, with a row of its own. Returns what failed, by tag."""
        if self.recipe is None:
            return {}
        one_process = {"processes": 1}
        own = {tag: self.recipe.tagged_environments[tag].model_copy(update=one_process) for tag in rows}
        with closing(EnvSet(own, self.pools.by_tag, self.recipe.rollout)) as envs:
            tried = {tag: await try_once(envs.factories[tag], row) for tag, row in rows.items()}
        return {tag: error for tag, error in tried.items() if error is not None}

    def close(self) -> None:
        self.pools.close()


def build_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    """Makes a role. `resume_from`: a checkpoint whose model the policy starts as."""
    from corral.runtime.model_workers import ActorWorker, CriticWorker, PolicyWorker  # these import this module
    from corral.runtime.reward_model_worker import RewardModelWorker
    from corral.runtime.rollout_worker import EngineMember, RolloutWorker

    policy_path = recipe.model.path if resume_from is None else str(resume_from)
    match role:
        case "rewards":
            pools = ScorerPools.start(environments_with_rewards(recipe), context.prints)
            try:
                # Made once for nothing, so that a mistake in an environment is known before any model is loaded.
                EnvSet(recipe.tagged_environments, pools.by_tag, recipe.rollout).close()
            except BaseException:
                pools.close()
                raise
            return RewardWorker(pools, recipe)
        case "actor":
            return ActorWorker("actor", context, recipe, policy_path)
        case "reference":
            return PolicyWorker("reference", context, recipe, recipe.reference.path)
        case "critic":
            return CriticWorker("critic", context, recipe, recipe.critic.path)
        case "reward_model":
            return RewardModelWorker(context, recipe)
        case "rollout":
            if context.rank % recipe.rollout.engine.tensor_parallel:
                return EngineMember(context)
            return RolloutWorker(context, recipe, policy_path, context.roles["rewards"].pools)
    raise ValueError(f"there is no role {role}")


def environments_with_rewards(recipe: Recipe) -> dict[str, Environment]:
    """Returns the environments whose reward is a function's, by tag."""
    return {tag: environment for tag, environment in recipe.tagged_environments.items() if uses_rewards(environment)}
