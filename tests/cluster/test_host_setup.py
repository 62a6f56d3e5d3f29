"""The script that prepares a machine. It is read and checked here, never run: as root it installs a daemon and what
GPUs need, from their makers' servers."""

import re
import shutil
import subprocess

import pytest

from corral.cluster.launchers.containers import SOURCES, host_setup
from corral.recipe.errors import UserError

ALL = [(family, is_amd) for family in ("apt", "yum") for is_amd in (False, True)]


@pytest.mark.parametrize(("family", "is_amd"), ALL)
def test_a_shell_can_read_it(family, is_amd):
    script = host_setup(family, is_amd)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "set -euo pipefail" in script


@pytest.mark.parametrize(("family", "is_amd"), ALL)
def test_shellcheck_finds_nothing(family, is_amd):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    result = subprocess.run(["shellcheck", "-"], input=host_setup(family, is_amd), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("family", "is_amd"), ALL)
def test_nothing_from_the_network_is_run_as_a_program(family, is_amd):
    script = host_setup(family, is_amd)
    assert not re.search(r"\|\s*(sudo\s+)?(ba|z|)sh\b", script)
    assert all(address.startswith(tuple(SOURCES.values())) for address in re.findall(r"https://[^\s\"']{5,}", script))
    assert "/blob/" not in script


@pytest.mark.parametrize("family", ["apt", "yum"])
def test_docker_is_told_of_nvidias_runtime_after_both_are_there(family):
    script = host_setup(family, False)
    words = ("docker-ce ", "nvidia-container-toolkit\n", "nvidia-ctk runtime", "restart")
    order = [script.index(word) for word in words]
    assert order == sorted(order)


def test_amds_gpus_need_no_toolkit():
    assert "nvidia" not in host_setup("apt", True)


@pytest.mark.parametrize("family", ["apt", "yum"])
def test_packages_come_from_mirrors_alone(family):
    sources = {"docker": "https://mirror.example/docker", "nvidia": "http://mirror.example:8080/nvidia/"}
    script = host_setup(family, False, sources)
    assert "https://mirror.example/docker/$distribution" in script
    assert "http://mirror.example:8080/nvidia/stable" in script
    for address in SOURCES.values():  # only where a list of packages names its maker
        assert script.count(address) == script.count(f"s#{address}#") <= 1
    with pytest.raises(UserError, match="the source of docker"):
        host_setup(family, False, {"docker": "https://x/$(reboot)"})


@pytest.mark.parametrize(("version", "release"), [("2.1903", "7"), ("3", "8"), ("4", "9")])
def test_alibabas_linux_takes_the_packages_of_the_centos_that_it_is_like(version, release):
    script = host_setup("yum", False)
    choice = script[script.index("release=") : script.index("if command -v dnf")]
    said = subprocess.run(
        ["bash", "-c", f"ID=alinux VERSION_ID={version}\n{choice}\necho $distribution $release"], stdout=-1
    )
    assert said.stdout.decode().split() == ["centos", release]


def test_it_stops_for_anyone_but_root(tmp_path):
    """Run as somebody else, who could do no harm."""
    if shutil.which("setpriv") is None or subprocess.run(["id", "-u"], capture_output=True).stdout.strip() != b"0":
        pytest.skip("needs root, to be somebody else")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    result = subprocess.run([*nobody, "bash"], input=host_setup("apt", False), capture_output=True, text=True)
    assert result.returncode == 1
    assert "run this as root" in result.stderr
