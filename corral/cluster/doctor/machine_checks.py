"""Checks of what a node has for its processes: shared memory, memory, open files, disks, and GPUs for torch."""

import os
import re
import resource
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corral.cluster.doctor.findings import Finding
from corral.cluster.node_processes import ProcessTable, raylet_of
from corral.cluster.node_report import Gpu, GpuInventory, GpuProcess
from corral.host_memory import UNLIMITED, NodeMemory, node_memory
from corral.recipe.memory import human_bytes

MIB, GIB = 2**20, 2**30
ContainerKind = Literal["", "docker", "podman", "kubernetes", "container"]
"""Empty: no container, as far as one can tell from inside."""

LEAST_SHM = 512 * MIB
"""NCCL takes about 10 MB for each pair of GPUs of a node, torch puts tensors there that processes share, and Ray its
object store. Containers have 64 MiB by default, and NCCL then fails with `unhandled system error`."""
GOOD_SHM = 8 * GIB
OBJECT_STORE_SHARE = 0.3
"""Ray wants this part of the memory for its objects, and uses the disk where /dev/shm is smaller."""
NEARLY_FULL = 0.1
LEAST_FILES, GOOD_FILES = 1024, 8192  # each worker has connections to all others; below 8192 Ray itself warns
GOOD_PROCESSES = 2048
LEAST_DISK, GOOD_DISK = 256 * MIB, 10 * GIB
RAYS = "Ray's logs and objects"
RAY_STOPS_AT = 0.95
"""Used part of the memory above which Ray kills workers, and of its disk above which it writes no more objects."""
LEAST_MEMORY = 2 * GIB
IN_USE = 2**30  # bytes; a driver alone takes a few hundred MiB
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}  # NVIDIA drivers, by the major version of CUDA that they were the first for
INSTALL = "install a torch that was built for it (https://pytorch.org/get-started/locally)"


@dataclass(frozen=True)
class SharedMemory:
    total: int
    free: int
    objects: int  # bytes that Ray's objects may take
    largest: tuple[str, ...]  # files in it, with sizes: what is left of processes that were killed
    container: ContainerKind


def shared_memory(objects: int | None) -> SharedMemory:
    """`objects`: bytes that Ray was configured to take, where that is known."""
    files = [path for path in Path("/dev/shm").glob("*") if path.is_file()]
    sizes = sorted(((path.stat().st_blocks * 512, str(path)) for path in files), reverse=True)
    largest = tuple(f"{path} ({human_bytes(size)})" for size, path in sizes[:3] if size)
    total, free = disk_space("/dev/shm")
    return SharedMemory(
        total, free, objects or int(OBJECT_STORE_SHARE * node_memory().total), largest, container_kind()
    )


