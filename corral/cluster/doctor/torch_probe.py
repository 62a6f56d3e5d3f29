"""A process that uses torch on behalf of the doctor, and may hang or crash in its place.

It reads one request per line from its standard input and answers each with one line. What libraries print goes to its
standard error. `TorchProbe` is the caller's side, `serve` the process itself.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from corral.child_process import describe_exit, die_with_parent, start_child, terminate_group
from corral.data.plugins import error_line
from corral.runtime import network

LATENCY_CALLS = 20
SIZES = {"gloo": 8 * 2**20, "nccl": 128 * 2**20}  # bytes of the tensor that is summed to measure bandwidth
MEASURE_S = 0.3


class ProbeFailed(Exception):
    """The probe did not answer in time, or ended. The message says which."""


class TorchProbe:
    """Sends one request at a time. A process that failed is ended, and the next request starts another."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.process is None:
            program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
            self.process = start_child(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self.environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )

    def call(self, function: str, within_s: float, **arguments: Any) -> Any:
        """Result of one of `FUNCTIONS` in the probe."""
        self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([function, arguments]).encode() + b"\n")
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
        response = json.loads(answer)
        if "error" in response:
            raise ProbeFailed(response["error"])
        return response["result"]

    def end(self) -> str:
        """Ends the process. Returns how it ended."""
        process, self.process = self.process, None
        if process is None:
            return "had ended"
        code = terminate_group(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return describe_exit(code)


# --- in the process


def serve() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answers.write(json.dumps({"result": FUNCTIONS[function](**arguments)}) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": error_line(error)}) + "\n")


def inspect_torch() -> dict[str, Any]:
    """Fields of `TorchFacts`."""
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
    if facts["cuda"] and facts["available"]:
        kinds = {
            (torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in range(facts["num_devices"])
        }
        has = torch.cuda.get_arch_list()
        facts["without_code"] = [f"{name} (sm_{a}{b})" for name, (a, b) in sorted(kinds) if not has_code((a, b), has)]
    return facts


def has_code(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a build of torch has code for a GPU: machine code of its generation (`sm_80`), or text that its driver
    compiles (`compute_70`), of no newer GPU than it is."""
    for kind, number in (one.split("_") for one in built_for):
        major, minor = divmod(int(re.sub(r"\D", "", number)), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


STORES: dict[int, Any] = {}  # of the process groups that this process is the first of, by port; one at a time


def open_store(address: str, limit_s: float) -> int:
    """Opens the store of a process group, of which this process is rank 0. Returns its port."""
    STORES.clear()
    store = network.open_store(address, timedelta(seconds=limit_s))
    STORES[store.port] = store
    return int(store.port)


def measure_group(
    address: str, port: int, rank: int, size: int, backend: str, device: str, limit_s: float
) -> dict[str, Any]:
    """Fields of `GroupSpeed`: seconds for an all-reduce of one number, bytes per second that a rank sends in a large
    one and in an all-to-all, and the transports that NCCL chose."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=limit_s)
    if device != "cpu":
        torch.cuda.set_device(device)
        log_nccl()
    store = STORES.get(port) or TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        one, many = torch.ones(1, device=device), torch.ones(SIZES[backend] // 4 // size * size, device=device)
        received = torch.empty_like(many)
        latency_s = min(timed(lambda: dist.all_reduce(one), device) for _ in range(LATENCY_CALLS))
        sent = many.nbytes * (size - 1) / size
        return {
            "latency_s": latency_s,
            "bytes_per_s": 2 * sent / fastest(lambda: dist.all_reduce(many), device),
            "exchanged_per_s": sent / fastest(lambda: dist.all_to_all_single(received, many), device),
            "transports": sorted(set(re.findall(r" via (P2P|SHM|NET/\w+)", read_nccl_log()))),
        }
    finally:
        dist.destroy_process_group()
        STORES.clear()


def log_nccl() -> None:
    """Has NCCL write how it connects ranks into memory, unless the user has it write elsewhere. It asks once in a
    process, before its first group."""
    if "NCCL_DEBUG_FILE" not in os.environ:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{os.memfd_create('nccl')}"}


def read_nccl_log() -> str:
    file = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    return file.read_text(errors="replace") if file.is_file() else ""


def fastest(call: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of several calls; all ranks stop after the same one."""
    took_s, began = [timed(call, device)], time.monotonic()
    while agree(time.monotonic() - began < MEASURE_S, device):
        took_s.append(timed(call, device))
    return min(took_s)


def agree(more: bool, device: str) -> bool:
    """Whether all ranks want to go on."""
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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"torch": inspect_torch, "open_store": open_store, "measure_group": measure_group}
}
