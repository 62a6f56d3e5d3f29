"""The commands of the launchers' guide. That what they write works is tested where a launcher is there to run it."""

import shlex
from pathlib import Path

import pytest
from commands import Finished, corral
from guides import block
from runs import write_recipe


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "hosts.txt").write_text("alice@node1\nnode2:2222 devices=8\n")
    return tmp_path


def run(folder: Path, command: str) -> Finished:
    result = corral(folder, *shlex.split(command)[1:])
    assert result.code == 0, result.stderr
    return result


def test_slurm(folder: Path) -> None:
    [command] = block("launch-slurm").commands
    said = run(folder, command).stdout
    assert "sbatch" in said
    [script] = (folder / "launch").glob("*.sbatch")
    assert "module load cuda" in script.read_text()


def test_slurm_with_containers_for_amd(folder: Path) -> None:
    [command] = block("launch-slurm-amd").commands
    run(folder, command)
    [script] = (folder / "launch").glob("*.sbatch")
    assert "/dev/kfd" in script.read_text()


def test_docker(folder: Path) -> None:
    [command] = block("launch-docker").commands
    said = run(folder, command).stdout
    assert "docker run" in said
    assert "corral train" in said


def test_podman(folder: Path) -> None:
    [command] = block("launch-podman").commands
    assert "podman run" in run(folder, command).stdout


def test_host_setup(folder: Path) -> None:
    for command in block("host-setup").commands:
        assert run(folder, command).stdout.startswith("#!")


def test_dstack(folder: Path) -> None:
    [command] = block("launch-dstack").commands
    assert "dstack apply" in run(folder, command).stdout


def test_kuberay(folder: Path) -> None:
    [command] = block("launch-kuberay").commands
    assert "kubectl" in run(folder, command).stdout


def test_ssh(folder: Path) -> None:
    [command] = block("launch-ssh").commands
    assert "ssh" in run(folder, command).stdout
