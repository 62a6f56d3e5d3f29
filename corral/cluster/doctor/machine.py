"""What a node has for its processes: shared memory, memory, open files, disks."""

import os
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corral.cluster.doctor.findings import Finding
from corral.recipe.memory import human_bytes

MIB, GIB = 2**20, 2**30
Container = Literal["", "docker", "podman", "kubernetes", "container"]
"""Empty: none, as far as one can tell from inside."""

LEAST_SHM = 512 * MIB
"""NCCL takes about 10 MB for each pair of GPUs of a node, torch puts tensors there that processes share, and Ray its
object store. Containers have 64 MiB unless told otherwise, and NCCL then fails with `unhandled system error`."""
GOOD_SHM = 8 * GIB
OF_RAY = 0.3
"""Ray wants so much of the memory for its objects, and uses the disk where /dev/shm is smaller."""
NEARLY_FULL = 0.1
LEAST_FILES, GOOD_FILES = 1024, 8192
"""Each worker has connections to all others; below 8192 Ray itself warns."""
GOOD_PROCESSES = 2048
LEAST_DISK, GOOD_DISK = 256 * MIB, 10 * GIB
RAYS = "Ray's logs and objects"
RAY_STOPS_AT = 0.95
"""Used part of the memory, above which Ray kills workers; and of the disk with its temporary folder, above which it
writes no more objects there."""
LEAST_MEMORY = 2 * GIB
UNLIMITED = 2**60
"""Version 1 of cgroups has a number of that size for `no limit`."""


# --- shared memory


@dataclass(frozen=True)
class SharedMemory:
    total: int
    free: int
    objects: int
    """Bytes that Ray's objects may take."""
    largest: tuple[str, ...]
    """Files in it, with sizes: what is left of processes that were killed."""
    container: Container


def shared_memory(objects: int | None) -> SharedMemory:
    """`objects`: bytes that Ray was told to take, where that is known."""
    found = os.statvfs("/dev/shm")
    sizes = []
    for path in Path("/dev/shm").glob("*"):
        if path.is_file():
            sizes.append((path.stat().st_blocks * 512, str(path)))
    largest = tuple(f"{path} ({human_bytes(size)})" for size, path in sorted(sizes, reverse=True)[:3] if size)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return SharedMemory(total, free, objects or int(OF_RAY * memory().total), largest, container())


def check_shared_memory(shm: SharedMemory) -> Iterator[Finding]:
    check, size = "shared memory", human_bytes(shm.total)
    enough = min(GOOD_SHM, shm.objects)
    if shm.total < LEAST_SHM:
        why = "NCCL between the GPUs of a node, tensors that processes share and Ray's objects are in it, and they fail"
        yield Finding("error", check, f"/dev/shm has {size}: {why}", larger_shm(shm.container))
    elif shm.total < enough:
        what = f"/dev/shm has {size}, and Ray's objects may take {human_bytes(shm.objects)}: they go to the disk then"
        yield Finding("warning", check, what, larger_shm(shm.container))
    elif shm.free < NEARLY_FULL * shm.total:
        what = f"/dev/shm is nearly full: {human_bytes(shm.free)} of {size} left"
        left = f" The largest in it: {', '.join(shm.largest)}." if shm.largest else ""
        yield Finding("warning", check, what + "." * bool(left) + left, "remove what ended processes have left there")
    else:
        yield Finding("ok", check, f"/dev/shm {human_bytes(shm.free)} free of {size}")


def larger_shm(container: Container) -> str:
    if container == "kubernetes":
        return "mount an emptyDir with `medium: Memory` at /dev/shm of the pod"
    if container:
        return "start the container with --shm-size=16g (or --ipc=host)"
    return "mount -o remount,size=16g /dev/shm, and in /etc/fstab"


def container() -> Container:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    try:
        groups = Path("/proc/1/cgroup").read_text()
    except OSError:
        return ""
    if "kubepods" in groups:
        return "kubernetes"
    return "container" if re.search(r"docker|libpod|containerd|lxc", groups) else ""


# --- memory


@dataclass(frozen=True)
class Memory:
    total: int
    """That this node's processes may use: the machine's, or the limit of the container or job."""
    available: int
    limited: bool
    """By a cgroup."""


