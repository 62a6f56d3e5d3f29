"""Whether torch can use the node's GPUs, and whether anybody else does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from corral.cluster.doctor.findings import Finding
from corral.cluster.processes import Process, Table, raylet_of
from corral.cluster.smi import Gpu, GpuProcess, Gpus
from corral.recipe.memory import human_bytes

TAKEN = 2**30
"""Used without a process that one could name. A driver alone takes a few hundred MiB."""
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA drivers, by the major version of CUDA that they were the first for."""
INSTALL = "install a torch that was built for it (https://pytorch.org/get-started/locally)"


@dataclass(frozen=True)
class TorchFacts:
    """As a process of its own found them: `import torch` may fail, and CUDA may hang."""

    version: str = ""
    cuda: str | None = None
    """The version that it was built for."""
    hip: str | None = None
    available: bool = False
    num_devices: int = 0
    why_not: str = ""
    """What torch said when it was told to use a GPU."""
    error: str = ""
    """Instead of all the above: it could not be imported."""


def check_torch(torch: TorchFacts, tools: Gpus | None, devices: Literal["nvidia", "amd", ""]) -> Iterator[Finding]:
    """`devices`: whose device files there are."""
    vendor = devices or (tools.vendor if tools is not None else "")
    if torch.error:
        yield Finding("error", "torch", f"torch cannot be used: {torch.error}", "install it again")
    elif not vendor:
        yield from check_torch_without_gpu(torch)
    elif tools is not None and tools.error:
        yield Finding("error", "driver", f"{tool_of(vendor)}: {tools.error}", repair(tools.error))
    elif vendor == "nvidia" and torch.cuda is None:
        yield Finding("error", "torch", f"torch {torch.version} was built without CUDA, and there are GPUs", INSTALL)
    elif vendor == "amd" and torch.hip is None:
        yield Finding("error", "torch", f"torch {torch.version} was built without ROCm, and there are GPUs", INSTALL)
    elif vendor == "nvidia" and tools is not None and tools.runtime and (found := compare(torch, tools)) is not None:
        yield found
    elif not torch.available:
        what = f"torch {torch.version} finds no GPU: {torch.why_not or 'it does not say why'}"
        yield Finding("error", "torch", what, "see that CUDA_VISIBLE_DEVICES is not empty, and that the container may "
                      "use the devices (--gpus all, or --device /dev/kfd --device /dev/dri)")  # fmt: skip
    else:
        driver = f", driver {tools.driver}" if tools is not None and tools.driver else ""
        yield Finding("ok", "torch", f"torch {torch.version} uses {torch.num_devices} GPUs{driver}")


def check_torch_without_gpu(torch: TorchFacts) -> Iterator[Finding]:
    if torch.cuda or torch.hip:
        what = f"torch {torch.version} was built for GPUs, and there is none here that this process may use"
        fix = "nothing, if that is meant; else give the container or job its GPUs (--gpus all, --gres=gpu:8)"
        yield Finding("note", "torch", what, fix)
    else:
        yield Finding("ok", "torch", f"torch {torch.version} on CPUs")


