"""`corral` on the hosts of a lab, as a user types it there."""

import subprocess
from collections.abc import Sequence

from deadlines import within
from hosts import CORRAL, SMALL_RAY, Lab

SMALL = ["--", *SMALL_RAY]
"""For Ray."""
UP_S = within(120)


def corral(
    lab: Lab, host: int, *arguments: str, timeout_s: float = 120, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Whatever its exit code is."""
    return lab.run(host, [*CORRAL, *arguments], timeout_s=timeout_s, check=False, **{"OMP_NUM_THREADS": "1", **env})


def begin_up(lab: Lab, host: int, *arguments: str, devices: int = 2, **env: str) -> "subprocess.Popen[str]":
    return lab.begin(host, [*CORRAL, "up", f"--devices={devices}", *arguments, *SMALL], **env)


def bring_up(lab: Lab, *arguments: str, devices: int = 2, order: Sequence[int] | None = None) -> list[str]:
    """A cluster of all hosts, as the guides say it: by RANK, WORLD_SIZE and MASTER_ADDR. Returns what each host
    said."""
    variables = {"WORLD_SIZE": str(lab.num_hosts), "MASTER_ADDR": lab.hosts[0].address}
    started = {
        host: begin_up(lab, host, *arguments, devices=devices, RANK=str(host), **variables)
        for host in order or range(lab.num_hosts)
    }
    said = {host: process.communicate(timeout=UP_S)[0] for host, process in started.items()}
    for host, process in started.items():
        assert process.returncode == 0, f"h{host + 1}: {said[host]}\n{lab.errors.read_text()}"
    return [said[host] for host in range(lab.num_hosts)]
