"""Some processes that train together: started once, given functions to run on all of them at the same time."""

import ctypes
import gc
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from deadlines import within

TIMEOUT_S = within(120)
M_MMAP_THRESHOLD = -3


class Team:
    """Forked, so that they start at once and know everything that the test knows. They talk through gloo."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"tcp://localhost:{free.getsockname()[1]}"
        self.pipes, self.processes, self.num_runs = [], [], 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, address, rank, size), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each of them returned."""
        self.num_runs += 1
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(f"rank {rank} hangs in {function.__name__}{arguments}; others said {answers}")
            answers.append(pipe.recv())
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


def serve(pipe: Connection, address: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
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
