"""Weights between processes: what arrives is what was sent, and what goes wrong ends soon, with a reason."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from deadlines import wait_until, within
from forked_pythons import FORKED, forking_python
from hosts import Lab
from tiny import DEVICE, tiny_config
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM

from corral.recipe.errors import RunError
from corral.rollout.engine import WeightLayout
from corral.runtime.transfer_channels import (
    Bucket,
    Channel,
    CollectiveChannel,
    IpcChannel,
    ObjectChannel,
    TransferHandle,
    pack,
    reused_memory,
    unpack,
)
from corral.runtime.worker import Worker

CPU = torch.device("cpu")
BUCKET = 10_000
TIMEOUT_S, AT_ONCE_S = within(20), within(10)
"""Of a channel, and of what does not wait for that."""
Weights = list[tuple[str, Tensor]]


def tiny_weights(family: str = "llama", seed: int = 0, device: torch.device = CPU) -> Weights:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).to(device)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def odd_weights(device: torch.device = CPU) -> Weights:
    """Of several data types and awkward shapes, one larger than a bucket."""
    torch.manual_seed(1)
    return [
        ("three", torch.randn(3, device=device).bfloat16()),
        ("number", torch.randn((), device=device)),
        ("large", torch.randn(70, 60, device=device)),
        ("nothing", torch.randn(0, 4, device=device)),
        ("transposed", torch.randn(30, 20, device=device).T),
        ("half", torch.randn(7, 5, device=device).half()),
    ]


def layout(weights: Weights) -> WeightLayout:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in weights]


def arrived(channel: Channel, handle: TransferHandle, expected: Weights) -> Weights:
    return [(name, tensor.clone()) for name, tensor in channel.receive(handle, layout(expected))]


def assert_same(received: Weights, sent: Weights) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(received, sent, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


# --- buckets


def test_a_bucket_is_no_larger_than_asked_unless_one_tensor_is() -> None:
    buckets = [(places, len(content)) for places, content in pack(odd_weights(), BUCKET, reused_memory(CPU))]
    assert [[place.name for place in places] for places, _ in buckets] == [
        ["three", "number"],
        ["large"],
        ["nothing", "transposed", "half"],
    ]
    assert [size <= BUCKET for _, size in buckets] == [True, False, True]


def test_large_tensors_are_split_where_every_bucket_is_in_memory_at_once() -> None:
    weights = odd_weights()
    buckets = [
        Bucket(places, content.clone()) for places, content in pack(weights, 1000, reused_memory(CPU), splits=True)
    ]
    assert max(len(content) for _, content in buckets) <= 1000
    assert_same([(name, tensor.clone()) for name, tensor in unpack((one for one in buckets), layout(weights))], weights)


# --- through memory of the node


@pytest.mark.slow
def test_an_unrelated_process_maps_what_the_sender_keeps(tmp_path: Path) -> None:
    weights = [*tiny_weights(device=DEVICE), *odd_weights(device=DEVICE)]
    channel = IpcChannel(DEVICE, bucket_bytes=BUCKET)
    handle = channel.send(iter(weights))
    (tmp_path / "handle").write_bytes(pickle.dumps((handle, layout(weights))))
    code = f"""
import pickle, torch
from corral.runtime.transfer_channels import IpcChannel
handle, layout = pickle.load(open("{tmp_path}/handle", "rb"))
weights = IpcChannel(torch.device("{DEVICE}")).receive(handle, layout)
torch.save([(name, tensor.cpu().clone()) for name, tensor in weights], "{tmp_path}/received")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=within(60))
    assert_same(torch.load(tmp_path / "received"), [(name, tensor.cpu()) for name, tensor in weights])
    channel.close()


def memory_files() -> set[str]:
    links = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return {target for link in links if os.path.islink(link) and "memfd:corral-" in (target := os.readlink(link))}


def test_memory_is_used_again_and_gone_when_the_channel_closes() -> None:
    channel = IpcChannel(CPU, bucket_bytes=BUCKET)
    for seed in range(3):
        weights = tiny_weights(seed=seed)
        handle = channel.send(weights)
        assert_same(arrived(channel, handle, weights), weights)
        channel.release()
    assert handle is not None
    assert len(memory_files()) == len(handle)
    channel.close()
    assert not memory_files()


