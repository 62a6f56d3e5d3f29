"""Slurm: one batch script that starts the cluster on the job's nodes, waits for it, trains, and takes it down.

The script has two halves. This module writes the first: the options of sbatch, and the commands as arrays, every word
quoted. The second, `slurm.sh`, is the same for all and uses them: each node is a step of the job, and the script waits
for each step together with those that must not end meanwhile.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from corral.cluster.launchers.containers import INFINIBAND, ContainerEngine, mount_flag, run_command
from corral.cluster.launchers.launch_spec import LaunchFiles, LaunchSpec
from corral.recipe.errors import UserError

SECOND_HALF = Path(__file__).with_name("slurm.sh")
IDENTITY = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME")
"""Variables from which `corral up` knows which node it is on."""
NETWORK = ("NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables of the script or of the shell that submits, which a container gets where they are set."""
STALE_VARIABLES = ("RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
"""Variables that `corral up` prefers to Slurm's; left over in the shell that submits, they are wrong."""
RCCL = {
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_CROSS_NIC": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_CHECKS_DISABLE": "1",
    "RCCL_MSCCL_ENABLE": "0",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "GPU_MAX_HW_QUEUES": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",
}
"""Settings that people train with on nodes of eight MI300X with RoCE."""
RCCL_DEFAULTS = (
    "",
    "# For RCCL on AMD Instinct with RoCE; what your environment or the lines above say wins.",
    *(f'export {name}="${{{name}:-{value}}}"' for name, value in RCCL.items()),
    "# Which adapters, if not all that are there (`ibdev2netdev` lists them):",
    "# export NCCL_IB_HCA=rdma0,rdma1",
)
MAX_LINE = 110
StepContainer = Literal["pyxis", "apptainer"]
"""Containers without a daemon, which are processes of the step that starts them: Slurm's signals, devices and limits
reach what is inside, so the script treats them as if there were none."""
SHARED_BY_STEPS = ("/tmp", "/dev/shm")
"""Each step of a node has a container of its own, and Ray's sockets and object store are in these."""


@dataclass(frozen=True)
class SlurmOptions:
    """What the recipe does not say. Paths are absolute, and the same on all nodes."""

    work_folder: Path  # where the commands run: the recipe's relative paths begin here
    log_folder: Path
    sbatch: Mapping[str, str] = field(default_factory=dict)  # options with their values: partition, account, time
    setup: Sequence[str] = ()  # lines of shell, as they are
    check_timeout_s: int = 600
    grace_s: int = 120  # before the time limit, for the training to save a checkpoint
    port: int | None = None  # of Ray's head process; None: made of the job's number
    engine: ContainerEngine | StepContainer | None = None
    image: str = ""
    shm: str = "10g"
    mounts: Sequence[str] = ()
    environment: Sequence[str] = ()
    """Names of variables for the containers. Without containers, everything in the shell that submits is there."""


def slurm_launch(spec: LaunchSpec, options: SlurmOptions, folder: Path) -> LaunchFiles:
    """`folder`: where the script will be. The folder for logs must be there before it is submitted: Slurm does not make
    it, and a job that cannot write its log fails without a word."""
    name = f"{spec.name}.sbatch"
    notes = []
    if spec.accelerator != "none" and "cpus-per-task" not in options.sbatch:
        notes.append("without --cpus-per-task each node gets as few CPUs as your site gives by default, perhaps one")
    if options.engine == "pyxis":
        notes.append(
            "pyxis unpacks the image for every step: a squashfs file (.sqsh) on a shared file system is quickest"
        )
    if options.engine is not None:
        seen = ", ".join(mounts(spec, options))
        notes.append(f"the containers see {seen}; for models and data elsewhere use --mount")
    notes.append("to stop it with a checkpoint: scancel --batch --signal=TERM JOB (plain scancel saves nothing)")
    return LaunchFiles({name: script(spec, options)}, [["sbatch", str(folder / name)]], notes)


def script(spec: LaunchSpec, options: SlurmOptions) -> str:
    parts = [
        heading(spec),
        *[f"#SBATCH {line}" for line in sbatch_options(spec, options)],
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(str(options.work_folder))}",
        # What `module` and `activate` do would not pass as strict.
        *(["", "set +u", *options.setup, "set -u", ""] if options.setup else []),
        f"unset {' '.join(STALE_VARIABLES)} # of the shell that submitted this",
        *(RCCL_DEFAULTS if spec.accelerator == "amd" else ()),
        "",
        *settings(spec, options),
        "",
        SECOND_HALF.read_text().rstrip(),
    ]
    return "\n".join(parts) + "\n"


