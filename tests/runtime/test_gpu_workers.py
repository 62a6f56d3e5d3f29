"""What workers do on GPUs only, as far as a machine without one can show it."""

import asyncio
import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from torch.cuda._utils import _get_device_index

from corral.model.model_loading import default_device
from corral.recipe.load import load_recipe
from corral.recipe.mesh import MeshShape
from corral.rollout.native_engine import NativeEngine
from corral.rollout.process_engine import engine_environment
from corral.runtime import transfer_channels
from corral.runtime.group import CallTimeout
from corral.runtime.model_workers import ActorWorker, TrainerGroup, mesh_of_worker
from corral.runtime.network import INTERFACE_VARIABLES
from corral.runtime.nodes import Node, NodeFacts, gpu_variables_of_ray
from corral.runtime.ray_group import ActorProcess, DeviceSlot, WorkerSetup, shared_gpu
from corral.runtime.ray_runtime import DeviceSet, RayRuntime
from corral.runtime.remote_debugger import DebuggerOptions
from corral.runtime.transfer_channels import CollectiveChannel
from corral.runtime.weight_publisher import WeightPublisher
from corral.runtime.worker import Worker, WorkerContext
from corral.training.replicas import NCCL_VARIABLES, ReplicaLost, Replicas, connect

GPU = torch.device("cuda", 0)
RECIPES = Path(__file__).parents[2] / "recipes"


def test_torch_can_make_the_default_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _get_device_index(default_device()) == 0  # as `torch.cuda.set_device` calls it


def test_a_worker_knows_what_its_gpu_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(0, 1, "127.0.0.1", timeout_s=20.0)
    assert worker.free_device_memory() is None  # a CPU's memory is not its own
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 4) if device == GPU else None)
    worker.context.device = GPU
    assert worker.free_device_memory() == 3


class NcclWork:
    """A work of NCCL's, as Python sees it: an error has no type that it could be, and is raised by a wait with a limit
    only."""

    def __init__(self, has_failed: bool) -> None:
        self.has_failed = has_failed

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        raise TypeError("Unable to convert function return value to a Python type!")

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.has_failed and timeout is not None:
            raise RuntimeError("NCCL error: remote process exited")


class NcclGroup:
    def __init__(self, has_failed: bool = False) -> None:
        self.has_failed = has_failed

    def allreduce(self, tensors: Any) -> NcclWork:
        return NcclWork(self.has_failed)


@pytest.mark.parametrize("has_failed", [False, True])
def test_replicas_see_whether_a_sum_by_nccl_has_failed(has_failed: bool) -> None:
    replicas = Replicas(0, 2, GPU, "127.0.0.1", 60.0)
    replicas.group = NcclGroup(has_failed)
    if has_failed:
        with pytest.raises(ReplicaLost, match="remote process exited"):
            replicas.sum_(torch.ones(1))
    else:
        replicas.sum_(torch.ones(1))


def test_a_world_is_connected_when_it_is_joined_and_torch_ends_no_process_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL connects in the first collective, and torch reads its variables when the first group is made."""
    seen: list[Any] = []
    for name in NCCL_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def init_process_group(*_: Any, **__: Any) -> None:
        seen.append({name: os.environ.get(name) for name in NCCL_VARIABLES})

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: seen.append(tensor.tolist()))
    worker = Worker(0, 2, "127.0.0.1", timeout_s=20.0)
    worker.join_world(worker.open_rendezvous(), MeshShape(shard=2))
    assert seen == [NCCL_VARIABLES, [1.0]]
    assert len(NCCL_VARIABLES) == 3


def test_a_member_that_never_comes_keeps_nobody_waiting() -> None:
    with pytest.raises(RuntimeError, match=r"not all members of a group connected within 0\.2 s"):
        connect(lambda tensor: threading.Event().wait(), torch.device("cpu"), timedelta(seconds=0.2))


def test_a_channel_whose_groups_do_not_end_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of a group of NCCL, and its `abort`, wait a minute for each work that has failed."""

    class Stuck:
        def abort(self) -> None:
            threading.Event().wait()

    monkeypatch.setattr(transfer_channels, "CLOSE_S", 0.1)
    channel = CollectiveChannel("127.0.0.1", torch.device("cpu"), timeout_s=20.0)
    channel.groups = [Stuck(), Stuck()]
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert channel.groups == []


class NotedGroup:
    """Workers that note what they are called for."""

    def __init__(self, called: list[str]) -> None:
        self.called = called

    async def one(self, rank: int, method: Any, *_: Any) -> str:
        self.called.append(method.__qualname__)
        return "127.0.0.1:1"

    async def each(self, method: Any, arguments: Any, *, ranks: Any) -> None:
        self.called += [method.__qualname__] * len(arguments)


