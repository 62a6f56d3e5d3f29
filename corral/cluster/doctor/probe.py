"""A process that uses torch on behalf of the doctor, and may hang or crash in its place.

It reads one order per line on its standard input and answers each with one line. What libraries print goes to its
standard error. `Probe` is how others see it.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from corral.data.plugins import error_line

PR_SET_PDEATHSIG = 1
LATENCY_CALLS = 20
SIZES = {"gloo": 8 * 2**20, "nccl": 128 * 2**20}
"""Bytes of the tensor that is summed to measure bandwidth."""
MEASURE_S = 0.3


class ProbeFailed(Exception):
    """It did not answer in time, or ended. The message says which."""


class Probe:
    """The other side of `serve`. One order at a time. One that failed is gone, and the next order starts another."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.process is None:
            program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self.environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                start_new_session=True,
            )

    def ask(self, order: str, within_s: float, **arguments: Any) -> Any:
        self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([order, arguments]).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise ProbeFailed(f"its process {self.end()}") from None
        answer, deadline, ready = b"", time.monotonic() + within_s, select.poll()
        ready.register(self.process.stdout, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not ready.poll(max(0, deadline - time.monotonic()) * 1000):
                self.end()
                raise ProbeFailed(f"no result within {within_s:g} s")
            if not (more := os.read(self.process.stdout.fileno(), 65536)):
                raise ProbeFailed(f"its process {self.end()}")
            answer += more
        said = json.loads(answer)
        if "error" in said:
            raise ProbeFailed(said["error"])
        return said["result"]

    def end(self) -> str:
        """How it ended."""
        process, self.process = self.process, None
        if process is None:
            return "had ended"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"


# --- inside


def serve() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order, arguments = json.loads(line)
        try:
            answers.write(json.dumps({"result": ORDERS[order](**arguments)}) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": error_line(error)}) + "\n")


def look_at_torch() -> dict[str, Any]:
    """The fields of `TorchFacts`."""
    try:
        import torch
    except Exception as error:  # a library that is missing or of another version, most often
        return {"error": error_line(error)}
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "num_devices": torch.cuda.device_count(),
    }
    if (facts["cuda"] or facts["hip"]) and not facts["available"]:
        try:
            torch.cuda.init()
        except Exception as error:
            facts["why_not"] = " ".join(str(error).split())
    return facts


STORES: dict[int, Any] = {}
"""Where others meet, by port. One at a time."""


def open_meeting(address: str, limit_s: float) -> int:
    """The port at which two or more probes will meet; this one is the first of them."""
    from torch._C._distributed_c10d import TCPStore

    STORES.clear()
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    STORES[store.port] = store
    return int(store.port)


def all_reduce(address: str, port: int, rank: int, size: int, backend: str, device: str, limit_s: float) -> list[float]:
    """Seconds for one number, and bytes per second for many, as each of them sends and receives them."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=limit_s)
    if device != "cpu":
        torch.cuda.set_device(device)
    store = STORES.get(port) or TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        one, many = (torch.ones(number, device=device) for number in (1, SIZES[backend] // 4))
        latency_s = min(timed(lambda: dist.all_reduce(one), device) for _ in range(LATENCY_CALLS))
        bulk_s, began = [timed(lambda: dist.all_reduce(many), device)], time.monotonic()
        while agree(time.monotonic() - began < MEASURE_S, device):
            bulk_s.append(timed(lambda: dist.all_reduce(many), device))
        return [latency_s, SIZES[backend] * 2 * (size - 1) / size / min(bulk_s)]
    finally:
        dist.destroy_process_group()
        STORES.clear()


def agree(more: bool, device: str) -> bool:
    """Whether all want to go on."""
    import torch
    import torch.distributed as dist

    votes = torch.tensor([float(more)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def timed(call: Callable[[], object], device: str) -> float:
    import torch

    began = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


ORDERS: dict[str, Callable[..., Any]] = {"torch": look_at_torch, "meet": open_meeting, "all_reduce": all_reduce}