def test_a_receiver_that_comes_too_late_gets_an_error() -> None:
    weights = tiny_weights()
    first, second = IpcChannel(CPU, bucket_bytes=BUCKET), IpcChannel(CPU, bucket_bytes=BUCKET)
    handle = first.send(weights)
    first.close()
    with pytest.raises(RunError, match="their sender died, or closed it"):
        arrived(first, handle, weights)
    second.send(weights)  # in files of the same numbers
    with pytest.raises(RunError, match="their sender closed it before it was read"):
        arrived(first, handle, weights)
    second.close()


def test_another_model_is_refused_by_the_name_of_what_differs() -> None:
    weights = tiny_weights()
    channel = IpcChannel(CPU)
    handle = channel.send(weights)
    for others, message in [
        (weights[:-1], r"sends model.norm.weight \[32\] in float32 where the engine's model has nothing more"),
        (
            [*weights, ("head", torch.zeros(2))],
            r"sends nothing more where the engine's model has head \[2\] in float32",
        ),
        ([(name, tensor.bfloat16()) for name, tensor in weights], "in float32 where .* in bfloat16"),
    ]:
        with pytest.raises(RunError, match=message):
            arrived(channel, handle, others)
    channel.close()


# --- by broadcast


def joined(num_receivers: int, num_senders: int = 1) -> list[CollectiveChannel]:
    """The senders first; all of them in this process."""
    size = num_receivers + num_senders
    ends = [CollectiveChannel("127.0.0.1", CPU, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET) for _ in range(size)]
    rendezvous = ends[0].open()
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda rank: ends[rank].join(rendezvous, rank, size, num_senders), range(size)))
    return ends


def listening_addresses() -> set[str]:
    """Addresses on which this process listens."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}


def test_the_processes_of_a_broadcast_or_a_world_listen_on_the_chosen_address_alone() -> None:
    before = listening_addresses()
    ends = joined(2)
    worker = Worker(0, 2, "127.0.0.2", timeout_s=TIMEOUT_S)
    host, _, port = worker.open_rendezvous().partition(":")
    try:
        assert listening_addresses() - before == {"127.0.0.1", "127.0.0.2"} - before
        assert TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S)).add("joined", 1) == 1
    finally:
        worker.close()
        for end in ends:
            end.close()


def test_a_broadcast_reaches_all_receivers_time_after_time() -> None:
    sender, *receivers = ends = joined(2)
    with ThreadPoolExecutor(2) as threads:
        for weights in (tiny_weights("llama"), tiny_weights("qwen2", seed=3), odd_weights()):
            futures = [threads.submit(arrived, receiver, None, weights) for receiver in receivers]
            assert sender.send(iter(weights)) is None
            for future in futures:
                assert_same(future.result(timeout=TIMEOUT_S), weights)
            assert sender.store.num_keys() > len(sender.announced) > 0
            sender.release()
            assert not any(sender.store.check([f"{sender.num_transfers}/{bucket}"]) for bucket in range(3))
    for end in ends:
        end.close()


class FaultyLink:
    """Changes a bit of what it carries."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, content: Tensor, root: int) -> Any:
        work = self.group.broadcast(content, root)

        def wait(timeout: timedelta) -> None:
            work.wait(timeout)
            content[0] ^= 1

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.group.abort()


def test_a_bucket_that_is_broadcast_and_arrives_changed_is_refused() -> None:
    sender, receiver = joined(1)
    weights, receiver.groups = odd_weights(), [FaultyLink(receiver.groups.pop())]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sender.send, iter(weights))
        with pytest.raises(RunError, match="bucket 0 of the weights did not arrive as it was sent"):
            arrived(receiver, None, weights)
        assert isinstance(sent.exception(timeout=20), RunError)


