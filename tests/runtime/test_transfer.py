"""Weights between processes: what arrives is what was sent, and what goes wrong ends soon, with a reason."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import DEVICE, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.recipe.errors import RunError
from corral.rollout.engine import WeightLayout
from corral.runtime.transfer_channels import (
    Channel,
    CollectiveChannel,
    IpcChannel,
    ObjectChannel,
    TransferHandle,
    pack,
    reused_memory,
)

CPU = torch.device("cpu")
BUCKET = 10_000
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


# --- through memory of the node


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert_same(torch.load(tmp_path / "received"), [(name, tensor.cpu()) for name, tensor in weights])
    channel.close()


def memory_files() -> set[str]:
    links = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return {target for link in links if os.path.islink(link) and "corral-" in (target := os.readlink(link))}


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


def joined(num_receivers: int, timeout_s: float = 20.0) -> list[CollectiveChannel]:
    """The sender first; all of them in this process."""
    size = num_receivers + 1
    ends = [CollectiveChannel("127.0.0.1", CPU, timeout_s=timeout_s, bucket_bytes=BUCKET) for _ in range(size)]
    rendezvous = ends[0].open()
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda rank: ends[rank].join(rendezvous, rank, size), range(size)))
    return ends


def test_a_broadcast_reaches_all_receivers_time_after_time() -> None:
    sender, *receivers = ends = joined(2)
    with ThreadPoolExecutor(2) as threads:
        for weights in (tiny_weights("llama"), tiny_weights("qwen2", seed=3), odd_weights()):
            futures = [threads.submit(arrived, receiver, None, weights) for receiver in receivers]
            assert sender.send(iter(weights)) is None
            for future in futures:
                assert_same(future.result(timeout=20), weights)
            assert sender.store.num_keys() > len(sender.announced) > 0
            sender.release()
            assert not any(sender.store.check([f"{sender.num_transfers}/{bucket}"]) for bucket in range(3))
    for end in ends:
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
        with pytest.raises(RunError, match="of the weights did not arrive within 20 s; a process of the transfer died"):
            future.result(timeout=20)
    assert time.monotonic() - started < 10
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
            future.result(timeout=20)
    assert time.monotonic() - started < 10


def test_a_receiver_that_dies_ends_the_broadcast_with_a_reason() -> None:
    sender = CollectiveChannel("127.0.0.1", CPU, timeout_s=30.0, bucket_bytes=BUCKET)
    rendezvous, first = sender.open(), tiny_weights()[0]
    code = f"""
import os, torch
from corral.runtime.transfer_channels import CollectiveChannel
channel = CollectiveChannel("127.0.0.1", torch.device("cpu"), timeout_s=30.0)
channel.join("{rendezvous}", 1, 2)
next(channel.receive(None, [({first[0]!r}, torch.Size({list(first[1].shape)}), torch.float32)]))
os._exit(1)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    sender.join(rendezvous, 0, 2)
    started = time.monotonic()
    with pytest.raises(RunError, match="did not reach all receivers within 30 s; a process of the transfer died"):
        sender.send(tiny_weights())
    assert time.monotonic() - started < 20
    process.wait(timeout=20)


def test_a_receiver_that_does_not_come_is_not_waited_for_longer_than_the_limit() -> None:
    sender = CollectiveChannel("127.0.0.1", CPU, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"not all of 2 processes joined the weight transfer at 127\.0\.0\.1:"):
        sender.join(sender.open(), 0, 2)
    assert time.monotonic() - started < 10


# --- through Ray


@pytest.mark.slow
def test_weights_go_through_the_object_store() -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    try:
        weights = odd_weights()
        channel = ObjectChannel(CPU, timeout_s=20.0, bucket_bytes=BUCKET)
        handle = channel.send(iter(weights))

        @ray.remote
        def receive(handle: TransferHandle, expected: WeightLayout) -> Weights:
            return [(name, t.clone()) for name, t in ObjectChannel(CPU, timeout_s=20.0).receive(handle, expected)]

        assert_same(ray.get(receive.remote(handle, layout(weights)), timeout=60), weights)
        channel.release()
        assert channel.sent == ()
    finally:
        ray.shutdown()
