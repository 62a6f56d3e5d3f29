"""Report of a node about itself: versions, memory, GPUs. A node stores it in the GCS when it joins, so others read
it without asking the node. This needs no Ray."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

SAME_EVERYWHERE = ("corral", "ray", "python", "torch")
"""Ray's messages and torch's collectives change between versions; a mixture fails late, or hangs."""
TOOL_S = 30.0
MIB = 2**20
NVIDIA = ("nvidia-smi", "-q", "-x")
ROCM = ("rocm-smi", "--showmeminfo", "vram", "--showpids", "--showproductname", "--showdriverversion", "--json")


@dataclass(frozen=True)
class NodeReport:
    """Versions, memory and devices of a node."""

    corral: str
    ray: str
    python: str
    torch: str
    driver: str  # of the GPUs, or empty
    device_names: tuple[str, ...]
    memory_bytes: int
    executable: str  # the Python that runs Corral there

    @classmethod
    def own(cls) -> Self:
        gpus = query_gpus()
        return cls(
            corral=installed_version("corral"),
            ray=installed_version("ray"),
            python=platform.python_version(),
            torch=torch_version(),
            driver=gpus.driver if gpus else "",
            device_names=tuple(gpu.name for gpu in gpus.gpus) if gpus else (),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            executable=sys.executable,
        )

    @classmethod
    def read(cls, stored: Any) -> Self | None:
        """None where the node was not started with `corral up`, or with another version of it."""
        try:
            return cls(**{**stored, "device_names": tuple(stored["device_names"])})
        except (TypeError, KeyError):
            return None

    def differences(self, other: "NodeReport") -> list[str]:
        """Versions that must be the same and are not, as `torch 2.13.0 here, 2.11.0 there`."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in SAME_EVERYWHERE)
        return [f"{name} {here} here, {there} there" for name, here, there in pairs if here != there]


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def torch_version() -> str:
    """The version with its build (`+cpu`, `+cu130`), which metadata leaves out; without the seconds of an import."""
    for folder in sys.path:
        file = Path(folder, "torch", "version.py")
        if file.is_file():
            line = next((line for line in file.read_text().splitlines() if line.startswith("__version__")), "")
            return line.partition("=")[2].strip().strip("'\"") or installed_version("torch")
    return installed_version("torch")


# --- what the GPU vendors' tools report, `nvidia-smi -q -x` and `rocm-smi --json`, parsed into one form


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
