"""Slurm: one batch script that starts the cluster on the job's nodes, waits for it, trains, and takes it down.

The script has two halves. This module writes the first: what is asked of Slurm, and the commands as arrays, every
word quoted. The second, `slurm.sh`, is the same for all and uses them: each node is a step of the job, and each step is
awaited together with those that must not end meanwhile.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from corral.cluster.launchers.base import Launch, Work
from corral.cluster.launchers.containers import INFINIBAND, Engine, container_flags
from corral.recipe.errors import UserError

SAME_FOR_ALL = Path(__file__).with_name("slurm.sh")
IDENTITY = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME")
"""What `corral up` reads to know which node it is on."""
NOT_OURS = ("RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
"""Variables that `corral up` would believe before Slurm's; left over in the shell that submits, they are wrong."""
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
"""That people train with on nodes of eight MI300X with RoCE."""
LINE = 110


@dataclass(frozen=True)
class SlurmOptions:
    """What the recipe does not say. Paths are absolute, and the same on all nodes."""

    work_folder: Path
    """Where the commands run: the recipe's relative paths begin here."""
    log_folder: Path
    ask: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch with their values: partition, account, time."""
    setup: Sequence[str] = ()
    """Lines of shell, as they are."""
    check_timeout_s: int = 600
    grace_s: int = 120
    """Before the time limit, for the training to save itself."""
    port: int | None = None
    """Of Ray's head process. None: made of the job's number."""
    engine: Engine | None = None
    image: str = ""
    shm: str = "10g"
    mounts: Sequence[str] = ()
    environment: Sequence[str] = ()
    """Names of variables for the containers. Without containers, everything in the shell that submits is there."""


def slurm_launch(work: Work, options: SlurmOptions, folder: Path) -> Launch:
    """`folder`: where the script will be. The folder for logs must be there before it is submitted: Slurm does not make
    it, and a job that cannot write its log fails without a word."""
    name = f"{work.name}.sbatch"
    notes = []
    if work.accelerator != "none" and "cpus-per-task" not in options.ask:
        notes.append("without --cpus-per-task each node gets as few CPUs as your site gives by default, perhaps one")
    if options.engine is not None:
        seen = ", ".join(mounts(work, options))
        notes.append(f"the containers see {seen}; for models and data elsewhere use --mount")
    notes.append("to stop it with a checkpoint: scancel --batch --signal=TERM JOB (plain scancel saves nothing)")
    return Launch(
        files={name: script(work, options)},
        commands=[["sbatch", str(folder / name)]],
        notes=notes,
    )


def script(work: Work, options: SlurmOptions) -> str:
    parts = [
        heading(work),
        *[f"#SBATCH {line}" for line in asked(work, options)],
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(str(options.work_folder))}",
        *setup(options.setup),
        f"unset {' '.join(NOT_OURS)} # of the shell that submitted this",
        *(accelerator_defaults() if work.accelerator == "amd" else ()),
        "",
        *settings(work, options),
        "",
        SAME_FOR_ALL.read_text().rstrip(),
    ]
    return "\n".join(parts) + "\n"


def heading(work: Work) -> str:
    nodes = "a node" if work.num_nodes == 1 else f"{work.num_nodes} nodes"
    devices = "a device" if work.devices_per_node == 1 else f"{work.devices_per_node} devices"
    each = "" if work.num_nodes == 1 else " each"
    return (
        "#!/bin/bash\n"
        f"# Trains on {nodes} with {devices}{each}. Written by `corral launch slurm`; yours to change.\n"
        "# To stop it with a checkpoint: scancel --batch --signal=TERM JOB\n"
        "# Some words are for shells on the nodes (2016), some have commas (2054), and signals call functions (2317):\n"
        "# shellcheck disable=SC2016,SC2054,SC2317"
    )


# --- what is asked of Slurm


def asked(work: Work, options: SlurmOptions) -> list[str]:
    """Options of sbatch. Slurm itself reads these lines, by rules of its own, so values are plain or refused."""
    found = {
        "job-name": work.name,
        "nodes": str(work.num_nodes),
        "ntasks-per-node": "1",
        **({} if work.accelerator == "none" else {"gpus-per-node": str(work.devices_per_node)}),
        **options.ask,
        "output": f"{options.log_folder}/{work.name}-%j.log",
        "open-mode": "append",  # one that Slurm starts again keeps what the first one said
        "signal": f"B:TERM@{options.grace_s}",
    }
    plain = options.log_folder, *options.ask.values()
    for value in map(str, plain):
        if not re.fullmatch(r"[\w.,:/=+@\[\]-]+", value, re.ASCII):
            raise UserError(
                f"{value!r} is for a line that Slurm reads, which takes letters, digits and .,:/=+@[]-_ only"
            )
    flags = ["--requeue"]
    if work.recipe.cluster.min_nodes is not None:
        flags.append("--no-kill")  # the run goes on without a node that is lost
    return [*(f"--{name}={value}" for name, value in found.items()), *flags]


def setup(lines: Sequence[str]) -> list[str]:
    """The user's own. What `module` and `activate` do would not pass as strict."""
    return ["", "set +u", *lines, "set -u", ""] if lines else []


