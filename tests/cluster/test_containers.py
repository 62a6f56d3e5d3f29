"""Containers with docker and podman: the words of their command lines, and clusters that these start."""

import csv
import itertools
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import IMAGE, REPOSITORY, Podman
from hosts import CORRAL
from launching import HOSTILE, work
from runs import steps_of, write_recipe
from served import free_port

from corral.cluster.launchers.containers import ContainerCluster, mount_flag, run_command
from corral.recipe.errors import UserError

DOCKERFILES = [REPOSITORY / "docker" / name for name in ("Dockerfile", "Dockerfile.rocm")]
RUN_S = 240


# --- the words


def flags(folder: Path, engine: Any = "docker", accelerator: Any = "nvidia", **options: Any) -> list[str]:
    return run_command(engine, accelerator, "corral", folder=folder, **options)


def pairs(words: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def containers(folder: Path, *overrides: str, **options: Any) -> ContainerCluster:
    of = work(folder, *overrides, accelerator=options.pop("accelerator", "nvidia"), nodes=options.pop("nodes", 2))
    given = {"engine": "docker", "image": "corral", "name": "x", "head": "gpu1", "token_file": Path("/home/me/token")}
    return ContainerCluster(spec=of, folder=folder, **{**given, **options})


@pytest.mark.parametrize(
    ("engine", "accelerator", "expected"),
    [
        ("docker", "nvidia", {("--gpus", "all")}),
        ("podman", "nvidia", {("--device", "nvidia.com/gpu=all")}),
        ("docker", "amd", {("--device", "/dev/kfd"), ("--device", "/dev/dri"), ("--group-add", "video")}),
        ("podman", "amd", {("--cap-add", "SYS_PTRACE"), ("--security-opt", "seccomp=unconfined")}),
    ],
)
def test_containers_get_the_devices(tmp_path, engine, accelerator, expected):
    assert expected <= pairs(flags(tmp_path, engine, accelerator))


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_without_gpus_there_are_no_devices_and_no_limits_that_only_they_need(tmp_path, engine):
    words = flags(tmp_path, engine, "none")
    assert not {"--gpus", "--device", "--ulimit", "--cap-add"} & set(words)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_shared_memory_has_a_size_that_is_not_ignored(tmp_path, engine):
    words = flags(tmp_path, engine, shm="64g")
    assert ("--shm-size", "64g") in pairs(words)
    assert not any(word.startswith("--ipc") for word in words)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_no_port_is_published_and_processes_are_reaped(tmp_path, engine):
    words = flags(tmp_path, engine)
    assert ("--network", "host") in pairs(words)
    assert "--init" in words
    assert not {"-p", "--publish"} & set(words)


def test_secrets_are_passed_by_name(tmp_path):
    assert ("--env", "WANDB_API_KEY") in pairs(flags(tmp_path, environment=["WANDB_API_KEY"]))
    with pytest.raises(UserError, match=r"WANDB_API_KEY=\.\.\.") as refused:
        flags(tmp_path, environment=["WANDB_API_KEY=hunter2"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("/a", ["type=bind", "source=/a", "target=/a"]),
        ("/a:/b", ["type=bind", "source=/a", "target=/b"]),
        ("/a::ro", ["type=bind", "source=/a", "target=/a", "readonly"]),
        ('/a,b "c:/d:ro', ["type=bind", 'source=/a,b "c', "target=/d", "readonly"]),
    ],
)
def test_mounts_are_written_as_the_engines_read_them(given, fields):
    assert next(csv.reader([mount_flag(given)])) == fields


@pytest.mark.parametrize("given", ["relative", "/a:b", "/a:/b:rwx", ""])
def test_a_mount_that_is_none_is_refused(given):
    with pytest.raises(UserError, match="--mount"):
        mount_flag(given)


def test_an_option_is_not_an_image(tmp_path):
    with pytest.raises(UserError, match="--privileged"):
        run_command("docker", "nvidia", "--privileged", folder=tmp_path)


def test_the_head_is_awaited_before_the_others_start(tmp_path):
    steps = containers(tmp_path).bring_up()
    assert [step.where for step in steps] == [
        "on the head, gpu1",
        "on the head, gpu1",
        "on the node with rank 1",
        "on the head, gpu1",
    ]
    assert steps[1].command[-4:] == ["check", "8", "--nodes", "1"]
    assert steps[3].command[-4:] == ["check", "16", "--nodes", "2"]
    assert not any("sleep" in word for step in steps for word in step.command)


def test_every_node_is_told_who_it_is(tmp_path):
    head, worker = (step.command for step in containers(tmp_path).bring_up() if "run" in step.command)
    for rank, command in enumerate((head, worker)):
        assert {f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=gpu1", "MASTER_PORT=6379"} <= set(command)
        assert command[-4:] == ["corral", "corral", "up", "--block"]


def test_a_recipe_elsewhere_is_seen_too(tmp_path):
    (tmp_path / "here").mkdir()
    of = work(tmp_path)
    cluster = ContainerCluster("docker", of, "corral", "x", "gpu1", tmp_path / "here", token_file=None)
    assert any(f"source={tmp_path},target={tmp_path},readonly" in word for word in cluster.bring_up()[0].command)


@pytest.mark.slow
def test_what_the_recipe_says_is_never_read_by_a_shell(tmp_path):
    """The lines, as printed, are read back to the words that they were made of."""
    (tmp_path / "recipes; reboot").mkdir()
    write_recipe(tmp_path / "recipes; reboot", tmp_path / "model")
    words = ["launch", "docker", "recipes; reboot/recipe.yaml", HOSTILE, "cluster.nodes=1", "--token-file", "t$(x)"]
    result = subprocess.run([*CORRAL, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    train = next(shlex.split(line) for line in lines if " train " in line)
    name = "run-touch-no-x-rm-rf-y"
    assert train == [
        "docker",
        "exec",
        name,
        "corral",
        "train",
        "recipes; reboot/recipe.yaml",
        HOSTILE,
        "cluster.nodes=1",
    ]
    assert all(shlex.split(line)[0] == "docker" for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster.nodes=2"], "--head HOST"),
        (["cluster.nodes=2", "--head", "a", "--go"], "belong on 2 machines"),
        (["cluster.nodes=2", "--local"], "share this machine's GPUs"),
        (["--accelerator", "tpu"], "tpu"),
    ],
)
@pytest.mark.slow
def test_what_cannot_work_is_refused_in_one_line(tmp_path, words, said):
    write_recipe(tmp_path, tmp_path / "model")
    command = [*CORRAL, "launch", "docker", "recipe.yaml", *words]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert said in line


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


# --- Dockerfiles


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_copy_all_that_is_installed(file):
    """And name no file that is not there. The layers that install are not built here: they take images that cannot be
    pulled, and gigabytes."""
    text = file.read_text()
    copied = [words.split() for words in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)]
    sources = {source for words in copied for source in words[:-1]}
    assert sources - {"constraints.txt"} == {"pyproject.toml", "README.md", "LICENSE", "locks", "corral"}
    assert all((REPOSITORY / source).exists() for source in sources)
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert extras is not None
    known = re.findall(r"^([a-z0-9-]+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras[1].split(",")) <= set(known)
    locked = re.search(r"^lock docker (.*)$", (REPOSITORY / "locks" / "update.sh").read_text(), re.MULTILINE)
    assert locked is not None
    assert re.findall(r"--extra (\S+)", locked[1]) == extras[1].split(",")
    assert text.count("ARG BASE=") == 1
    assert "FROM ${BASE}" in text


@pytest.mark.lab
@pytest.mark.xdist_group("podman")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_podman_reads_the_dockerfiles_and_builds_what_needs_no_network(podman, file):
    words = ["build", "--isolation=chroot", "--target=sources", f"--file={file}", f"--tag=sources-{file.name.lower()}"]
    podman.run(*words, str(REPOSITORY))
    bad = podman.folder / "bad"
    bad.write_text(file.read_text().replace("FROM ${BASE}", "FORM ${BASE}"))
    assert podman.run(*words[:3], f"--file={bad}", str(REPOSITORY), check=False).returncode != 0


# --- clusters


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with Podman() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    write_recipe(tmp_path, tmp_path / "model")
    return tmp_path


def launch(podman: Podman, engine: str, *words: str) -> list[str]:
    seen = [word for mount in podman.mounts for word in ("--mount", mount)]
    small = ["--image", IMAGE, "--shm", "1g", "--accelerator", "none", "cluster.devices_per_node=1"]
    return [*CORRAL, "launch", engine, "recipe.yaml", *small, *seen, *words]


@pytest.mark.core
@pytest.mark.lab
@pytest.mark.xdist_group("podman")
def test_the_lines_start_a_cluster_of_two_containers_that_trains(podman, folder):
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    name = f"lines-{os.getpid()}"
    words = launch(podman, "podman", "cluster.nodes=2", "--local", "--name", name, "--token-file", str(token))
    lines = podman.command(words, cwd=folder).stdout
    assert token.read_text() not in lines
    script = folder / "lines.sh"
    script.write_text(lines)
    try:
        said = podman.command(["bash", "-e", "-x", str(script)], cwd=folder, timeout_s=RUN_S).stdout
    finally:
        podman.run("rm", "--force", "--ignore", f"{name}-0", f"{name}-1", check=False)
    assert "2 devices on 2 nodes" in said
    assert len(steps_of(folder / "runs" / "tiny")) == 2
    assert name not in podman.run("network", "ls").stdout


@pytest.mark.lab
@pytest.mark.xdist_group("podman")
def test_dockers_client_starts_a_node_and_trains_on_it(podman, folder):
    """docker's own client takes the lines, and podman answers it as docker's daemon would. The token comes from the
    environment, by name."""
    if shutil.which("docker") is None:
        pytest.skip("needs docker's client")
    podman.env |= {"DOCKER_HOST": podman.docker_host(), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    name = f"docker-{os.getpid()}"
    words = ["cluster.nodes=1", "--name", name, "--port", str(free_port()), "--env", "RAY_AUTH_TOKEN", "--go"]
    result = podman.command(launch(podman, "docker", *words), cwd=folder, timeout_s=RUN_S)
    assert "1 device on 1 node" in result.stdout
    assert podman.env["RAY_AUTH_TOKEN"] not in result.stdout
    assert len(steps_of(folder / "runs" / "tiny")) == 2
    assert name not in podman.run("ps", "--all").stdout


@pytest.mark.lab
@pytest.mark.xdist_group("podman")
def test_a_container_that_fails_says_why_and_nothing_is_left(podman, folder):
    """Its token file is empty."""
    token = folder / "token"
    token.touch(mode=0o600)
    name = f"fails-{os.getpid()}"
    words = launch(podman, "podman", "cluster.nodes=2", "--local", "--go", "--name", name, "--token-file", str(token))
    result = podman.command(words, cwd=folder, check=False, timeout_s=60)
    assert result.returncode == 1
    assert "is empty" in result.stdout + result.stderr
    assert f"podman exec {name}-0" in result.stderr.splitlines()[-1]
    assert name not in podman.run("ps", "--all").stdout + podman.run("network", "ls").stdout
