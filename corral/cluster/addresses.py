"""Which of a node's addresses the others are to use.

The first one of `hostname -I` is a guess that fails on every machine with a container bridge or a second network. A
node that joins takes the address that it sends from when it talks to the head; the head, which talks to nobody yet,
takes what it was told, or the only one that can be meant.
"""

import ipaddress
import os
import socket
from pathlib import Path

from corral.recipe.errors import UserError
from corral.runtime.network import INTERFACE_VARIABLES, address_of, interface_towards, source_address

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "podman", "flannel", "cali", "lxc", "lxdbr", "tun", "tap")
"""Names of interfaces that lead to containers or guests of this machine."""
FAR_AWAY = "192.0.2.1"
"""An address for examples: the way to it is the default route. Nothing is sent."""
LOOPBACK = "127.0.0.1"


def own_addresses() -> dict[str, str]:
    """IPv4 addresses by interface, without loopback."""
    found = ((name, address_of(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address and not is_loopback(address)}


def resolve(host: str) -> list[str]:
    """IPv4 addresses of a name, or none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def worker_address(head: str, chosen: str | None) -> str:
    """Of a node that talks to the head, which is at this address."""
    if chosen is not None:
        return check_own(chosen, "--address")
    address = source_address(head)
    if address is None:
        raise UserError(f"there is no way from this node to {head}: {in_words(own_addresses())}")
    return address


def head_address(given: str | None, chosen: str | None, is_alone: bool, own_name: str | None = None) -> str:
    """Of the head. `given`: where the others were told to find it. `own_name`: by which a launcher knows this node."""
    own = own_addresses()
    if chosen is not None:
        return check_own(chosen, "--address")
    if given is not None and (address := own_address_of(given, own)) is not None:
        return address
    if given is not None and given != own_name and not any(is_loopback(one) for one in resolve(given)):
        found = ", ".join(resolve(given)) or "no address at all"
        raise UserError(f"this node is to be the head, {given}, but that is {found}, and this node has {in_words(own)}")
    if is_alone:
        return LOOPBACK
    for variable in INTERFACE_VARIABLES:
        name = os.environ.get(variable, "").removeprefix("=").partition(",")[0]
        if name in own:  # one that begins with ^ says which are not meant
            return own[name]
    default = source_address(FAR_AWAY)
    if default is not None and default in own.values():
        return default
    real = {name: address for name, address in own.items() if not is_virtual(name)}
    if len(real) == 1:
        return next(iter(real.values()))
    what = "has no network" if not real else f"has several networks, and no default route says which: {in_words(real)}"
    raise UserError(f"this node {what}; say with --address (or MASTER_ADDR) where the other nodes find it")


def own_address_of(host: str, own: dict[str, str]) -> str | None:
    """The one that the host's name has and this node has too. Debian's 127.0.1.1 says nothing."""
    return next((address for address in resolve(host) if address in own.values()), None)


def check_own(address: str, option: str) -> str:
    own = own_addresses()
    if address not in own.values() and not is_loopback(address):
        raise UserError(f"{option} {address} is not an address of this node: {in_words(own)}")
    return address


def interface_variables(address: str) -> dict[str, str]:
    """For gloo and NCCL in all that is started on this node, where the user has not set them."""
    name = interface_towards(address)
    return {} if name is None else {variable: os.environ.get(variable) or name for variable in INTERFACE_VARIABLES}


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def is_virtual(interface: str) -> bool:
    return interface.startswith(VIRTUAL) or Path("/sys/class/net", interface, "bridge").exists()


def in_words(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in addresses.items()) or "no address but loopback"
