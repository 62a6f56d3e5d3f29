"""Which network interface the workers of a node should talk through, and who can be reached.

gloo and NCCL otherwise guess, from the host's own name, or by taking the first interface. Debian resolves a host's name
to 127.0.1.1, a container has bridges, a GPU node has several networks: a guess then hangs or fails far from its cause.
"""

import fcntl
import socket
import struct

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

SIOCGIFADDR = 0x8915
NAME_BYTES = 16
CONNECT_S = 3.0


def interface_towards(address: str) -> str | None:
    """The interface whose address this machine sends from when it talks to `address`. It is loopback only if `address`
    is; None where it cannot be found, and gloo and NCCL are then left to guess."""
    source = source_address(address)
    if source is None:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of(name) == source), None)


def source_address(address: str) -> str | None:
    """By the kernel's routes. Nothing is sent: connecting a datagram socket only looks up the way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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


def answers(address: str) -> bool:
    """Whether something listens at `host:port`. Asked before Ray is, which waits for a minute and more."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