def heading(spec: LaunchSpec) -> str:
    nodes = "a node" if spec.num_nodes == 1 else f"{spec.num_nodes} nodes"
    devices = "a device" if spec.devices_per_node == 1 else f"{spec.devices_per_node} devices"
    each = "" if spec.num_nodes == 1 else " each"
    return (
        "#!/bin/bash\n"
        f"# Trains on {nodes} with {devices}{each}. Written by `corral launch slurm`; yours to change.\n"
        "# To stop it with a checkpoint: scancel --batch --signal=TERM JOB\n"
        "# Some words are for shells on the nodes (2016), some have commas (2054), and signals call functions (2317):\n"
        "# shellcheck disable=SC2016,SC2054,SC2317"
    )


def sbatch_options(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    """Slurm itself reads these lines, by rules of its own, so values must be plain."""
    found = {
        "job-name": spec.name,
        "nodes": str(spec.num_nodes),
        "ntasks-per-node": "1",
        **({} if spec.accelerator == "none" else {"gpus-per-node": str(spec.devices_per_node)}),
        **options.sbatch,
        "output": f"{options.log_folder}/{spec.name}-%j.log",
        "open-mode": "append",  # a job that Slurm starts again keeps the log of the first
        "signal": f"B:TERM@{options.grace_s}",
    }
    for value in map(str, [options.log_folder, *options.sbatch.values()]):
        if not re.fullmatch(r"[\w.,:/=+@\[\]-]+", value, re.ASCII):
            raise UserError(
                f"{value!r} is for a line that Slurm reads, which takes letters, digits and .,:/=+@[]-_ only"
            )
    flags = ["--requeue"]
    if spec.recipe.cluster.min_nodes is not None:
        flags.append("--no-kill")  # the run goes on without a node that is lost
    return [*(f"--{name}={value}" for name, value in found.items()), *flags]


def settings(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    cpus = options.sbatch.get("cpus-per-task")
    port = options.port or "$((20000 + SLURM_JOB_ID % 10000))"
    srun = ["--overlap", "--nodes=1", "--ntasks=1", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    if options.engine in ("docker", "podman"):
        commands = container_commands(spec, options, options.engine)
    else:
        srun += pyxis_options(spec, options) if options.engine == "pyxis" else []
        commands = plain_commands(spec, apptainer_command(spec, options) if options.engine == "apptainer" else [])
    return [
        f"job_name={spec.name}",
        f"log_folder={shlex.quote(str(options.log_folder))}",
        f"num_devices={spec.num_devices}",
        f"check_timeout_s={options.check_timeout_s}",
        f"port={port}" + ("" if options.port else " # so jobs that share a node do not meet"),
        array("srun_options", srun),
        *commands,
    ]


def pyxis_options(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    """Options of srun, by which NVIDIA's plugin starts every step in a container."""
    binds = [bind(mount) for mount in (*mounts(spec, options), *SHARED_BY_STEPS)]
    return [
        f"--container-image={checked_image(options)}",
        f"--container-mounts={','.join(binds)}",
        f"--container-workdir={options.work_folder}",
        "--no-container-remap-root",  # as oneself, whom folders in /tmp belong to
        # The image's own values win over these otherwise.
        *([f"--container-env={','.join(options.environment)}"] if options.environment else []),
    ]


def apptainer_command(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    """What comes before a command. The environment of the job is that of the container."""
    device = {"nvidia": ["--nv"], "amd": ["--rocm"], "none": []}[spec.accelerator]
    binds = [word for mount in (*mounts(spec, options), *SHARED_BY_STEPS) for word in ("--bind", bind(mount))]
    # Home is mounted, and packages that the user installed there would hide those of the image.
    own = ["--env", "PYTHONNOUSERSITE=1", "--pwd", str(options.work_folder)]
    return ["apptainer", "exec", *device, *binds, *own, checked_image(options)]


def checked_image(options: SlurmOptions) -> str:
    if options.image.startswith("-"):
        raise UserError(f"--image {options.image} is not the name of an image")
    return options.image


def bind(mount: str) -> str:
    """`/here:/there[:ro]`, which has no way to write a comma or a colon in a path."""
    mount_flag(mount)
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    if "," in mount or ":" in mode:
        raise UserError(f"{mount}: a folder for containers of {' or '.join(StepContainer.__args__)} has no , and no :")  # type: ignore[attr-defined]
    return ":".join([source, target or source, *([mode] if mode else [])])


def plain_commands(spec: LaunchSpec, inside: Sequence[str]) -> list[str]:
    """`inside`: what starts a command in a container."""
    shell = [*(ON_NODE if spec.accelerator == "amd" else ()), *inside]
    return [
        "engine='' container='' # none",
        *([f"on_node={shlex.quote(AMD_DEVICES)}"] if spec.accelerator == "amd" else []),
        array("up_command", [*shell, *up_command(spec)]),
        array("check_command", [*shell, "corral", "check"]),
        array("train_command", [*shell, *spec.train_command]),
    ]


def container_commands(spec: LaunchSpec, options: SlurmOptions, engine: ContainerEngine) -> list[str]:
    """`corral up` is the first process of a container on each node, which ends with it. The training is started in the
    head's. `corral check` runs in containers of their own, for the head's may not be there yet."""
    choose = CONTAINER_DEVICES.format(variable=device_variable(spec), infiniband=shlex.join(INFINIBAND))
    remember_pid = ["bash", "-c", 'echo $$ >/tmp/corral-train.pid; exec "$@"', "bash"]
    inside = [engine, "exec", ScriptVariable("container"), *remember_pid]
    return [
        f"engine={engine}",
        "container=corral-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
        f"on_node={shlex.quote(choose)}",
        array("up_command", [*ON_NODE, *foreground_run(spec, options, engine, is_node=True), *up_command(spec)]),
        array("check_command", [*foreground_run(spec, options, engine, is_node=False), "corral", "check"]),
        array("train_command", [*inside, *spec.train_command]),
    ]


def up_command(spec: LaunchSpec) -> list[str]:
    """Does not wait for the other nodes: that is a step of its own."""
    return spec.up_command("--block", "--no-wait", "--beside", "--port", ScriptVariable("port"))


def foreground_run(spec: LaunchSpec, options: SlurmOptions, engine: ContainerEngine, *, is_node: bool) -> list[str]:
    """Runs a container in the foreground: it lives as long as the step. One that is no node has no name or devices."""
    devices = [] if spec.accelerator == "none" else [device_variable(spec)]
    defaults = RCCL if spec.accelerator == "amd" else {}
    variables = [*IDENTITY, *devices, *NETWORK, *defaults, *options.environment] if is_node else IDENTITY
    return run_command(
        engine,
        spec.accelerator if is_node else "none",
        options.image,
        folder=options.work_folder,
        mode=("--rm", *(("--name", ScriptVariable("container")) if is_node else ())),
        shm=options.shm,
        mounts=mounts(spec, options),
        environment=list(dict.fromkeys(variables)),
    )


def mounts(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    """Mounts folders under their own paths, so that the recipe's paths are right in the container too."""
    needed = [options.work_folder, options.log_folder, (options.work_folder / spec.file).parent.resolve()]
    found: list[Path] = []
    for path in needed:
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [*map(str, found), *options.mounts]


def device_variable(spec: LaunchSpec) -> str:
    """Variable that selects devices, and that Ray understands."""
    return "HIP_VISIBLE_DEVICES" if spec.accelerator == "amd" else "CUDA_VISIBLE_DEVICES"


class ScriptVariable(str):
    """A word that is a variable of the script, which the shell replaces."""


def array(name: str, command: Sequence[str]) -> str:
    """An array of the shell. A long one is on several lines, which begin with an option if they can."""
    lines = [f"{name}=("]
    for word in (f'"${one}"' if isinstance(one, ScriptVariable) else shlex.quote(one) for one in command):
        longest = MAX_LINE * 3 // 4 if word.startswith("-") else MAX_LINE
        if len(lines[-1]) + len(word) > longest and len(lines[-1]) > 2:
            lines.append("  ")
        lines[-1] += word if lines[-1][-1] in "( " else f" {word}"
    return "\n".join(lines) + ")"


# --- what the nodes' shells do before a command

ON_NODE = ("bash", "-c", ScriptVariable("on_node"), "bash")

AMD_DEVICES = """\
devices=${ROCR_VISIBLE_DEVICES:-${CUDA_VISIBLE_DEVICES:-${HIP_VISIBLE_DEVICES:-}}}
unset ROCR_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
[ -z "$devices" ] || export HIP_VISIBLE_DEVICES="$devices"
exec "$@"
"""
"""Slurm may set several variables that choose devices. Ray understands HIP_VISIBLE_DEVICES, and two at once choose
among what the other has left."""

CONTAINER_DEVICES = """\
devices=${{SLURM_STEP_GPUS:-${{SLURM_JOB_GPUS:-}}}}
[ -z "$devices" ] || export {variable}="$devices"
[ ! -e /dev/infiniband ] || set -- "$1" "$2" {infiniband} "${{@:3}}"
exec "$@"
"""
"""A container sees all devices of the node, whatever Slurm shows; so it gets the job's, as the node numbers them."""
