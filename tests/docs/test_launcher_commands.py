"""The commands of the launchers' guide. That what they write works is tested where a launcher is there to run it."""

import shlex
from pathlib import Path

import pytest
import yaml
from commands import Finished, corral
from guides import ROOT, block, blocks
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


def test_slurm_with_containers_of_its_steps(folder: Path) -> None:
    for command, word in zip(
        block("launch-slurm-pyxis").commands, ("--container-image", "apptainer exec"), strict=True
    ):
        run(folder, command)
        [script] = (folder / "launch").glob("*.sbatch")
        assert word in script.read_text()


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


def test_kuberay_with_a_patch(folder: Path) -> None:
    [command] = block("launch-kuberay-patch").commands
    [patch] = [one.text for one in blocks(ROOT / "docs" / "launchers.md") if one.text.startswith("# pod.yaml")]
    (folder / "pod.yaml").write_text(patch)
    run(folder, command)
    [manifest] = (folder / "launch").glob("*.rayjob.yaml")
    recipe, job = yaml.safe_load_all(manifest.read_text())
    assert any("def share_of_vowels" in text for key, text in recipe["data"].items() if key.startswith("code-"))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert (head["priorityClassName"], head["imagePullSecrets"]) == ("high", [{"name": "registry"}])


def test_ssh(folder: Path) -> None:
    [command] = block("launch-ssh").commands
    assert "ssh" in run(folder, command).stdout
