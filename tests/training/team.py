"""Some processes that train together: started once, given functions to run on all of them at the same time."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import within

from corral.training.replicas import set_nccl_variables

TIMEOUT_S = within(120)
M_MMAP_THRESHOLD = -3
DEVICE_NAME = os.environ.get("CORRAL_TEST_DEVICE")
DEVICE = torch.device(DEVICE_NAME or "cpu")
"""Device of the tests that are marked `gpu`, which all ranks of a team share: `make test-gpu` names it."""
ROUNDING, GRADIENT_ROUNDING = (5e-6, 5e-6) if DEVICE.type == "cpu" else (1e-5, 1e-4)
"""How far weights and gradients in float32 may be from those of one process, relative to the largest number in each
tensor. A GPU adds in another order each time."""
on_gpu_only = pytest.mark.skipif(DEVICE_NAME is None, reason="needs ranks on a GPU: make test-gpu")
HOSTS_OF_THEIR_OWN = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""NCCL refuses two ranks with one host and GPU. Ranks with different `NCCL_HOSTID` talk over sockets, on loopback."""
MEASURED: dict[str, float] = {}
"""What the running test has found, for the table of `make test-gpu`: its number of ranks, and the largest deviation."""


class Team:
    """Forked, so that they start at once and know everything that the test knows, and talk through gloo. Where a device
    is named they are started anew, as CUDA demands, and know what they import; on a GPU they talk through NCCL."""

    def __init__(self, size: int, has_world: bool = True) -> None:
        """`has_world`: whether all of them are one world of torch.distributed."""
        context = multiprocessing.get_context("fork" if DEVICE_NAME is None else "spawn")
        self.pipes, self.processes, self.num_runs = [], [], 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, has_world, rank, size), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        if has_world:  # a store of ours would be in the forks, too, and end when one of them frees it
            port = self.pipes[0].recv()
            for pipe in self.pipes[1:]:
                pipe.send(port)

    def run(self, function: Callable[..., Any], *arguments: Any, dying: Collection[int] = ()) -> list[Any]:
        """Returns what each of them returned; None for those of which it is expected that they die."""
        self.num_runs += 1
        MEASURED["ranks"] = len(self.pipes)
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                for process in self.processes:
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1)  # they write where they are
                self.close()
                raise TimeoutError(f"rank {rank} hangs in {function.__name__}{arguments}; others said {answers}")
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):  # the second where it had not taken the function yet
                self.processes[rank].join()
                died = Failure(f"rank {rank} died with {self.processes[rank].exitcode}")
                answers.append(None if rank in dying else died)
        if errors := [answer for answer in answers if isinstance(answer, Failure)]:
            raise AssertionError("\n".join(error.text for error in errors))
        return answers

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def serve(pipe: Connection, has_world: bool, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    os.environ["RANK"] = str(rank)
    if DEVICE.type == "cuda":
        os.environ |= HOSTS_OF_THEIR_OWN | {"NCCL_HOSTID": f"host of rank {rank}"}
        set_nccl_variables()
        torch.cuda.set_device(DEVICE)
    if has_world:
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        port = pipe.recv() if rank else 0
        store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except BaseException:
            pipe.send(Failure(f"rank {rank}: {traceback.format_exc()}"))


def own_memory() -> None:
    """Makes a fork's memory its own and what it needs: the collector writes to all of Python's objects, so none of
    their pages are copied later; memory that the parent had freed is given back, and so is, from now on, each tensor of
    a megabyte when it is freed."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
