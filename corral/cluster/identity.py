"""Which node of the cluster this is: its rank, how many there are, where the head is, and which of its addresses the
others are to use.

Options come first; then the variables that guides use (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, which count
nodes here); then those of a launcher. Nothing is guessed: the error names what is missing.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from corral.recipe.errors import UserError
from corral.runtime.network import (
    INTERFACE_VARIABLES,
    address_of,
    interface_towards,
    is_loopback,
    source_address,
    variables_of_interface,
)

PORT = 6379  # Ray's own default, and that of the guides
MAX_NODES = 100_000
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "podman", "flannel", "cali", "lxc", "lxdbr", "tun", "tap")
"""Name prefixes of interfaces that lead to containers or virtual machines of this machine."""
DOCUMENTATION_ADDRESS = "192.0.2.1"
"""Reserved for examples (RFC 5737): the route to it is the default route. Nothing is sent there."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeIdentity:
    rank: int | None  # 0 is the head; None: a node that joins without a place in the numbering
    num_nodes: int | None  # None: not given
    head: str | None  # name or address, as it was given
    port: int
    id: str | None = None  # of the launcher's job, which all its nodes share and no other has
    source: str = "nothing was set"  # where the rank comes from, for messages

    @property
    def is_head(self) -> bool:
        return self.rank == 0


def find_identity(
    environment: Mapping[str, str],
    *,
    head: bool = False,
    join: str | None = None,
    rank: int | None = None,
    nodes: int | None = None,
    port: int | None = None,
    id: str | None = None,
    has_head_file: bool = False,
) -> NodeIdentity:
    """`environment`: whose variables count where an option of the command line was not given."""
    if head and join is not None:
        raise UserError("--head starts a cluster and --join joins one: give one of them")
    found = identity_in(environment)
    join_host, join_port = split_join_address(join) if join else (None, None)
    rank = rank if rank is not None else found.rank
    is_numbered = found.num_nodes is not None or nodes is not None
    if head:
        if rank not in (None, 0):
            raise UserError(f"--head is rank 0, but the rank is {rank} ({found.source})")
        rank = 0
    elif rank is None and not is_numbered and join is None and not has_head_file:
        rank = 0  # a cluster of this machine
    elif join is not None and rank == 0:
        raise UserError(f"rank 0 is the head and joins nobody ({found.source}); give this node another --rank")
    if rank is None and (join is None or nodes is not None):
        raise UserError(
            "which node is this? Set RANK (0 is the head) or use --rank; or --head, or --join ADDRESS alone"
        )
    # A node without a rank waits for nobody.
    num_nodes = None if rank is None else nodes or found.num_nodes
    if rank is not None and num_nodes is not None and not 0 <= rank < num_nodes:
        raise UserError(
            f"rank {rank} is not below the number of nodes, {num_nodes} ({found.source}); both count nodes from 0, not "
            "processes"
        )
    return replace(
        found,
        rank=rank,
        num_nodes=num_nodes,
        head=join_host or found.head,
        port=port or join_port or found.port,
        id=id or found.id,
    )


def identity_in(environment: Mapping[str, str]) -> NodeIdentity:
    """Identity by the variables of the first launcher that has set some."""
    if "GROUP_RANK" in environment or "NODE_RANK" in environment:
        return torchrun_identity(environment)
    if "PET_NODE_RANK" in environment:
        return kubeflow_identity(environment)
    head, port = environment.get("MASTER_ADDR"), port_in(environment)
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        rank, size = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
        return NodeIdentity(rank, size, head, port, source="RANK and WORLD_SIZE")
    if environment.get("SLURM_JOB_NODELIST") and environment.get("SLURMD_NODENAME"):
        return slurm_identity(environment)
    if "DSTACK_NODE_RANK" in environment:
        return NodeIdentity(
            rank=number_in(environment, "DSTACK_NODE_RANK"),
            num_nodes=number_in(environment, "DSTACK_NODES_NUM"),
            head=environment.get("DSTACK_MASTER_NODE_IP"),
            port=port,
            id=environment.get("DSTACK_RUN_ID") or environment.get("DSTACK_RUN_NAME"),
            source="dstack",
        )
    return NodeIdentity(None, None, head, port)


def torchrun_identity(environment: Mapping[str, str]) -> NodeIdentity:
    """torchrun counts processes in RANK and WORLD_SIZE, and nodes in variables of their own."""
    rank = "GROUP_RANK" if "GROUP_RANK" in environment else "NODE_RANK"
    nodes = "GROUP_WORLD_SIZE" if "GROUP_WORLD_SIZE" in environment else "NNODES"
    if environment.get("LOCAL_RANK", "0") != "0":
        raise UserError(
            f"`corral up` runs once per node, and this is process {environment['LOCAL_RANK']} of one; start it with "
            "one process per node (torchrun --nproc-per-node 1)"
        )
    counts_nodes = nodes in environment or "LOCAL_RANK" in environment
    return NodeIdentity(
        rank=number_in(environment, rank),
        num_nodes=number_in(environment, nodes if counts_nodes else "WORLD_SIZE"),
        head=environment.get("MASTER_ADDR"),
        port=PORT if "TORCHELASTIC_RUN_ID" in environment else port_in(environment),  # torchrun listens on its own
        id=environment.get("TORCHELASTIC_RUN_ID"),
        source=rank,
    )


def kubeflow_identity(environment: Mapping[str, str]) -> NodeIdentity:
    """Kubeflow's jobs have variables for torchrun, which count pods; RANK and WORLD_SIZE may count processes there."""
    head = environment.get("MASTER_ADDR") or environment.get("PET_MASTER_ADDR")
    port = "MASTER_PORT" if environment.get("MASTER_PORT") else "PET_MASTER_PORT"
    return NodeIdentity(
        rank=number_in(environment, "PET_NODE_RANK"),
        num_nodes=number_in(environment, "PET_NNODES"),
        head=head,
        port=port_in(environment, port),
        source="PET_NODE_RANK",
    )


