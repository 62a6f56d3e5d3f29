"""Slurm on the hosts of a lab: the real one (Debian's `slurm-wlm` and `munge`), a controller and a daemon per host.

    with Lab(2) as lab, Slurm(lab) as slurm:
        print(slurm.run(["srun", "--nodes=2", "hostname"]).stdout)
        job = slurm.submit("job.sh")
        assert slurm.wait(job).state == "COMPLETED"

There is no accounting, so what became of a job is asked of the controller, which remembers it for a few minutes. Jobs
run as whoever runs the tests, which is root, for the hosts are namespaces.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from deadlines import within
from hosts import Lab

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")
START_S = within(20)
POLL_S = 0.2
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
# No cgroups here: processes are found by who started them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The machine is believed to be larger than it is.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=20
KillWait=5
MinJobAge=600
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Outcome:
    state: str
    """As Slurm says it: COMPLETED, FAILED, CANCELLED."""
    exit_code: int
    log: str
    """What the job wrote."""

    @property
    def last_line(self) -> str:
        return self.log.strip().rpartition("\n")[2]


class Slurm:
    def __init__(self, lab: Lab, cpus: int = 4) -> None:
        skip_unless_installed()
        self.lab, self.folder = lab, lab.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        self.file = self.folder / "slurm.conf"
        nodes = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=4000 State=UNKNOWN"
            for host in lab.hosts
        ]
        text = CONFIGURATION.format(first=lab.hosts[0], folder=self.folder, nodes="\n".join(nodes))
        self.file.write_text(text)

    def __enter__(self) -> Self:
        self._start_munge()
        self._daemon(0, "slurmctld", "-c")
        for number in range(self.lab.num_hosts):
            (self.folder / f"spool.{self.lab.hosts[number].name}").mkdir()
            self._daemon(number, "slurmd")
        deadline = time.monotonic() + START_S
        while (states := self.states()) != {"idle"}:
            assert time.monotonic() < deadline, f"nodes are {states}\n{self.logs()}"
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        """The daemons end with their hosts."""

    # --- what a test does with it

    def run(
        self, command: Sequence[str], *, host: int = 0, timeout_s: float = 60, check: bool = True, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """A command of Slurm's, or one that uses them."""
        return self.lab.run(host, command, timeout_s=timeout_s, check=check, SLURM_CONF=str(self.file), **env)

    def submit(self, *arguments: str, **env: str) -> int:
        """`sbatch ARGUMENTS`; the number of the job."""
        return job_in(self.run(["sbatch", *arguments], **env).stdout)

    def wait(self, job: int, timeout_s: float = 120) -> Outcome:
        """Until it is over and its hosts are free again. (`sbatch --wait` looks every half minute.)"""
        timeout_s = within(timeout_s)
        deadline = time.monotonic() + timeout_s
        while (state := self.show(job)["JobState"]) not in OVER or self.states() != {"idle"}:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} after {timeout_s:g} s\n{self.log(job)}\n{self.logs()}")
            time.sleep(POLL_S)
        found = self.show(job)
        return Outcome(found["JobState"], int(found["ExitCode"].partition(":")[0]), self.log(job))

    def log(self, job: int) -> str:
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def show(self, job: int) -> dict[str, str]:
        """What the controller knows of a job."""
        said = self.run(["scontrol", "--oneliner", "show", "job", str(job)]).stdout
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def states(self) -> set[str]:
        """Of the nodes."""
        said = self.run(["sinfo", "--noheader", "--Node", "--format=%T"], check=False)
        return set(said.stdout.split())

    def logs(self) -> str:
        """Of the daemons, for what cannot be understood otherwise."""
        ends = (f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join(ends)

    # --- starting it

    def _start_munge(self) -> None:
        """One is enough for all hosts, for they share the disk that its socket is on."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.lab.folder.chmod(0o755)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "munge.log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{name.removeprefix('munge.')}" for option, name in names.items()]
        self._daemon(0, "munged", "--force", *files)

    def _daemon(self, host: int, *command: str) -> None:
        result = self.run(command, host=host, check=False)
        assert result.returncode == 0, f"{command} on host {host}: {result.stderr}\n{self.logs()}"


def job_in(said: str) -> int:
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found, said
    return int(found.group(1))


def skip_unless_installed() -> None:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
