"""What the GPU vendors' tools report: `nvidia-smi -q -x` and `rocm-smi --json`, parsed into one form."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TOOL_S = 30.0
MIB = 2**20
NVIDIA = ("nvidia-smi", "-q", "-x")
ROCM = ("rocm-smi", "--showmeminfo", "vram", "--showpids", "--showproductname", "--showdriverversion", "--json")


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    memory: int | None  # bytes, where the tool knows


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total: int
    used: int
    processes: tuple[GpuProcess, ...]  # AMD's tool reports those of all GPUs together
    is_broken: str = ""  # what the tool reports to be wrong with it
    is_exclusive: bool = False  # for one process at a time
    is_split: bool = False  # into several small ones (MIG)

    @property
    def free(self) -> int:
        return self.total - self.used


@dataclass(frozen=True)
class GpuInventory:
    vendor: Literal["nvidia", "amd"]
    driver: str = ""
    runtime: str = ""  # the newest CUDA that the driver supports; empty for AMD
    gpus: tuple[Gpu, ...] = ()
    error: str = ""  # what the tool printed instead of an answer


def device_vendor() -> Literal["nvidia", "amd", ""]:
    """Vendor of the GPUs by their device files, which are there with a driver, tool or no tool."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else ""


def query_gpus() -> GpuInventory | None:
    """None: there is no tool, so most likely no GPU."""
    if shutil.which("nvidia-smi"):
        code, output = run_tool(NVIDIA)
        return parse_nvidia(output) if code == 0 else failed_query("nvidia", output)
    if shutil.which("rocm-smi"):
        code, output = run_tool(ROCM)
        return parse_rocm(output) if code == 0 else failed_query("amd", output)
    return None


def run_tool(command: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and output. The timeout is there because a driver in a bad state lets its tools hang."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    except subprocess.TimeoutExpired:
        return 1, f"{command[0]} did not answer within {TOOL_S:g} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def failed_query(vendor: Literal["nvidia", "amd"], output: str) -> GpuInventory:
    return GpuInventory(vendor, error=output.strip().partition("\n")[0].strip() or "it failed without a word")


def parse_nvidia(output: str) -> GpuInventory:
    try:
        root = xml.fromstring(output)
    except xml.ParseError:
        return failed_query("nvidia", output)
    gpus = tuple(parse_nvidia_gpu(index, node) for index, node in enumerate(root.iter("gpu")))
    return GpuInventory("nvidia", text_at(root, "driver_version"), text_at(root, "cuda_version"), gpus)


def parse_nvidia_gpu(index: int, node: xml.Element) -> Gpu:
    processes = [
        GpuProcess(int(text_at(one, "pid")), parse_mebibytes(text_at(one, "used_memory")))
        for one in node.iter("process_info")
        if "C" in text_at(one, "type") and text_at(one, "pid").isdecimal()
    ]
    uncorrected = sum(
        int(error.text or 0)
        for error in node.findall("ecc_errors/volatile/*")
        if "uncorrect" in error.tag and (error.text or "").isdecimal()
    )
    action = text_at(node, "gpu_recovery_action")
    broken = f"{uncorrected} uncorrected memory errors" if uncorrected else ""
    if action not in ("", "None", "N/A"):
        broken = f"it needs: {action}"
    return Gpu(
        index=index,
        name=text_at(node, "product_name"),
        total=parse_mebibytes(text_at(node, "fb_memory_usage/total")) or 0,
        used=parse_mebibytes(text_at(node, "fb_memory_usage/used")) or 0,
        processes=tuple(processes),
        is_broken=broken,
        is_exclusive=text_at(node, "compute_mode") == "Exclusive_Process",
        is_split=text_at(node, "mig_mode/current_mig") == "Enabled",
    )


def text_at(node: xml.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def parse_mebibytes(written: str) -> int | None:
    """Bytes of `81559 MiB`; None for `N/A`, where the tool may not know."""
    found = re.fullmatch(r"(\d+) MiB", written)
    return int(found[1]) * MIB if found else None


def parse_rocm(output: str) -> GpuInventory:
    try:
        found: dict[str, dict[str, Any]] = json.loads(output[output.index("{") :])
    except ValueError:
        return failed_query("amd", output)
    system = found.get("system", {})
    processes = []
    for key, value in system.items():
        if re.fullmatch(r"PID ?\d+", key):  # `name, number of GPUs, bytes, bytes of the copy engine, occupancy`
            cells = [cell.strip() for cell in str(value).split(",")]
            memory = int(cells[2]) if len(cells) > 2 and cells[2].isdecimal() else None
            processes.append(GpuProcess(int(key[3:].strip()), memory))
    cards = sorted((key for key in found if re.fullmatch(r"card\d+", key)), key=lambda key: int(key[4:]))
    gpus = [
        Gpu(
            index=int(card[4:]),
            name=str(found[card].get("Card Series") or found[card].get("Card series") or "AMD GPU"),
            total=int(found[card].get("VRAM Total Memory (B)", 0)),
            used=int(found[card].get("VRAM Total Used Memory (B)", 0)),
            processes=tuple(processes),
        )
        for card in cards
    ]
    return GpuInventory("amd", str(system.get("Driver version", "")), gpus=tuple(gpus))
