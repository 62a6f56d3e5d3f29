"""Who this node is among those that start: its rank, how many there are, where the head is.

Options come first; then the variables that guides use (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, which count
nodes here); then those of a launcher. Nothing is guessed: what is missing is named.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from corral.recipe.errors import UserError

PORT = 6379
"""Ray's own default, and that of the guides."""
MOST_NODES = 100_000


@dataclass(frozen=True)
class Identity:
    rank: int | None
    """0 is the head. None: one that joins without a place in the numbering."""
    num_nodes: int | None
    """None: nobody said."""
    head: str | None
    """Name or address, as it was given."""
    port: int
    id: str | None
    """Of the launcher's job, which all its nodes share and no other has."""
    source: str
    """Who said so, for messages."""

    @property
    def is_head(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Options:
    """What the command line says; None where it is silent."""

    head: bool = False
    join: str | None = None
    rank: int | None = None
    nodes: int | None = None
    port: int | None = None
    id: str | None = None
    has_head_file: bool = False


def find_identity(options: Options, environment: Mapping[str, str]) -> Identity:
    if options.head and options.join is not None:
        raise UserError("--head starts a cluster and --join joins one: give one of them")
    said = of_launcher(environment)
    join_host, join_port = split_address(options.join) if options.join else (None, None)
    rank = options.rank if options.rank is not None else said.rank
    if options.head:
        if rank not in (None, 0):
            raise UserError(f"--head is rank 0, but the rank is {rank} ({said.source})")
        rank = 0
    elif rank is None and (said.num_nodes, options.join, options.nodes, options.has_head_file) == (
        None,
        None,
        None,
        False,
    ):
        rank = 0  # a cluster of this machine
    elif options.join is not None and rank == 0:
        raise UserError(f"rank 0 is the head and joins nobody ({said.source}); give this node another --rank")
    found = replace(
        said,
        rank=rank,
        num_nodes=options.nodes or said.num_nodes,
        head=join_host or said.head,
        port=options.port or join_port or said.port,
        id=options.id or said.id,
    )
    if found.rank is None and (options.join is None or options.nodes is not None):
        raise UserError(
            "which node is this? Set RANK (0 is the head) or use --rank; or --head, or --join ADDRESS alone"
        )
    if found.rank is None:
        found = replace(found, num_nodes=None)  # it waits for nobody
    if found.rank is not None and found.num_nodes is not None and not 0 <= found.rank < found.num_nodes:
        raise UserError(
            f"rank {found.rank} is not below the number of nodes, {found.num_nodes} ({found.source}); both count nodes "
            "from 0, not processes"
        )
    return found


def of_launcher(environment: Mapping[str, str]) -> Identity:
    """The first that has something to say."""
    for reader in (of_torchrun, of_variables, of_slurm, of_dstack):
        found = reader(environment)
        if found is not None:
            return found
    return Identity(None, None, environment.get("MASTER_ADDR"), port_of(environment), None, "nothing was set")


def of_variables(environment: Mapping[str, str]) -> Identity | None:
    if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
        return None
    return Identity(
        rank=number(environment, "RANK"),
        num_nodes=number(environment, "WORLD_SIZE"),
        head=environment.get("MASTER_ADDR"),
        port=port_of(environment),
        id=None,
        source="RANK and WORLD_SIZE",
    )


def of_torchrun(environment: Mapping[str, str]) -> Identity | None:
    """torchrun counts processes in RANK and WORLD_SIZE, and nodes in variables of their own."""
    rank = "GROUP_RANK" if "GROUP_RANK" in environment else "NODE_RANK"
    nodes = "GROUP_WORLD_SIZE" if "GROUP_WORLD_SIZE" in environment else "NNODES"
    if rank not in environment:
        return None
    if environment.get("LOCAL_RANK", "0") != "0":
        raise UserError(
            f"`corral up` runs once per node, and this is process {environment['LOCAL_RANK']} of one; start it with "
            "one process per node (torchrun --nproc-per-node 1)"
        )
    return Identity(
        rank=number(environment, rank),
        num_nodes=number(environment, nodes if nodes in environment or "LOCAL_RANK" in environment else "WORLD_SIZE"),
        head=environment.get("MASTER_ADDR"),
        port=PORT if "TORCHELASTIC_RUN_ID" in environment else port_of(environment),  # torchrun listens on its own
        id=environment.get("TORCHELASTIC_RUN_ID"),
        source=rank,
    )


def of_slurm(environment: Mapping[str, str]) -> Identity | None:
    """By the place of this node in the job's list of nodes: a step on one node calls that node 0."""
    names = environment.get("SLURM_JOB_NODELIST")
    own = environment.get("SLURMD_NODENAME")
    if not names or not own:
        return None
    hosts = expand_hosts(names)
    if own not in hosts:
        raise UserError(f"SLURMD_NODENAME {own} is not in SLURM_JOB_NODELIST {names}")
    return Identity(
        rank=hosts.index(own),
        num_nodes=len(hosts),
        head=environment.get("MASTER_ADDR", hosts[0]),
        port=port_of(environment),
        id=environment.get("SLURM_JOB_ID"),
        source=f"Slurm job {environment.get('SLURM_JOB_ID', '?')}",
    )


def of_dstack(environment: Mapping[str, str]) -> Identity | None:
    if "DSTACK_NODE_RANK" not in environment:
        return None
    return Identity(
        rank=number(environment, "DSTACK_NODE_RANK"),
        num_nodes=number(environment, "DSTACK_NODES_NUM"),
        head=environment.get("DSTACK_MASTER_NODE_IP"),
        port=port_of(environment),
        id=environment.get("DSTACK_RUN_ID") or environment.get("DSTACK_RUN_NAME"),
        source="dstack",
    )


def number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}, which is not a number")
    return int(text)


def port_of(environment: Mapping[str, str]) -> int:
    port = number(environment, "MASTER_PORT")
    return PORT if port is None else check_port(port, "MASTER_PORT")


def check_port(port: int, name: str) -> int:
    if not 0 < port < 65536:
        raise UserError(f"{name} is {port}; a port is between 1 and 65535")
    return port


def split_address(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, None
    if not host or not port.isdecimal():
        raise UserError(f"{address!r} is not HOST or HOST:PORT")
    return host, check_port(int(port), address)


def expand_hosts(names: str) -> list[str]:
    """Slurm's short form: `gpu-[01-03,7],login` is gpu-01, gpu-02, gpu-03, gpu-7, login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        hosts += expand_part(part)
    return hosts


def expand_part(part: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        return [part]
    before, after = part[: found.start()], expand_part(part[found.end() :])
    numbers = []
    for span in found.group(1).split(","):
        first, _, last = span.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) - int(first) >= MOST_NODES:
            raise UserError(f"{part!r} is not a list of hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [f"{before}{n}{rest}" for n in numbers for rest in after]