def disk_space(path: Path | str) -> tuple[int, int]:
    """Bytes of a file system in all, and free ones."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def check_shared_memory(shm: SharedMemory) -> Iterator[Finding]:
    check, size = "shared memory", human_bytes(shm.total)
    larger = "mount -o remount,size=16g /dev/shm, and in /etc/fstab"
    if shm.container == "kubernetes":
        larger = "mount an emptyDir with `medium: Memory` at /dev/shm of the pod"
    elif shm.container:
        larger = "start the container with --shm-size=16g (or --ipc=host)"
    if shm.total < LEAST_SHM:
        why = "NCCL between the GPUs of a node, tensors that processes share and Ray's objects are in it, and they fail"
        yield Finding("error", check, f"/dev/shm has {size}: {why}", larger)
    elif shm.total < min(GOOD_SHM, shm.objects):
        what = f"/dev/shm has {size}, and Ray's objects may take {human_bytes(shm.objects)}: they go to the disk then"
        yield Finding("warning", check, what, larger)
    elif shm.free < NEARLY_FULL * shm.total:
        what = f"/dev/shm is nearly full: {human_bytes(shm.free)} of {size} left"
        what += f". The largest in it: {', '.join(shm.largest)}." if shm.largest else ""
        yield Finding("warning", check, what, "remove what ended processes have left there")
    else:
        yield Finding("ok", check, f"/dev/shm {human_bytes(shm.free)} free of {size}")


def container_kind() -> ContainerKind:
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


def check_memory(found: NodeMemory) -> Iterator[Finding]:
    limit = " (the limit of its container or job)" if found.limited else ""
    what = f"{human_bytes(found.available)} of {human_bytes(found.total)}{limit} available"
    if found.available < max(LEAST_MEMORY, (1 - RAY_STOPS_AT) * found.total):
        why = f"{what}; Ray kills workers when {RAY_STOPS_AT:.0%} is used"
        yield Finding("warning", "memory", why, "end what uses it, or raise the container's or job's limit")
    else:
        yield Finding("ok", "memory", what)


@dataclass(frozen=True)
class ProcessLimits:
    files: int  # soft limit
    files_hard: int
    processes: int  # and threads
    locked: int  # bytes that may be locked in memory
    has_infiniband: bool
    container: ContainerKind


def limits() -> ProcessLimits:
    def limit(kind: int) -> tuple[int, int]:
        soft, hard = (UNLIMITED if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(kind))
        return soft, hard

    # The group of a container is at the root; of both versions of cgroups.
    files = [Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")]
    group = [int(text) for file in files if file.is_file() and (text := file.read_text().strip()).isdecimal()]
    return ProcessLimits(
        *limit(resource.RLIMIT_NOFILE),
        processes=min(limit(resource.RLIMIT_NPROC)[0], *group, UNLIMITED),
        locked=limit(resource.RLIMIT_MEMLOCK)[0],
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        container=container_kind(),
    )


def check_limits(found: ProcessLimits) -> Iterator[Finding]:
    def fix(option: str, line: str) -> str:
        return option if found.container else f"{line} in /etc/security/limits.conf"

    what = f"{found.files} files may be open at once"
    if found.files >= GOOD_FILES:
        yield Finding("ok", "file limit", what)
    else:
        more = "nofile 65536 in /etc/security/limits.conf (or LimitNOFILE= of the service), then log in again"
        if found.container:
            more = "start the container with --ulimit nofile=65536:65536"
        elif found.files_hard >= GOOD_FILES:
            more = f"`ulimit -n {min(found.files_hard, 65536)}` in the shell that starts `corral up`"
        why = f"{what}; every connection between workers is one, and Ray wants {GOOD_FILES}"
        yield Finding("error" if found.files < LEAST_FILES else "warning", "file limit", why, more)
    if found.processes < GOOD_PROCESSES:
        what = f"{found.processes} processes and threads may run at once; each worker of Ray has about a hundred"
        yield Finding("warning", "process limit", what, fix("--pids-limit=-1 and --ulimit nproc=65536", "nproc 65536"))
    if found.has_infiniband and found.locked < UNLIMITED:
        what = f"only {human_bytes(found.locked)} may be locked in memory, so NCCL cannot use InfiniBand"
        yield Finding("warning", "locked memory", what, fix("--ulimit memlock=-1", "memlock unlimited"))


@dataclass(frozen=True)
class DiskSpace:
    path: str
    purpose: str
    total: int
    free: int
    free_files: float  # the part of all inodes that is left
    device: int
    needs: int = 0  # bytes that the recipe will write


def disks(runs: Path, needs: int, ray: Path | None) -> list[DiskSpace]:
    """The disks that a run writes to. `ray`: where a Ray that `corral up` started keeps its files."""
    folders = [
        (runs, "runs", needs),
        (ray or Path(tempfile.gettempdir()), RAYS, 0),
        (hugging_face_cache(), "the Hugging Face cache", 0),
    ]
    found = []
    for path, purpose, bytes_needed in folders:
        existing = next((folder for folder in [path, *path.parents] if folder.exists()), None)
        if existing is not None:
            total, free = disk_space(existing)
            inodes, device = os.statvfs(existing), existing.stat().st_dev
            free_files = inodes.f_favail / inodes.f_files if inodes.f_files else 1.0
            found.append(DiskSpace(str(path), purpose, total, free, free_files, device, bytes_needed))
    return found


def hugging_face_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def check_disks(found: Sequence[DiskSpace]) -> Iterator[Finding]:
    """Folders on the same disk share a finding."""
    for device in dict.fromkeys(disk.device for disk in found):
        yield check_disk([disk for disk in found if disk.device == device])


def check_disk(same: Sequence[DiskSpace]) -> Finding:
    one, needs = same[0], max(disk.needs for disk in same)
    folders = ", ".join(f"{disk.path} ({disk.purpose})" for disk in same)
    what = f"{human_bytes(one.free)} of {human_bytes(one.total)} free for {folders}"
    fix = "free some space there, or choose other places: `logging.runs`, `corral up --temp-dir`, HF_HOME"
    if needs and one.free < needs:
        return Finding("error", "disk", f"{what}; the recipe's checkpoints take {human_bytes(needs)}", fix)
    if one.free < LEAST_DISK:
        return Finding("error", "disk", what, fix)
    if one.free < (1 - RAY_STOPS_AT) * one.total and any(disk.purpose == RAYS for disk in same):
        why = f"when {RAY_STOPS_AT:.0%} is used, Ray makes no more objects that do not fit its memory"
        return Finding("warning", "disk", f"{what}; {why}", fix)
    if one.free_files < 0.01:
        return Finding("warning", "disk", f"{what}, but hardly any more files can be made (`df -i`)", fix)
    return Finding("warning", "disk", what, fix) if one.free < GOOD_DISK else Finding("ok", "disk", what)


# --- GPUs


@dataclass(frozen=True)
class TorchFacts:
    """Facts that a process of its own found: `import torch` may fail, and CUDA may hang."""

    version: str = ""
    cuda: str | None = None  # the version that it was built for
    hip: str | None = None
    available: bool = False
    num_devices: int = 0
    without_code: tuple[str, ...] = ()  # kinds of GPUs that this build of torch has no kernels for: V100 (sm_70)
    why_not: str = ""  # torch's error when it was to use a GPU
    error: str = ""  # instead of all the above: it could not be imported


def check_torch(
    torch: TorchFacts, inventory: GpuInventory | None, vendor: Literal["nvidia", "amd", ""]
) -> Iterator[Finding]:
    """`vendor`: whose device files there are."""
    vendor = vendor or (inventory.vendor if inventory is not None else "")
    built = f"torch {torch.version} was built"
    if torch.error:
        yield Finding("error", "torch", f"torch cannot be used: {torch.error}", "install it again")
    elif not vendor and (torch.cuda or torch.hip):
        what = f"{built} for GPUs, and there is none here that this process may use"
        fix = "nothing, if that is meant; else give the container or job its GPUs (--gpus all, --gres=gpu:8)"
        yield Finding("note", "torch", what, fix)
    elif not vendor:
        yield Finding("ok", "torch", f"torch {torch.version} on CPUs")
    elif inventory is not None and inventory.error:
        tool = "nvidia-smi" if vendor == "nvidia" else "rocm-smi"
        yield Finding("error", "driver", f"{tool}: {inventory.error}", driver_fix(inventory.error))
    elif vendor == "nvidia" and torch.cuda is None:
        yield Finding("error", "torch", f"{built} without CUDA, and there are GPUs", INSTALL)
    elif vendor == "amd" and torch.hip is None:
        yield Finding("error", "torch", f"{built} without ROCm, and there are GPUs", INSTALL)
    elif inventory is not None and inventory.runtime and (found := compare_cuda(torch, inventory)) is not None:
        yield found
    elif not torch.available:
        what = f"torch {torch.version} finds no GPU: {torch.why_not or 'it does not say why'}"
        fix = (
            "see that CUDA_VISIBLE_DEVICES is not empty, and that the container may use the devices (--gpus all, or "
            "--device /dev/kfd --device /dev/dri)"
        )
        yield Finding("error", "torch", what, fix)
    elif torch.without_code:
        what = f"{built} without code for {', '.join(torch.without_code)}"
        fix = "install one that has it: for a V100 (sm_70) a wheel for CUDA 12.6 (`cu126`), see docs/models.md"
        yield Finding("error", "torch", what, fix)
    else:
        driver = f", driver {inventory.driver}" if inventory is not None and inventory.driver else ""
        yield Finding("ok", "torch", f"torch {torch.version} uses {torch.num_devices} GPUs{driver}")


def compare_cuda(torch: TorchFacts, inventory: GpuInventory) -> Finding | None:
    """Compares the CUDA that torch was built for with what the driver supports. A driver runs older versions of CUDA,
    and newer ones of the same major version as far as they need nothing new."""
    if torch.cuda is None:
        return None
    built, supported = major_minor(torch.cuda), major_minor(inventory.runtime)
    what = (
        f"torch {torch.version} was built for CUDA {torch.cuda}, and the driver {inventory.driver} supports "
        f"{inventory.runtime}"
    )
    newer = f"update the driver to {FIRST_DRIVER.get(built[0], 'a newer one')} or later, or {INSTALL}"
    if built[0] > supported[0]:
        return Finding("error", "driver", what, newer)
    if built > supported and not torch.available:
        return Finding("error", "driver", f"{what}: {torch.why_not}", newer)
    if built > supported:
        return Finding("note", "driver", f"{what}; kernels that are compiled while a run goes on may fail", newer)
    return None


def major_minor(version: str) -> tuple[int, int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in version.split(".")]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0)


def driver_fix(error: str) -> str:
    if "version mismatch" in error:
        return "the driver was updated while it was loaded: reboot the node"
    if "communicate" in error:
        return "load the driver (modprobe nvidia), or install it again after a kernel update; then reboot"
    return "look at what it says when you call it; often a reboot of the node"


def check_gpus(inventory: GpuInventory | None, table: ProcessTable, cluster_raylet: int | None) -> Iterator[Finding]:
    """Checks who uses the GPUs. `cluster_raylet`: process id of the raylet of the cluster that is checked."""
    if inventory is None or not inventory.gpus:
        return
    found: list[Finding] = []
    for gpu in inventory.gpus:
        found += check_gpu(gpu)
        if inventory.vendor == "nvidia":
            found += [check_user(one, f"GPU {gpu.index}", table, cluster_raylet) for one in gpu.processes]
    if inventory.vendor == "amd":  # whose tool reports the same processes for all
        found += [check_user(one, None, table, cluster_raylet) for one in inventory.gpus[0].processes]
    yield from found
    if not found:
        free = min(gpu.free for gpu in inventory.gpus)
        what = f"{len(inventory.gpus)} x {inventory.gpus[0].name}, at least {human_bytes(free)} free of each"
        yield Finding("ok", "GPU memory", what)


def check_gpu(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    if gpu.is_broken:
        yield Finding("error", "GPU health", gpu.is_broken, "reset it (nvidia-smi --gpu-reset) or reboot", device=name)
    if gpu.is_exclusive:
        what = "only one process may use it at a time (compute mode Exclusive_Process)"
        yield Finding("warning", "GPU mode", what, f"nvidia-smi -i {gpu.index} -c DEFAULT", device=name)
    if gpu.is_split:
        what = "it is split into parts (MIG), of which NCCL can use one per process at most"
        yield Finding("warning", "GPU mode", what, f"nvidia-smi -i {gpu.index} -mig 0", device=name)
    if gpu.used > IN_USE and not gpu.processes:
        sizes = f"{human_bytes(gpu.used)} of {human_bytes(gpu.total)}"
        what = f"{sizes} are in use by processes that cannot be seen from here"
        fix = "look from the host (outside of the container), or as root; what ended badly needs a GPU reset"
        yield Finding("warning", "GPU memory", what, fix, device=name)


def check_user(found: GpuProcess, device: str | None, table: ProcessTable, cluster_raylet: int | None) -> Finding:
    """Checks whose a process on a GPU is, and whether it may be there."""
    process = table.get(found.pid)
    size = "some memory" if found.memory is None else human_bytes(found.memory)
    if process is None:
        what = f"process {found.pid}, which cannot be seen from here, has {size}"
        fix = "look for it on the host, outside of the container"
        return Finding("warning", "GPU memory", what, fix, device=device)
    raylet = raylet_of(process, table)
    if raylet is not None and raylet.pid == cluster_raylet:
        what = f"{process} has {size}: a run on this cluster"
        return Finding("note", "GPU memory", what, "wait for that run to end, or `corral stop` it", device=device)
    whose = "not Ray's and not Corral's"
    if raylet is not None:
        whose = "of another Ray cluster"
    elif process.name.startswith("ray::"):
        whose = "left by a Ray cluster that is gone"
    elif "corral" in process.command:
        whose = "a run of Corral outside of this cluster"
    fix = f"kill {process.pid}, if nobody needs it"
    return Finding("warning", "GPU memory", f"{process} has {size}: {whose}", fix, device=device)


def check_num_gpus(num_torch: int, num_ray: int) -> Iterator[Finding]:
    """`num_ray`: GPUs that Ray takes this node to have."""
    if num_ray > num_torch:
        what = f"Ray hands out {num_ray} GPUs here, and torch finds {num_torch}"
        yield Finding("error", "GPU number", what, f"start the node with `corral up --devices {num_torch}`")
    elif num_ray < num_torch:
        what = f"Ray hands out {num_ray} of the {num_torch} GPUs that torch finds here"
        yield Finding("note", "GPU number", what, "`corral up --devices` says how many, and CUDA_VISIBLE_DEVICES which")


def describe_models(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in gpus).items())