@pytest.mark.parametrize("kind", ["collective", "shared", "object"])
def test_trainers_and_engines_are_connected_before_the_first_rollout(kind: str) -> None:
    """Afterwards caches have the memory that NCCL takes for a connection."""
    called: list[str] = []
    group: Any = NotedGroup(called)
    scheduler: Any = SimpleNamespace(group=group, queues={1: None, 0: None})
    publisher = WeightPublisher(TrainerGroup(group, MeshShape()), scheduler, kind, "float32", [1, 2, 3])
    asyncio.run(publisher.connect())
    joined = ["ActorWorker.open_channel", "ActorWorker.join_channel", *2 * ["RolloutWorker.join_channel"]]
    assert called == (joined if kind == "collective" else [])


def test_roles_of_a_worker_have_one_set_of_groups() -> None:
    context = WorkerContext(0, 1, "127.0.0.1", torch.device("cpu"), 20.0)
    actor = ActorWorker.__new__(ActorWorker)
    actor.mesh = context_mesh = mesh_of_worker(context, MeshShape())
    context.roles["actor"] = actor
    assert mesh_of_worker(context, MeshShape()) is context_mesh


def runtime_of_four_gpus(tmp_path: Path, told: list[WorkerSetup]) -> RayRuntime:
    """On a node with 32 cores and `eth1` to `eth17`. `told`: what workers are."""
    runtime = RayRuntime(load_recipe(RECIPES / "quickstart.yaml"), tmp_path, "", DebuggerOptions())
    runtime.resource, runtime.sets = "GPU", [DeviceSet(("actor",), (0, 1, 2, 3), True)]
    runtime.cluster = runtime.cluster.model_copy(update={"start_timeout_s": 0.2})
    facts = NodeFacts("python", "shim", 32, "eth1", tmp_path, sees_logs=True, debugger=None)
    node = Node(0, "id", "10.0.0.1", "h1", devices=(0, 1, 2, 3))
    node.facts = facts
    actor = SimpleNamespace(set_up=SimpleNamespace(remote=told.append))
    for number in range(4):
        process = ActorProcess("", actor, None, 1, [str(number)])
        runtime.devices[number] = DeviceSlot(number, node, process, tmp_path / "log")
    return runtime


def set_up_of_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> WorkerSetup:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    async def in_time(*_: Any, **__: Any) -> None: ...

    told: list[WorkerSetup] = []
    runtime = runtime_of_four_gpus(tmp_path, told)
    monkeypatch.setattr(runtime, "_in_time", in_time)
    monkeypatch.setattr("corral.runtime.ray_runtime.own_folder", Path.cwd)
    asyncio.run(runtime._set_up(runtime.devices[2]))
    return told[0]


def test_who_does_not_connect_is_named_with_node_and_interface(tmp_path: Path) -> None:
    runtime = runtime_of_four_gpus(tmp_path, [])

    class Firewalled:
        names = tuple(map(str, runtime.devices.values()))

        async def one(self, rank: int, method: Any, *_: Any, timeout_s: float | None = None) -> str:
            if method is Worker.join_world and rank == 3:
                await asyncio.Event().wait()
            return "10.0.0.1:1234"

    group: Any = Firewalled()
    message = "did not all connect to 10.0.0.1:1234 .* device 3 on h1 .* they use eth1 on h1"
    with pytest.raises(CallTimeout, match=message):
        asyncio.run(runtime._meet(runtime.sets[0], group, Worker.join_world, MeshShape(shard=4), range(4)))


def test_gpu_workers_share_their_nodes_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set_up_of_worker(monkeypatch, tmp_path).threads == 8


def test_nccl_takes_no_interface_whose_name_begins_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = set_up_of_worker(monkeypatch, tmp_path).environment
    assert own == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    chosen = set_up_of_worker(monkeypatch, tmp_path, NCCL_SOCKET_IFNAME="ib").environment
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib"}


def test_weights_are_staged_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator has cached for one stream is no use to another."""
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(object()) or streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    engine: Any = SimpleNamespace(model=SimpleNamespace(device=GPU), staging=None)
    for _ in range(3):
        assert NativeEngine._stage(engine, []) == []
    assert len(streams) == 1


def test_an_engines_process_has_no_expandable_segments() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64", "PATH": "/bin"}
    assert engine_environment(given) == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PATH": "/bin"}


def test_ray_shows_a_worker_its_own_gpu_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's own function for it reads the variables."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for name, value in gpu_variables_of_ray({}).items():
        monkeypatch.setenv(name, value)
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert shared_gpu(["3"], {}) == {}


def test_workers_that_share_a_gpu_are_different_hosts_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in gpu_variables_of_ray({"CORRAL_SHARED_GPUS": "2"}).items():
        monkeypatch.setenv(name, value)
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["7"])  # there is none of this number
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    found = [shared_gpu([str(number)], os.environ) for number in range(8)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0", "1"] * 4
    assert found[0]["NCCL_HOSTID"].endswith(f"-{os.getpid()}")
