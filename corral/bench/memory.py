"""What a side has taken of the device's memory, and which device it is."""

import platform
import resource

import torch


def memory(device: torch.device) -> dict[str, float]:
    """In GB (10^9 bytes): torch's own peak, and what is in use on the device by all processes of the side. On a CPU
    the most that the process has had."""
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


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
