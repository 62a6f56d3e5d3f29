"""Hosts of a lab that ssh can reach, with keys that are thrown away."""

import getpass
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import within
from hosts import FONTS, Lab

from corral.runtime.network import answers

REPOSITORY = Path(__file__).parents[1]
PORT = 22
SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
SetEnv HOME={home}
"""
CLIENT = """\
Host *
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  LogLevel ERROR
"""
PROGRAM = """\
#!/bin/sh
export PYTHONPATH={repository} OMP_NUM_THREADS=1 MPLCONFIGDIR={fonts}
exec {python} -m corral.cli.main "$@"
"""


class SshHosts:
    """`config`: for the client. `program`: `corral`, on every host."""

    def __init__(self, lab: Lab) -> None:
        server = skip_unless_possible()
        self.lab, self.folder = lab, lab.folder / "ssh"
        self.folder.mkdir()
        self.config, self.program = self.folder / "config", self.folder / "corral"
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
            subprocess.run(command, check=True)
        public = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{host.address} {public}" for host in lab.hosts))
        self.config.write_text(CLIENT.format(folder=self.folder, user=getpass.getuser()))
        self.program.write_text(PROGRAM.format(repository=REPOSITORY, fonts=FONTS, python=sys.executable))
        self.program.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, host in enumerate(lab.hosts):
            settings = self.folder / f"sshd.{host.name}"
            text = SERVER.format(port=PORT, address=host.address, folder=self.folder, home=host.home)
            settings.write_text(text)
            lab.begin(number, [server, "-D", "-e", "-f", str(settings)])
        for host in lab.hosts:
            await_port(f"{host.address}:{PORT}", lab)


def await_port(address: str, lab: Lab) -> None:
    deadline = time.monotonic() + within(20)
    while not answers(address):
        assert time.monotonic() < deadline, f"sshd does not answer at {address}: {lab.errors.read_text()}"
        time.sleep(0.02)


def skip_unless_possible() -> str:
    server = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    if server is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd (openssh-server) and ssh (openssh-client)")
    return server