@pytest.mark.parametrize("num_senders", [2, 3])
def test_several_senders_send_a_part_each(num_senders: int) -> None:
    ends = joined(2, num_senders)
    senders, receivers = ends[:num_senders], ends[num_senders:]
    with ThreadPoolExecutor(len(ends)) as threads:
        for weights in (tiny_weights("llama"), odd_weights(), odd_weights()[:1]):
            futures = [threads.submit(arrived, receiver, None, weights) for receiver in receivers]
            sent = [threads.submit(sender.send, iter(weights)) for sender in senders]
            for future in futures:
                assert_same(future.result(timeout=TIMEOUT_S), weights)
            for done in sent:
                done.result(timeout=TIMEOUT_S)
            num_buckets = [len(sender.announced) for sender in senders]
            assert max(num_buckets) - min(num_buckets) <= 2, "one more each, and the first says which was the last"
            for sender in senders:
                sender.release()
    for end in ends:
        end.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_broadcast_ends_at_once_when_one_of_several_senders_fails(failing: int) -> None:
    weights, ends = tiny_weights(), joined(1, 2)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights[:3]
        raise ValueError("a trainer went away")

    with ThreadPoolExecutor(3) as threads:
        started = time.monotonic()
        sent = [threads.submit(end.send, broken() if rank == failing else weights) for rank, end in enumerate(ends[:2])]
        with pytest.raises(RunError, match="did not arrive"):
            arrived(ends[2], None, weights)
        with pytest.raises(ValueError, match="went away"):
            sent[failing].result(timeout=TIMEOUT_S)
        other = sent[1 - failing].exception(timeout=TIMEOUT_S)
    assert other is None or isinstance(other, RunError)
    assert time.monotonic() - started < AT_ONCE_S


