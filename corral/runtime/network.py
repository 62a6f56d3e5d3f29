"""Network addresses of this node: which interface leads to another node, and what answers at an address.

gloo and NCCL otherwise guess an interface, from the host's own name or by taking the first one. Debian resolves a
host's name to 127.0.1.1, a container has bridges, a GPU node has several networks: a wrong guess hangs or fails far
from its cause.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables_of_interface(interface: str) -> dict[str, str]:
    """Variables with which gloo and NCCL use an interface. NCCL takes a bare name for the beginning of one."""
    return dict(zip(INTERFACE_VARIABLES, (interface, f"={interface}"), strict=True))


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Raises UserError where gloo or NCCL is to use an interface that this machine does not have."""
    own = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        written = environment.get(variable, "")
        if not written or written.startswith("^"):  # all but these
            continue
        prefixes_count = variable == INTERFACE_VARIABLES[1] and not written.startswith("=")
        for wanted in (one.partition(":")[0] for one in written.removeprefix("=").split(",")):
            if not any(name.startswith(wanted) if prefixes_count else name == wanted for name in own):
                raise UserError(
                    f"{variable}={written}: {socket.gethostname()} has no network interface of that name, but "
                    f"{', '.join(own)}. Without the variable Corral takes the one that leads to the other nodes"
                )


SIOCGIFADDR = 0x8915
NAME_BYTES = 16
CONNECT_S = 3.0
STORE_BACKLOG = 2048


def interface_towards(address: str) -> str | None:
    """Name of the interface whose address this machine sends from when it connects to `address`. It is loopback only if
    `address` is. None where it cannot be found; gloo and NCCL then guess."""
    source = source_address(address)
    if source is None:
        return None
    if ":" in source:
        return interface_of_ipv6(source)
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of(name) == source), None)


def source_address(address: str) -> str | None:
    """Own address by which the kernel routes to `address`. Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        source: str = probe.getsockname()[0]
        return source


def address_of(interface: str) -> str | None:
    """The interface's IPv4 address, if it has one."""
    request = struct.pack(f"{NAME_BYTES}s{NAME_BYTES}x", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[NAME_BYTES + 4 : NAME_BYTES + 8])


def interface_of_ipv6(address: str) -> str | None:
    """Name of the interface that has this address."""
    packed = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
    with suppress(OSError), open("/proc/net/if_inet6") as table:  # the address first and the name last on each line
        return next((line.split()[-1] for line in table if line.startswith(packed)), None)
    return None


def open_store(address: str, timeout: timedelta) -> "TCPStore":
    """Opens a store at which processes of torch.distributed meet, on a free port of this address alone. Left to itself
    torch listens on all of the machine's addresses, and the store knows no password: whoever reaches it can read and
    change what the processes tell each other."""
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=STORE_BACKLOG)
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),  # closed by torch
    )


def answers(address: str) -> bool:
    """Whether something listens at `host:port`. Ray itself would wait for a minute and more before it fails."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def is_numeric(host: str) -> bool:
    """Whether it is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is one that only this machine reaches."""
    return ipaddress.ip_address(host).is_loopback if is_numeric(host) else host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host, int(port)
