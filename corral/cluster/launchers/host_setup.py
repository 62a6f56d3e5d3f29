"""A script that prepares a machine for containers with GPUs: docker, and NVIDIA's container toolkit or AMD's devices.

It is printed, not run: it changes packages and a daemon of the machine, as root, and who does that should read it
first. Every step can be repeated.
"""

import re
from pathlib import Path
from typing import Literal

PackageManager = Literal["apt", "yum"]
PARTS = Path(__file__).with_name("host_setup.sh")
SOURCES = {
    "docker": "https://download.docker.com/linux",
    "nvidia": "https://nvidia.github.io/libnvidia-container",
}
"""Where the makers publish their packages; the lists of packages begin there."""


def host_setup(family: PackageManager, is_amd: bool) -> str:
    pieces = re.split(r"^#@ (\w+)\n", PARTS.read_text(), flags=re.MULTILINE)
    parts = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    gpu = ["amd", "amd_check"] if is_amd else [f"nvidia_{family}", "nvidia_check"]
    text = "\n".join(parts[name] for name in ["start", f"docker_{family}", "daemon", *gpu])
    for name, address in SOURCES.items():
        text = text.replace(f"@{name}@", address)
    return text
