"""The device: its name, its memory, and its peaks, measured here and now by a large matrix product and a large copy."""

import platform
import resource
import statistics
import time
from collections.abc import Callable

import torch

from corral.bench.side_process import SideReporter
from corral.bench.workloads import BenchSettings

WARM_UP, MEASURED = 3, 10


def measure_peaks(settings: BenchSettings, reporter: SideReporter) -> None:
    """Reports TFLOP/s of a square product of random matrices, and TB/s of a copy, bytes read and written."""
    size, num_bytes = (8192, 2**32) if settings.device == "cuda" else (512, 2**25)
    device = torch.device(settings.device)
    # Random numbers: with zeros a GPU draws less power and computes faster than it ever would.
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, settings.dtype)) for _ in range(2))
    product = torch.empty_like(left)
    matrix_s = median_seconds(lambda: torch.mm(left, right, out=product), device)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    reporter.facts(
        device=device_name(device),
        matrix_tflops=2 * size**3 / matrix_s / 1e12,
        matrix=f"{size} x {size} x {size}, {settings.dtype}, random",
        copy_tbs=2 * num_bytes / copy_s / 1e12,
        copy=f"{num_bytes // 2**20} MiB, bytes read and written",
    )


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        work()
    return statistics.median(seconds(work, device) for _ in range(MEASURED))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call; on a GPU by events, so that launching is not in it."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def memory_usage(device: torch.device) -> dict[str, float]:
    """Memory in GB (10^9 bytes): torch's peak, and what all processes use of the device. On a CPU the process' peak."""
    if device.type != "cuda":
        return {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "device_gb": (total - free) / 1e9,
    }


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