def accelerator_defaults() -> list[str]:
    return [
        "",
        "# For RCCL on AMD Instinct with RoCE; what your environment or the lines above say wins.",
        *(f'export {name}="${{{name}:-{value}}}"' for name, value in RCCL.items()),
        "# Which adapters, if not all that are there (`ibdev2netdev` lists them):",
        "# export NCCL_IB_HCA=rdma0,rdma1",
    ]


# --- the commands


def settings(work: Work, options: SlurmOptions) -> list[str]:
    cpus = options.ask.get("cpus-per-task")
    port = options.port or "$((20000 + SLURM_JOB_ID % 10000))"
    return [
        f"job_name={work.name}",
        f"log_folder={shlex.quote(str(options.log_folder))}",
        f"num_devices={work.num_devices}",
        f"check_timeout_s={options.check_timeout_s}",
        f"port={port}" + ("" if options.port else " # so jobs that share a node do not meet"),
        array("srun_options", ["--overlap", "--nodes=1", "--ntasks=1", *([f"--cpus-per-task={cpus}"] if cpus else [])]),
        *(bare(work) if options.engine is None else contained(work, options, options.engine)),
    ]


def bare(work: Work) -> list[str]:
    shell = list(ON_NODE) if work.accelerator == "amd" else []
    return [
        "engine='' container='' # none",
        *([f"on_node={shlex.quote(AMD_DEVICES)}"] if shell else []),
        array("up_command", [*shell, *up_words(work)]),
        array("check_command", [*shell, "corral", "check"]),
        array("train_command", [*shell, *work.train_command]),
    ]


def contained(work: Work, options: SlurmOptions, engine: Engine) -> list[str]:
    """`corral up` is the first process of a container on each node, which ends with it. The training is started in the
    head's. Waiting is done in containers of their own, for the head's may not be there yet."""
    choose = CONTAINER_DEVICES.format(variable=variable_of(work), infiniband=shlex.join(INFINIBAND))
    inside = [engine, "exec", Variable("container"), "bash", "-c", 'echo $$ >/tmp/corral-train.pid; exec "$@"', "bash"]
    return [
        f"engine={engine}",
        "container=corral-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
        f"on_node={shlex.quote(choose)}",
        array("up_command", [*ON_NODE, *container_run(work, options, engine), *up_words(work)]),
        array("check_command", [*plain_run(work, options, engine), "corral", "check"]),
        array("train_command", [*inside, *work.train_command]),
    ]


def up_words(work: Work) -> list[str]:
    """Nobody waits here for the other nodes: that is a step of its own."""
    devices = ["--devices", str(work.devices_per_node)] if work.accelerator == "none" else []
    return ["corral", "up", "--block", "--no-wait", "--beside", "--port", Variable("port"), *devices]


def container_run(work: Work, options: SlurmOptions, engine: Engine) -> list[str]:
    """In the foreground, up to the image: the step is the container's life."""
    devices = [] if work.accelerator == "none" else [variable_of(work)]
    defaults = RCCL if work.accelerator == "amd" else {}
    flags = container_flags(
        engine,
        work,
        options.image,
        name="",
        shm=options.shm,
        mounts=mounts(work, options),
        environment=list(dict.fromkeys([*IDENTITY, *devices, *defaults, *options.environment])),
    )
    flags[flags.index("--name") + 1] = Variable("container")
    flags[flags.index("--detach")] = "--rm"
    return [*flags[:-1], "--workdir", str(options.work_folder), options.image]


def plain_run(work: Work, options: SlurmOptions, engine: Engine) -> list[str]:
    """Without a name or devices, for a moment."""
    found = container_run(replace(work, accelerator="none"), replace(options, environment=()), engine)
    place = found.index("--name")
    return [*found[:place], *found[place + 2 :]]


def mounts(work: Work, options: SlurmOptions) -> list[str]:
    """Each under its own path, so that the recipe's are right inside too."""
    needed = [options.work_folder, options.log_folder, (options.work_folder / work.file).parent.resolve()]
    found: list[Path] = []
    for path in needed:
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [*map(str, found), *options.mounts]


def variable_of(work: Work) -> str:
    """That chooses devices, and that Ray understands."""
    return "HIP_VISIBLE_DEVICES" if work.accelerator == "amd" else "CUDA_VISIBLE_DEVICES"


# --- words of the script


class Variable(str):
    """A word that is a variable of the script, to be put in by it."""


def word_of(word: str) -> str:
    return f'"${word}"' if isinstance(word, Variable) else shlex.quote(word)


def array(name: str, command: Sequence[str]) -> str:
    """A long one on several lines, which begin with an option if they can."""
    lines = [f"{name}=("]
    for word in map(word_of, command):
        if len(lines[-1]) + len(word) > (LINE * 3 // 4 if word.startswith("-") else LINE) and len(lines[-1]) > 2:
            lines.append("  ")
        lines[-1] += word if lines[-1][-1] in "( " else f" {word}"
    return "\n".join(lines) + ")"


# --- what the nodes' shells do before a command

ON_NODE = ("bash", "-c", Variable("on_node"), "bash")

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
"""A container sees all devices of the node, whatever Slurm shows to its own processes; so those of the job, as the node
numbers them."""
