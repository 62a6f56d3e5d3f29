"""What the device can do at best, measured here and now: a large matrix product, and a large copy."""

import statistics
import time
from collections.abc import Callable

import torch

from corral.bench.memory import device_name
from corral.bench.settings import Settings
from corral.bench.side import Tell

WARM_UP, MEASURED = 3, 10


def ceilings(settings: Settings, tell: Tell) -> None:
    """TFLOP/s of a square product on random numbers, and TB/s of a copy, read and written."""
    on_gpu = settings.device == "cuda"
    size, num_bytes = (8192, 2**32) if on_gpu else (512, 2**25)
    device = torch.device(settings.device)
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, settings.dtype)) for _ in range(2))
    product = torch.empty_like(left)
    matrix_s = median_s(lambda: torch.mm(left, right, out=product), device)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    tell.facts(
        device=device_name(device),
        matrix_tflops=2 * size**3 / matrix_s / 1e12,
        matrix=f"{size} x {size} x {size}, {settings.dtype}, random",
        copy_tbs=2 * num_bytes / copy_s / 1e12,
        copy=f"{num_bytes // 2**20} MiB, bytes read and written",
    )


def median_s(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        work()
    return statistics.median(seconds(work, device) for _ in range(MEASURED))


def seconds(work: Callable[[], object], device: torch.device) -> float:
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