def memory() -> Memory:
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, available = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    limits = cgroup_memory(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    for limit, used in limits:
        if limit < min(total, UNLIMITED):
            total, available = limit, min(available, max(0, limit - used))
    return Memory(total, available, bool(limits) and any(limit == total for limit, _ in limits))


def cgroup_memory(own: str, root: Path) -> list[tuple[int, int]]:
    """Limit and use of the groups that this process is in, of both versions. `own`: /proc/self/cgroup.

    What is cached of files counts as used, and the kernel gives it back before the limit strikes; it is left out."""
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
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


def check_memory(found: Memory) -> Iterator[Finding]:
    limit = " (the limit of its container or job)" if found.limited else ""
    what = f"{human_bytes(found.available)} of {human_bytes(found.total)}{limit} available"
    if found.available < max(LEAST_MEMORY, (1 - RAY_STOPS_AT) * found.total):
        why = f"{what}; Ray kills workers when {RAY_STOPS_AT:.0%} is used"
        yield Finding("warning", "memory", why, "end what uses it, or raise the container's or job's limit")
    else:
        yield Finding("ok", "memory", what)


# --- limits of the process


@dataclass(frozen=True)
class Limits:
    files: int
    """Soft limit."""
    files_hard: int
    processes: int
    """And threads."""
    locked: int
    """Bytes that may be locked in memory."""
    has_infiniband: bool
    container: Container


def limits() -> Limits:
    soft, hard = (finite(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = min(finite(resource.getrlimit(resource.RLIMIT_NPROC)[0]), *cgroup_processes(Path("/sys/fs/cgroup")))
    locked = finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    return Limits(soft, hard, processes, locked, any(Path("/sys/class/infiniband").glob("*")), container())


def finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def cgroup_processes(root: Path) -> list[int]:
    """Of the container, whose own group is at the root; of both versions."""
    found = [file.read_text().strip() for file in (root / "pids.max", root / "pids" / "pids.max") if file.is_file()]
    return [UNLIMITED, *(int(text) for text in found if text.isdecimal())]


def check_limits(found: Limits) -> Iterator[Finding]:
    what = f"{found.files} files may be open at once"
    if found.files < GOOD_FILES:
        level: Literal["error", "warning"] = "error" if found.files < LEAST_FILES else "warning"
        why = f"{what}; every connection between workers is one, and Ray wants {GOOD_FILES}"
        yield Finding(level, "file limit", why, more_files(found))
    else:
        yield Finding("ok", "file limit", what)
    if found.processes < GOOD_PROCESSES:
        what = f"{found.processes} processes and threads may run at once; each worker of Ray has about a hundred"
        fix = (
            "--pids-limit=-1 and --ulimit nproc=65536"
            if found.container
            else "nproc 65536 in /etc/security/limits.conf"
        )
        yield Finding("warning", "process limit", what, fix)
    if found.has_infiniband and found.locked < UNLIMITED:
        fix = "--ulimit memlock=-1" if found.container else "memlock unlimited in /etc/security/limits.conf"
        what = f"only {human_bytes(found.locked)} may be locked in memory, so NCCL cannot use InfiniBand"
        yield Finding("warning", "locked memory", what, fix)


def more_files(found: Limits) -> str:
    if found.container:
        return "start the container with --ulimit nofile=65536:65536"
    if found.files_hard >= GOOD_FILES:
        return f"`ulimit -n {min(found.files_hard, 65536)}` in the shell that starts `corral up`"
    return "nofile 65536 in /etc/security/limits.conf (or LimitNOFILE= of the service), then log in again"


# --- disks


@dataclass(frozen=True)
class Disk:
    path: str
    purpose: str
    total: int
    free: int
    free_files: float
    """Of all inodes, the part that is left."""
    device: int
    needs: int = 0
    """Bytes that the recipe will write."""


def disk(path: Path, purpose: str, needs: int = 0) -> Disk | None:
    """Of the folder, or of the nearest one above it that is there."""
    there = next((folder for folder in [path, *path.parents] if folder.exists()), None)
    if there is None:
        return None
    found = os.statvfs(there)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    free_files = found.f_favail / found.f_files if found.f_files else 1.0
    return Disk(str(path), purpose, total, free, free_files, there.stat().st_dev, needs)


def disks(runs: Path, needs: int, ray: Path | None) -> list[Disk]:
    """Those that a run writes to. `ray`: where a Ray that `corral up` started keeps its files."""
    found = [
        disk(runs, "runs", needs),
        disk(ray or Path(tempfile.gettempdir()), RAYS),
        disk(hugging_face_cache(), "the Hugging Face cache"),
    ]
    return [one for one in found if one is not None]


def hugging_face_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def check_disks(found: Sequence[Disk]) -> Iterator[Finding]:
    """Folders on the same disk share a finding."""
    by_device: dict[int, list[Disk]] = {}
    for one in found:
        by_device.setdefault(one.device, []).append(one)
    for same in by_device.values():
        yield check_disk(same)


def check_disk(same: Sequence[Disk]) -> Finding:
    one, needs = same[0], max(disk.needs for disk in same)
    places = ", ".join(f"{disk.path} ({disk.purpose})" for disk in same)
    what = f"{human_bytes(one.free)} of {human_bytes(one.total)} free for {places}"
    fix = "make room there, or choose other places: `logging.runs`, `corral up --temp-dir`, HF_HOME"
    if needs and one.free < needs:
        return Finding("error", "disk", f"{what}; the recipe's checkpoints take {human_bytes(needs)}", fix)
    if one.free < LEAST_DISK:
        return Finding("error", "disk", what, fix)
    if one.free < (1 - RAY_STOPS_AT) * one.total and any(disk.purpose == RAYS for disk in same):
        why = f"when {RAY_STOPS_AT:.0%} is used, Ray makes no more objects that do not fit its memory"
        return Finding("warning", "disk", f"{what}; {why}", fix)
    if one.free_files < 0.01:
        return Finding("warning", "disk", f"{what}, but hardly any more files can be made (`df -i`)", fix)
    if one.free < GOOD_DISK:
        return Finding("warning", "disk", what, fix)
    return Finding("ok", "disk", what)
