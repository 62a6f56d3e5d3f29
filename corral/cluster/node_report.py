"""Report of a node about itself: versions, memory, devices. A node stores it in the GCS when it joins, so others read
it without asking the node. This needs no Ray."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from corral.cluster.smi import query_gpus

SAME_EVERYWHERE = ("corral", "ray", "python", "torch")
"""Ray's messages and torch's collectives change between versions; a mixture fails late, or hangs."""


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
    """The version with its build (`+cpu`, `+cu130`), which the package's metadata leaves out; without the seconds that
    an import takes."""
    for folder in sys.path:
        file = Path(folder, "torch", "version.py")
        if file.is_file():
            line = next((line for line in file.read_text().splitlines() if line.startswith("__version__")), "")
            return line.partition("=")[2].strip().strip("'\"") or installed_version("torch")
    return installed_version("torch")
