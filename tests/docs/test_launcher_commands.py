"""The commands of the launchers' guide. That what they write works is tested where a launcher is there to run it."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from guide_commands import run
from guides import ROOT, Block, block, blocks
from runs import write_recipe


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "hosts.txt").write_text("alice@node1\nnode2:2222 devices=8\n")
    return tmp_path


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (block("launch-slurm"), ["module load cuda"]),
        (block("launch-slurm-amd"), ["/dev/kfd"]),
        (block("launch-slurm-pyxis"), ["--container-image", "apptainer exec"]),
    ],
    ids=["a module", "containers for AMD", "containers of its steps"],
)
def test_slurm(folder: Path, one: Block, words: list[str]) -> None:
    for command, word in zip(one.commands, words, strict=True):
        assert "sbatch" in run(folder, replace(one, text=command))[0]
        [script] = (folder / "launch").glob("*.sbatch")
        assert word in script.read_text()


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (block("launch-docker"), ["docker run", "corral train"]),
        (block("launch-podman"), ["podman run"]),
        (block("launch-dstack"), ["dstack apply"]),
        (block("launch-kuberay"), ["kubectl"]),
        (block("launch-pods"), ["corral up --block", "corral train"]),
        (block("launch-ssh"), ["ssh"]),
    ],
    ids=["docker", "podman", "dstack", "kuberay", "pods", "ssh"],
)
def test_a_launcher_says_what_to_run(folder: Path, one: Block, words: list[str]) -> None:
    [said] = run(folder, one)
    assert all(word in said for word in words)


def test_host_setup(folder: Path) -> None:
    assert all(said.startswith("#!") for said in run(folder, block("host-setup")))


def test_kuberay_with_a_patch(folder: Path) -> None:
    [patch] = [one.text for one in blocks(ROOT / "docs" / "launchers.md") if one.text.startswith("# pod.yaml")]
    (folder / "pod.yaml").write_text(patch)
    run(folder, block("launch-kuberay-patch"))
    [manifest] = (folder / "launch").glob("*.rayjob.yaml")
    recipe, job = yaml.safe_load_all(manifest.read_text())
    assert any("def share_of_vowels" in text for key, text in recipe["data"].items() if key.startswith("code-"))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert (head["priorityClassName"], head["imagePullSecrets"]) == ("high", [{"name": "registry"}])
