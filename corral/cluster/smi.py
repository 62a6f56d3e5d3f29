"""What the GPU vendors' tools say: `nvidia-smi -q -x` and `rocm-smi --json`, read into one form."""

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
    memory: int | None
    """Bytes, where the tool knows."""


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total: int
    used: int
    processes: tuple[GpuProcess, ...]
    """On AMD's, of all GPUs: its tool does not say which."""
    is_broken: str = ""
    """What the tool says is wrong with it."""
    is_exclusive: bool = False
    """For one process at a time."""
    is_split: bool = False
    """Into several small ones (MIG)."""

    @property
    def free(self) -> int:
        return self.total - self.used


@dataclass(frozen=True)
class Gpus:
    vendor: Literal["nvidia", "amd"]
    driver: str
    runtime: str
    """The newest CUDA that the driver supports; of AMD's empty."""
    gpus: tuple[Gpu, ...]
    error: str = ""
    """What the tool said instead of an answer."""


def has_devices() -> Literal["nvidia", "amd", ""]:
    """By their device files, which are there with a driver, tool or no tool."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else ""


def ask_tools() -> Gpus | None:
    """None: there is no tool, so most likely no GPU."""
    if shutil.which("nvidia-smi"):
        code, said = run(NVIDIA)
        return parse_nvidia(said) if code == 0 else Gpus("nvidia", "", "", (), first_words(said))
    if shutil.which("rocm-smi"):
        code, said = run(ROCM)
        return parse_rocm(said) if code == 0 else Gpus("amd", "", "", (), first_words(said))
    return None


def run(command: tuple[str, ...]) -> tuple[int, str]:
    """A driver in a bad state lets its tools hang."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    except subprocess.TimeoutExpired:
        return 1, f"{command[0]} did not answer within {TOOL_S:g} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def first_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0] if lines else "it failed without a word"


def parse_nvidia(said: str) -> Gpus:
    try:
        root = xml.fromstring(said)
    except xml.ParseError:
        return Gpus("nvidia", "", "", (), first_words(said))
    gpus = tuple(parse_nvidia_gpu(index, node) for index, node in enumerate(root.iter("gpu")))
    return Gpus("nvidia", text(root, "driver_version"), text(root, "cuda_version"), gpus)


def parse_nvidia_gpu(index: int, node: xml.Element) -> Gpu:
    processes = [
        GpuProcess(int(text(one, "pid")), mebibytes(text(one, "used_memory")))
        for one in node.iter("process_info")
        if "C" in text(one, "type") and text(one, "pid").isdecimal()
    ]
    uncorrected = sum(
        int(error.text or 0)
        for error in node.findall("ecc_errors/volatile/*")
        if "uncorrect" in error.tag and (error.text or "").isdecimal()
    )
    action = text(node, "gpu_recovery_action")
    broken = f"{uncorrected} uncorrected memory errors" if uncorrected else ""
    if action not in ("", "None", "N/A"):
        broken = f"it needs: {action}"
    return Gpu(
        index=index,
        name=text(node, "product_name"),
        total=mebibytes(text(node, "fb_memory_usage/total")) or 0,
        used=mebibytes(text(node, "fb_memory_usage/used")) or 0,
        processes=tuple(processes),
        is_broken=broken,
        is_exclusive=text(node, "compute_mode") == "Exclusive_Process",
        is_split=text(node, "mig_mode/current_mig") == "Enabled",
    )


def text(node: xml.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def mebibytes(written: str) -> int | None:
    """`81559 MiB`; `N/A` where the tool may not know."""
    found = re.fullmatch(r"(\d+) MiB", written)
    return int(found[1]) * MIB if found else None


def parse_rocm(said: str) -> Gpus:
    try:
        found: dict[str, dict[str, Any]] = json.loads(said[said.index("{") :])
    except ValueError:
        return Gpus("amd", "", "", (), first_words(said))
    system = found.get("system", {})
    processes = tuple(
        parse_rocm_process(key, str(value)) for key, value in system.items() if re.fullmatch(r"PID ?\d+", key)
    )
    cards = sorted((key for key in found if re.fullmatch(r"card\d+", key)), key=lambda key: int(key[4:]))
    gpus = tuple(
        Gpu(
            index=int(card[4:]),
            name=str(found[card].get("Card Series") or found[card].get("Card series") or "AMD GPU"),
            total=int(found[card].get("VRAM Total Memory (B)", 0)),
            used=int(found[card].get("VRAM Total Used Memory (B)", 0)),
            processes=processes,
        )
        for card in cards
    )
    return Gpus("amd", str(system.get("Driver version", "")), "", gpus)


def parse_rocm_process(key: str, value: str) -> GpuProcess:
    """`PID4711`: `name, number of GPUs, bytes, bytes of the copy engine, occupancy`"""
    cells = [cell.strip() for cell in value.split(",")]
    memory = int(cells[2]) if len(cells) > 2 and cells[2].isdecimal() else None
    return GpuProcess(int(key[3:].strip()), memory)