def slurm_identity(environment: Mapping[str, str]) -> NodeIdentity:
    """The rank is the position of this node in the job's list of nodes: a step on one node calls that node 0."""
    own, hosts = environment["SLURMD_NODENAME"], expand_hosts(environment["SLURM_JOB_NODELIST"])
    if own not in hosts:
        raise UserError(f"SLURMD_NODENAME {own} is not in SLURM_JOB_NODELIST {environment['SLURM_JOB_NODELIST']}")
    return NodeIdentity(
        rank=hosts.index(own),
        num_nodes=len(hosts),
        head=environment.get("MASTER_ADDR", hosts[0]),
        port=port_in(environment),
        id=environment.get("SLURM_JOB_ID"),
        source=f"Slurm job {environment.get('SLURM_JOB_ID', '?')}",
    )


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if text and not text.isdecimal():
        raise UserError(f"{name} is {text!r}, which is not a number")
    return int(text) if text else None


def port_in(environment: Mapping[str, str], name: str = "MASTER_PORT") -> int:
    port = number_in(environment, name)
    return PORT if port is None else check_port(port, name)


def check_port(port: int, name: str) -> int:
    if not 0 < port < 65536:
        raise UserError(f"{name} is {port}; a port is between 1 and 65535")
    return port


def split_join_address(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, None
    if not host or not port.isdecimal():
        raise UserError(f"{address!r} is not HOST or HOST:PORT")
    return host, check_port(int(port), address)


def expand_hosts(names: str) -> list[str]:
    """Expands Slurm's short form: `gpu-[01-03,7],login` is gpu-01, gpu-02, gpu-03, gpu-7, login."""
    return [host for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names) for host in expand_part(part)]


def expand_part(part: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        return [part]
    before, after = part[: found.start()], expand_part(part[found.end() :])
    numbers = []
    for span in found.group(1).split(","):
        first, _, last = span.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) - int(first) >= MAX_NODES:
            raise UserError(f"{part!r} is not a list of hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [f"{before}{n}{rest}" for n in numbers for rest in after]


# --- addresses of this node
#
# The first one of `hostname -I` is a guess that fails on every machine with a container bridge or a second network. A
# node that joins takes the address that it sends from when it connects to the head; the head, which connects to nobody
# yet, takes the one that it was given, or the only one that can be meant.


def own_addresses() -> dict[str, str]:
    """IPv4 addresses of this node by interface, without loopback."""
    found = ((name, address_of(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address and not is_loopback(address)}


def resolve(host: str) -> list[str]:
    """IPv4 addresses of a host name; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def worker_address(head: str, chosen: str | None) -> str:
    """Address of this node for a cluster whose head is at `head`. `chosen`: the user's --address."""
    if chosen is not None:
        return check_own_address(chosen)
    address = source_address(head)
    if address is None:
        raise UserError(f"there is no way from this node to {head}: {describe_addresses(own_addresses())}")
    return address


def is_known(given: str | None, chosen: str | None, own_name: str | None = None) -> bool:
    """Whether `head_address` can tell now: a pod's own name may become known after the pod has started."""
    return chosen is not None or given in (None, own_name) or is_in_pod() or bool(resolve(given or ""))


def is_in_pod() -> bool:
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def head_address(given: str | None, chosen: str | None, is_alone: bool, own_name: str | None = None) -> str:
    """`given`: where the other nodes will look for the head. `own_name`: by which a launcher knows this node. In a pod
    of Kubernetes that may be the address of a service, which no pod has."""
    own = own_addresses()
    if chosen is not None:
        return check_own_address(chosen)
    if given is not None:
        resolved = resolve(given)
        if (address := next((one for one in resolved if one in own.values()), None)) is not None:
            return address
        is_elsewhere = not any(map(is_loopback, resolved))  # Debian's 127.0.1.1 says nothing
        if given != own_name and is_elsewhere and not is_in_pod():
            found = ", ".join(resolved) or "no address at all"
            raise UserError(
                f"this node is to be the head, {given}, but that is {found}, and this node has "
                f"{describe_addresses(own)}; if that leads here, say which is this node's with --address"
            )
    if is_alone:
        return LOOPBACK
    for variable in INTERFACE_VARIABLES:
        name = os.environ.get(variable, "").removeprefix("=").partition(",")[0]
        if name in own:  # a value that begins with ^ lists interfaces that are not meant
            return own[name]
    default = source_address(DOCUMENTATION_ADDRESS)
    if default is not None and default in own.values():
        return default
    physical = {
        name: address
        for name, address in own.items()
        if not name.startswith(VIRTUAL) and not Path("/sys/class/net", name, "bridge").exists()
    }
    if len(physical) == 1:
        return next(iter(physical.values()))
    what = "has no network"
    if physical:
        what = f"has several networks, and no default route says which: {describe_addresses(physical)}"
    raise UserError(f"this node {what}; say with --address (or MASTER_ADDR) where the other nodes find it")


def check_own_address(address: str) -> str:
    own = own_addresses()
    if address not in own.values() and not is_loopback(address):
        raise UserError(f"--address {address} is not an address of this node: {describe_addresses(own)}")
    return address


def interface_variables(address: str) -> dict[str, str]:
    """Variables that name the interface for gloo and NCCL, with the user's values where they are set."""
    name = interface_towards(address)
    found = {} if name is None else variables_of_interface(name)
    return {variable: os.environ.get(variable) or own for variable, own in found.items()}


def describe_addresses(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in addresses.items()) or "no address but loopback"