def compare(torch: TorchFacts, tools: Gpus) -> Finding | None:
    """What torch was built for and what the driver supports. A driver runs older versions of CUDA, and newer ones of
    the same major version as far as they need nothing new."""
    assert torch.cuda is not None
    built, supported = major_minor(torch.cuda), major_minor(tools.runtime)
    what = (
        f"torch {torch.version} was built for CUDA {torch.cuda}, and the driver {tools.driver} supports {tools.runtime}"
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


def tool_of(vendor: str) -> str:
    return "nvidia-smi" if vendor == "nvidia" else "rocm-smi"


def repair(said: str) -> str:
    if "version mismatch" in said:
        return "the driver was updated while it was loaded: reboot the node"
    if "communicate" in said:
        return "load the driver (modprobe nvidia), or install it again after a kernel update; then reboot"
    return "look at what it says when you call it; often a reboot of the node"


# --- who is on them


def check_gpus(tools: Gpus | None, table: Table, cluster_raylet: int | None) -> Iterator[Finding]:
    """`cluster_raylet`: process id of the raylet of the cluster that is checked."""
    if tools is None or not tools.gpus:
        return
    quiet = True
    for gpu in tools.gpus:
        for finding in check_gpu(gpu, tools, table, cluster_raylet):
            quiet = False
            yield finding
    if tools.vendor == "amd":
        for process in tools.gpus[0].processes:  # the same for all
            quiet = False
            yield occupied(process, None, table, cluster_raylet)
    if quiet:
        free = min(gpu.free for gpu in tools.gpus)
        what = f"{len(tools.gpus)} x {tools.gpus[0].name}, at least {human_bytes(free)} free of each"
        yield Finding("ok", "GPU memory", what)


def check_gpu(gpu: Gpu, tools: Gpus, table: Table, cluster_raylet: int | None) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    if gpu.is_broken:
        yield Finding("error", "GPU health", gpu.is_broken, "reset it (nvidia-smi --gpu-reset) or reboot", device=name)
    if gpu.is_exclusive:
        what = "only one process may use it at a time (compute mode Exclusive_Process)"
        yield Finding("warning", "GPU mode", what, f"nvidia-smi -i {gpu.index} -c DEFAULT", device=name)
    if gpu.is_split:
        what = "it is split into parts (MIG), of which NCCL can use one per process at most"
        yield Finding("warning", "GPU mode", what, f"nvidia-smi -i {gpu.index} -mig 0", device=name)
    if tools.vendor == "nvidia":
        for process in gpu.processes:
            yield occupied(process, name, table, cluster_raylet)
    if gpu.used > TAKEN and not gpu.processes:
        what = (
            f"{human_bytes(gpu.used)} of {human_bytes(gpu.total)} are in use by processes that cannot be seen from here"
        )
        fix = "look from the host (outside of the container), or as root; what ended badly needs a GPU reset"
        yield Finding("warning", "GPU memory", what, fix, device=name)


def occupied(found: GpuProcess, device: str | None, table: Table, cluster_raylet: int | None) -> Finding:
    process = table.get(found.pid)
    size = "some memory" if found.memory is None else human_bytes(found.memory)
    if process is None:
        what = f"process {found.pid}, which cannot be seen from here, has {size}"
        return Finding(
            "warning", "GPU memory", what, "look for it on the host, outside of the container", device=device
        )
    whose, is_fine = owner(process, table, cluster_raylet)
    what = f"{process} has {size}: {whose}"
    if is_fine:
        return Finding("note", "GPU memory", what, "wait for that run to end, or `corral stop` it", device=device)
    return Finding("warning", "GPU memory", what, f"kill {process.pid}, if nobody needs it", device=device)


def owner(process: Process, table: Table, cluster_raylet: int | None) -> tuple[str, bool]:
    """Whose it is, and whether it may be there."""
    raylet = raylet_of(process, table)
    if raylet is not None and raylet.pid == cluster_raylet:
        return "a run on this cluster", True
    if raylet is not None:
        return "of another Ray cluster", False
    if process.name.startswith("ray::"):
        return "left by a Ray cluster that is gone", False
    if "corral" in process.command:
        return "a run of Corral outside of this cluster", False
    return "not Ray's and not Corral's", False


def check_number(num_torch: int, num_ray: int) -> Iterator[Finding]:
    """`num_ray`: GPUs that Ray believes this node to have."""
    if num_ray > num_torch:
        what = f"Ray hands out {num_ray} GPUs here, and torch finds {num_torch}"
        yield Finding("error", "GPU number", what, f"start the node with `corral up --devices {num_torch}`")
    elif num_ray < num_torch:
        what = f"Ray hands out {num_ray} of the {num_torch} GPUs that torch finds here"
        yield Finding("note", "GPU number", what, "`corral up --devices` says how many, and CUDA_VISIBLE_DEVICES which")


def models_of(gpus: Sequence[Gpu]) -> str:
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in names)
