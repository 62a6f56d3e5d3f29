"""Checks whether torch can use the node's GPUs, and whether other processes use them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from corral.cluster.doctor.findings import Finding
from corral.cluster.node_processes import ProcessTable, raylet_of
from corral.cluster.smi import Gpu, GpuInventory, GpuProcess
from corral.recipe.memory import human_bytes

IN_USE = 2**30  # bytes; a driver alone takes a few hundred MiB
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}  # NVIDIA drivers, by the major version of CUDA that they were the first for
INSTALL = "install a torch that was built for it (https://pytorch.org/get-started/locally)"


@dataclass(frozen=True)
class TorchFacts:
    """Facts that a process of its own found: `import torch` may fail, and CUDA may hang."""

    version: str = ""
    cuda: str | None = None  # the version that it was built for
    hip: str | None = None
    available: bool = False
    num_devices: int = 0
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
