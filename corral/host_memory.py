"""How much memory the processes of a node may use: the machine's, or what the limit of a container or job leaves."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60
"""Version 1 of cgroups has a number of that size for `no limit`."""


@dataclass(frozen=True)
class NodeMemory:
    total: int  # that this node's processes may use: the machine's, or the limit of the container or job
    available: int
    limited: bool  # by a cgroup


def node_memory() -> NodeMemory:
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, available = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    limits = cgroup_memory(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    for limit, used in limits:
        if limit < min(total, UNLIMITED):
            total, available = limit, min(available, max(0, limit - used))
    return NodeMemory(total, available, any(limit == total for limit, _ in limits))


def cgroup_memory(own: str, root: Path) -> list[tuple[int, int]]:
    """Limit and use of the cgroups that this process is in, of both versions. `own`: /proc/self/cgroup.

    What is cached of files counts as used, and the kernel frees it before the limit strikes; it is left out."""
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for folder in (base / path.lstrip("/"), base):  # in a container the group's own path is not visible
            try:
                limit, used = ((folder / name).read_text().strip() for name in files[:2])
                cached = re.search(rf"^{files[2]} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            except OSError:
                continue
            if limit != "max":
                found.append((int(limit), int(used) - int(cached[1] if cached else 0)))
            break
    return [(limit, used) for limit, used in found if limit < UNLIMITED]


def resident_memory() -> int:
    """Bytes of memory that this process has; 0 where the system does not say (macOS)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def available_memory() -> int:
    """Bytes that this node's processes may still take; 0 where the system does not say (macOS)."""
    try:
        return node_memory().available
    except FileNotFoundError:
        return 0