def test_a_bucket_is_put_together_while_the_last_one_travels() -> None:
    """A sender with one bucket of memory would wait for the first to arrive, which it does when the second is asked
    for."""
    sender, receiver = joined(1)
    weights = [(str(number), torch.full((BUCKET // 4,), float(number))) for number in range(3)]
    packed: list[str] = []

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            packed.append(name)
            yield name, tensor

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sender.send, noted())
        wait_until(lambda: packed == ["0", "1", "2"], 10)  # before anyone has received anything
        assert_same(arrived(receiver, None, weights), weights)
        sent.result(timeout=TIMEOUT_S)
    for end in (sender, receiver):
        end.close()


def test_a_broadcast_ends_at_once_when_the_sender_fails() -> None:
    weights = tiny_weights()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights[:-3]
        raise ValueError("a trainer went away")

    sender, receiver = joined(1)
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        future = threads.submit(arrived, receiver, None, weights)
        with pytest.raises(ValueError, match="went away"):
            sender.send(broken())
        with pytest.raises(
            RunError, match=r"did not arrive(: its sender failed| within \d+ s; a process of the transfer died)"
        ):
            future.result(timeout=TIMEOUT_S)
    assert time.monotonic() - started < AT_ONCE_S
    with pytest.raises(RunError, match="closed by an earlier failure"):
        sender.send(weights)


def test_a_broadcast_ends_at_once_when_a_receiver_refuses() -> None:
    sender, receiver = joined(1)
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        future = threads.submit(arrived, receiver, None, tiny_weights("qwen3"))
        with pytest.raises(RunError, match="did not reach all receivers"):
            sender.send(tiny_weights())
        with pytest.raises(RunError, match="do not have the same model"):
            future.result(timeout=TIMEOUT_S)
    assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.slow
def test_a_receiver_that_dies_ends_the_broadcast_with_a_reason() -> None:
    sender = CollectiveChannel("127.0.0.1", CPU, timeout_s=within(30), bucket_bytes=BUCKET)
    rendezvous, first = sender.open(), tiny_weights()[0]
    code = f"""
import os, torch
from corral.runtime.transfer_channels import CollectiveChannel
channel = CollectiveChannel("127.0.0.1", torch.device("cpu"), timeout_s={within(30)})
channel.join("{rendezvous}", 1, 2)
next(channel.receive(None, [({first[0]!r}, torch.Size({list(first[1].shape)}), torch.float32)]))
os._exit(1)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    sender.join(rendezvous, 0, 2)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"did not reach all receivers within \d+ s; a process of the transfer died"):
        sender.send(tiny_weights())
    assert time.monotonic() - started < within(20)
    process.wait(timeout=TIMEOUT_S)


def test_a_receiver_that_does_not_come_is_not_waited_for_longer_than_the_limit() -> None:
    sender = CollectiveChannel("127.0.0.1", CPU, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"not all of 2 processes joined the weight transfer at 127\.0\.0\.1:"):
        sender.join(sender.open(), 0, 2)
    assert time.monotonic() - started < AT_ONCE_S


# --- between hosts


MEGABYTES, LARGE_BUCKET = 48, 4 * 2**20
END = """
import sys, time, torch
from pathlib import Path
from corral.runtime.transfer_channels import CollectiveChannel
address, file, rank, timeout_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
channel = CollectiveChannel(address, torch.device("cpu"), timeout_s=timeout_s, bucket_bytes=LARGE_BUCKET)
if rank == 0:
    file.with_suffix(".new").write_text(channel.open())
    file.with_suffix(".new").rename(file)
while not file.exists():
    time.sleep(0.02)
channel.join(file.read_text(), rank, 3, 2)
weights = [(str(number), torch.full((2**18,), float(number))) for number in range(MEGABYTES)]
if rank == 1:
    channel.store.wait(["1/2"])  # the other sender has announced its second bucket, which is the third of all
if rank < 2:
    channel.send(weights)
else:
    arrived = channel.receive(None, [(name, tensor.shape, tensor.dtype) for name, tensor in weights])
    assert [float(tensor[0]) for _, tensor in arrived] == list(range(MEGABYTES))
print("done", flush=True)
sys.stdin.read()  # none ends before all are done: the first one has the store
""".replace("MEGABYTES", str(MEGABYTES)).replace("LARGE_BUCKET", str(LARGE_BUCKET))


@pytest.mark.core
@pytest.mark.xdist_group("ray")
@pytest.mark.lab
@pytest.mark.slow
def test_every_node_of_trainers_sends_half_and_at_the_same_time(tmp_path: Path) -> None:
    """The second sender's link lets through what announces a bucket, and no bucket in the time of the test. The first
    one sends its next bucket all the same, which it would not if they took turns."""
    with Lab(3) as lab:
        lab.run(1, ["sh", "-c", "tc qdisc add dev eth0 root tbf rate 200kbit burst 256kb latency 400ms"])
        processes = []
        for rank, host in enumerate(lab.hosts):
            words = [host.address, str(tmp_path / "rendezvous"), str(rank), str(within(60))]
            command = [forking_python(), "-c", f"{FORKED}\n{END}", *words]
            processes.append(lab.begin(rank, command, PYTHONPATH=os.getcwd(), OMP_NUM_THREADS="1"))

        def sent_bytes(host: int) -> int:
            return int(Path(f"/sys/class/net/{lab.hosts[host].link}/statistics/rx_bytes").read_text())

        wait_until(lambda: sent_bytes(0) >= 2 * LARGE_BUCKET, 60, lab.errors.read_text)
        assert sent_bytes(1) < LARGE_BUCKET
        lab.run(1, ["sh", "-c", "tc qdisc del dev eth0 root"])
        assert [process.stdout.readline() for process in processes if process.stdout] == ["done\n"] * 3
        parts = [sent_bytes(host) / (MEGABYTES * 2**20) for host in range(3)]
    assert parts == [pytest.approx(0.5, abs=0.05)] * 2 + [pytest.approx(0, abs=0.05)]


# --- through Ray


@pytest.mark.core
@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_weights_go_through_the_object_store() -> None:
    ray = pytest.importorskip("ray")
    from corral.runtime.connection import quietly

    with quietly():
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    try:
        weights = odd_weights()
        channel = ObjectChannel(CPU, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET)
        handle = channel.send(iter(weights))

        @ray.remote
        def receive(handle: TransferHandle, expected: WeightLayout) -> Weights:
            return [(name, t.clone()) for name, t in ObjectChannel(CPU, timeout_s=TIMEOUT_S).receive(handle, expected)]

        assert_same(ray.get(receive.remote(handle, layout(weights)), timeout=within(60)), weights)
        channel.release()
        assert channel.sent == ()
    finally:
        ray.shutdown()
