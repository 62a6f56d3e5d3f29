"""Which of a node's addresses the other nodes are to use.

The first one of `hostname -I` is a guess that fails on every machine with a container bridge or a second network. A
node that joins takes the address that it sends from when it connects to the head; the head, which connects to nobody
yet, takes the one that it was given, or the only one that can be meant.
"""

import os
import socket
from pathlib import Path

from corral.recipe.errors import UserError
from corral.runtime.network import INTERFACE_VARIABLES, address_of, interface_towards, is_loopback, source_address

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "podman", "flannel", "cali", "lxc", "lxdbr", "tun", "tap")
"""Name prefixes of interfaces that lead to containers or virtual machines of this machine."""
DOCUMENTATION_ADDRESS = "192.0.2.1"
"""Reserved for examples (RFC 5737): the route to it is the default route. Nothing is sent there."""
LOOPBACK = "127.0.0.1"


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


def head_address(given: str | None, chosen: str | None, is_alone: bool, own_name: str | None = None) -> str:
    """Address of this node as the head. `given`: where the other nodes will look for it. `own_name`: the name by which
    a launcher knows this node."""
    own = own_addresses()
    if chosen is not None:
        return check_own_address(chosen)
    if given is not None:
        resolved = resolve(given)
        if (address := next((one for one in resolved if one in own.values()), None)) is not None:
            return address
        if given != own_name and not any(map(is_loopback, resolved)):  # Debian's 127.0.1.1 says nothing
            found = ", ".join(resolved) or "no address at all"
            raise UserError(
                f"this node is to be the head, {given}, but that is {found}, and this node has "
                f"{describe_addresses(own)}"
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
    return {} if name is None else {variable: os.environ.get(variable) or name for variable in INTERFACE_VARIABLES}


def describe_addresses(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in addresses.items()) or "no address but loopback"
