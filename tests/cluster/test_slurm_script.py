"""The batch script of `corral launch slurm`: what is in it, and that bash reads it as it was meant."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import write_recipe

from corral.cli.launch import slurm
from corral.cluster.launchers.launch_spec import Accelerator, LaunchSpec
from corral.cluster.launchers.slurm import RCCL, SlurmOptions, script, slurm_launch
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe

NODES = ("cluster.nodes=2", "cluster.devices_per_node=8")
NASTY = ["x'; touch spilt; '", 'x"; touch spilt; "', "$(touch spilt)", "`touch spilt`", "a b\nc", "*", "-n", "\\", "#"]
DOCKER: dict[str, Any] = {"engine": "docker", "image": "corral:latest"}
PODMAN: dict[str, Any] = {"engine": "podman", "image": "corral:latest"}
PYXIS: dict[str, Any] = {"engine": "pyxis", "image": "/images/corral.sqsh"}
APPTAINER: dict[str, Any] = {"engine": "apptainer", "image": "/images/corral.sif"}


@pytest.fixture
def work(tmp_path: Path) -> LaunchSpec:
    return work_in(tmp_path)


def work_in(
    folder: Path, *overrides: str, accelerator: Accelerator = "nvidia", file: str = "recipe.yaml"
) -> LaunchSpec:
    recipe = write_recipe(folder, Path("/models/tiny"))
    return LaunchSpec(load_recipe(recipe, [*NODES, *overrides]), Path(file), (*NODES, *overrides), accelerator)


def options_in(folder: Path, **changes: Any) -> SlurmOptions:
    return replace(SlurmOptions(work_folder=folder, log_folder=folder / "logs"), **changes)


def first_half(text: str) -> str:
    before, same, _ = text.partition("# --- what follows")
    assert same
    return before


def evaluate(text: str, expression: str, **variables: str) -> list[str]:
    """The words that bash makes of an expression after the script's first half."""
    command = f"{first_half(text)}\nprintf '%s\\0' {expression}"
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **variables}
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


def on_node(text: str, *command: str, **variables: str) -> list[str]:
    """What a command prints that a node's shell runs."""
    [shell] = evaluate(text, '"$on_node"')
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.check_output(["bash", "-c", shell, "bash", *command], env=environment, text=True).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["nvidia", "amd", "none"])
@pytest.mark.parametrize(
    "container", [{}, DOCKER, PODMAN, PYXIS, APPTAINER], ids=["bare", "docker", "podman", "pyxis", "apptainer"]
)
def test_bash_and_shellcheck_have_nothing_to_say(
    tmp_path: Path, accelerator: Accelerator, container: dict[str, Any]
) -> None:
    path = tmp_path / "job.sbatch"
    work = work_in(tmp_path, f"name={NASTY[2]}", "seed=1", accelerator=accelerator)
    path.write_text(script(work, options_in(tmp_path, setup=["module load cuda"], **container)))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("container", [{}, DOCKER, PYXIS, APPTAINER], ids=["bare", "docker", "pyxis", "apptainer"])
@pytest.mark.parametrize("text", NASTY)
def test_no_text_of_the_recipe_is_read_by_the_shell(tmp_path: Path, text: str, container: dict[str, Any]) -> None:
    folder = tmp_path / f"folder {text}".replace("\n", " ")
    folder.mkdir()
    named = work_in(tmp_path).recipe.model_copy(update={"name": text})
    work = LaunchSpec(named, Path(f"{text}.yaml"), (f"name={text}",))
    written = script(work, replace(options_in(tmp_path, **container), work_folder=folder))
    words = evaluate(written, '"${train_command[@]}"')
    assert words[-4:] == ["corral", "train", f"{text}.yaml", f"name={text}"]
    assert evaluate(written, '"$PWD"') == [str(folder)]
    assert not list(tmp_path.rglob("spilt"))


def test_what_is_asked_of_slurm(work: LaunchSpec, tmp_path: Path) -> None:
    ask = {"partition": "gpu", "account": "lab", "time": "2-00:00:00", "mem": "200G", "nodelist": "gpu-[0,1]"}
    lines = asked(script(work, options_in(tmp_path, sbatch=ask, grace_s=300)))
    assert {f"--{name}={value}" for name, value in ask.items()} <= lines
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--job-name=tiny", "--requeue"} <= lines
    assert f"--output={tmp_path}/logs/tiny-%j.log" in lines
    assert "--signal=B:TERM@300" in lines
    assert "--no-kill" not in lines


def test_the_kind_of_gpu_can_be_said(work: LaunchSpec, tmp_path: Path) -> None:
    lines = asked(script(work, options_in(tmp_path, sbatch={"gpus-per-node": "h100:4"})))
    assert [line for line in lines if line.startswith("--gpus")] == ["--gpus-per-node=h100:4"]


def test_without_gpus_there_are_worker_slots(tmp_path: Path) -> None:
    text = script(work_in(tmp_path, accelerator="none"), options_in(tmp_path))
    assert not [line for line in asked(text) if line.startswith("--gpus")]
    assert evaluate(text, '"${up_command[@]}"')[-2:] == ["--devices", "8"]


def test_cpus_are_asked_for_the_steps_as_well(work: LaunchSpec, tmp_path: Path) -> None:
    text = script(work, options_in(tmp_path, sbatch={"cpus-per-task": "28"}))
    assert "--cpus-per-task=28" in asked(text)
    assert "--cpus-per-task=28" in evaluate(text, '"${srun_options[@]}"')


def test_a_run_that_can_do_without_a_node_keeps_its_job(tmp_path: Path) -> None:
    assert "--no-kill" in asked(script(work_in(tmp_path, "cluster.min_nodes=1"), options_in(tmp_path)))


@pytest.mark.parametrize("value", ["a b", "x\n#SBATCH --uid=0", "a;b", "$(x)", ""])
def test_what_slurm_would_misread_is_refused(work: LaunchSpec, tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match="a line that Slurm reads"):
        script(work, options_in(tmp_path, sbatch={"partition": value}))
    with pytest.raises(UserError, match="a line that Slurm reads"):
        script(work, options_in(tmp_path, log_folder=tmp_path / f"logs{value}%"))


def test_lines_of_the_user_come_first_and_need_not_be_strict(work: LaunchSpec, tmp_path: Path) -> None:
    text = script(work, options_in(tmp_path, setup=["colour=$not_set", "export NCCL_DEBUG=INFO"]))
    level, flags = evaluate(text, '"$NCCL_DEBUG" "$-"')
    assert level == "INFO"
    assert "u" in flags  # and the rest is


def test_variables_of_another_launcher_are_forgotten(work: LaunchSpec, tmp_path: Path) -> None:
    words = evaluate(script(work, options_in(tmp_path)), '"${RANK-gone}" "${RAY_ADDRESS-gone}"', RANK="3")
    assert words == ["gone", "gone"]


def test_jobs_that_share_a_node_have_ports_of_their_own(work: LaunchSpec, tmp_path: Path) -> None:
    text = script(work, options_in(tmp_path))
    ports = {evaluate(text, '"$port"', SLURM_JOB_ID=job)[0] for job in ("1", "2", "12345678")}
    assert ports == {"20001", "20002", "25678"}
    assert evaluate(script(work, options_in(tmp_path, port=6379)), '"$port"') == ["6379"]


# --- AMD


def test_defaults_for_rccl_give_way_to_the_user(tmp_path: Path) -> None:
    text = script(work_in(tmp_path, accelerator="amd"), options_in(tmp_path))
    names = " ".join(f'"${name}"' for name in RCCL)
    assert evaluate(text, names) == list(RCCL.values())
    assert evaluate(text, '"$NCCL_IB_GID_INDEX"', NCCL_IB_GID_INDEX="1") == ["1"]
    assert evaluate(text, '"${NCCL_IB_HCA-all}"') == ["all"]


def test_of_several_variables_for_devices_amd_gets_one(tmp_path: Path) -> None:
    text = script(work_in(tmp_path, accelerator="amd"), options_in(tmp_path))
    said = on_node(text, "env", ROCR_VISIBLE_DEVICES="2,3", CUDA_VISIBLE_DEVICES="2,3", GPU_DEVICE_ORDINAL="2,3")
    assert [line for line in said if "DEVICE" in line] == ["HIP_VISIBLE_DEVICES=2,3"]
    assert not [line for line in on_node(text, "env") if "DEVICE" in line]


# --- containers


def test_a_container_lives_as_long_as_its_step(work: LaunchSpec, tmp_path: Path) -> None:
    text = script(work, options_in(tmp_path, **DOCKER))
    words = evaluate(text, '"${up_command[@]}"')
    assert words[4:7] == ["docker", "run", "--rm"]
    assert "--detach" not in words
    assert words[words.index("--name") + 1] == "corral-7-0"
    assert words[words.index("corral:latest") :][:3] == ["corral:latest", "corral", "up"]
    assert evaluate(text, '"${train_command[@]}"')[:3] == ["docker", "exec", "corral-7-0"]


@pytest.mark.parametrize("accelerator", ["amd", "nvidia"])
def test_a_container_gets_the_adapters_that_the_script_chooses(tmp_path: Path, accelerator: str) -> None:
    """The line for them is a comment, to be taken in."""
    text = script(work_in(tmp_path, accelerator=accelerator), options_in(tmp_path, **DOCKER))
    words = evaluate(text.replace("# export NCCL_IB_HCA=", "export NCCL_IB_HCA="), '"${up_command[@]}"')
    passed = {words[at + 1] for at, word in enumerate(words) if word == "--env"}
    assert {"NCCL_IB_HCA", "NCCL_DEBUG"} <= passed


def test_waiting_needs_neither_devices_nor_the_heads_container(work: LaunchSpec, tmp_path: Path) -> None:
    words = evaluate(script(work, options_in(tmp_path, **DOCKER)), '"${check_command[@]}"')
    assert "--gpus" not in words
    assert "--name" not in words
    assert words[-3:] == ["corral:latest", "corral", "check"]


@pytest.mark.parametrize(
    ("accelerator", "engine", "flags"),
    [
        ("nvidia", DOCKER, ["--gpus", "all"]),
        ("nvidia", PODMAN, ["--device", "nvidia.com/gpu=all"]),
        ("amd", DOCKER, ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]),
        ("amd", PODMAN, ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]),
    ],
)
def test_containers_get_the_devices(
    tmp_path: Path, accelerator: Accelerator, engine: dict[str, Any], flags: Sequence[str]
) -> None:
    text = script(work_in(tmp_path, accelerator=accelerator), options_in(tmp_path, **engine))
    words = " ".join(evaluate(text, '"${up_command[@]}"'))
    assert " ".join(flags) in words


def test_containers_use_the_devices_of_the_job_only(tmp_path: Path) -> None:
    for accelerator, name in (("nvidia", "CUDA_VISIBLE_DEVICES"), ("amd", "HIP_VISIBLE_DEVICES")):
        work = work_in(tmp_path, accelerator=accelerator)  # type: ignore[arg-type]
        text = script(work, options_in(tmp_path, **DOCKER))
        assert f"{name}=4,5" in on_node(text, "env", SLURM_JOB_GPUS="4,5", CUDA_VISIBLE_DEVICES="0,1")
        assert name in evaluate(text, '"${up_command[@]}"')


def test_containers_see_the_folders_and_variables_that_are_needed(tmp_path: Path) -> None:
    options = options_in(tmp_path / "work", **DOCKER, mounts=["/data:/data:ro"], environment=["WANDB_API_KEY"])
    work = work_in(tmp_path, file="../recipes/recipe.yaml")
    words = evaluate_in(tmp_path / "work", script(work, replace(options, log_folder=Path("/shared/logs"))))
    mounted = [word.split(",")[1] for word in words if word.startswith("type=bind")]
    assert mounted == [f"source={tmp_path}/work", "source=/shared/logs", f"source={tmp_path}/recipes", "source=/data"]
    passed = [words[place + 1] for place, word in enumerate(words) if word == "--env"]
    assert {"SLURM_JOB_NODELIST", "SLURMD_NODENAME", "WANDB_API_KEY"} <= set(passed)


def test_no_value_of_a_variable_is_in_the_script(
    work: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "very-secret")
    text = script(work, options_in(tmp_path, **DOCKER, environment=["WANDB_API_KEY", "RAY_AUTH_TOKEN"]))
    assert "very-secret" not in text


def test_with_pyxis_every_step_is_in_a_container_and_shares_what_ray_needs(tmp_path: Path) -> None:
    options = options_in(tmp_path, **PYXIS, mounts=["/data:/data:ro"], environment=["WANDB_API_KEY"])
    text = script(work_in(tmp_path), options)
    words = evaluate(text, '"${srun_options[@]}"')
    assert words[:3] == ["--overlap", "--nodes=1", "--ntasks=1"]
    given = dict(word.partition("=")[::2] for word in words[3:])
    assert given == {
        "--container-image": "/images/corral.sqsh",
        "--container-mounts": f"{tmp_path}:{tmp_path},/data:/data:ro,/tmp:/tmp,/dev/shm:/dev/shm",
        "--container-workdir": str(tmp_path),
        "--no-container-remap-root": "",
        "--container-env": "WANDB_API_KEY",
    }
    assert evaluate(text, '"${up_command[@]}"')[:2] == ["corral", "up"]
    # Signals and cleaning up are as without containers: there is no daemon between.
    assert evaluate(text, '"$engine" "$container"') == ["", ""]


@pytest.mark.parametrize(("accelerator", "flag"), [("nvidia", ["--nv"]), ("amd", ["--rocm"]), ("none", [])])
def test_with_apptainer_every_command_is_in_a_container(
    tmp_path: Path, accelerator: Accelerator, flag: list[str]
) -> None:
    text = script(work_in(tmp_path, accelerator=accelerator), options_in(tmp_path, **APPTAINER, mounts=["/data::ro"]))
    shell = 4 if accelerator == "amd" else 0
    binds = [f"{tmp_path}:{tmp_path}", "/data:/data:ro", "/tmp:/tmp", "/dev/shm:/dev/shm"]
    expected = ["apptainer", "exec", *flag, *(word for one in binds for word in ("--bind", one))]
    expected += ["--env", "PYTHONNOUSERSITE=1", "--pwd", str(tmp_path), "/images/corral.sif"]
    for name, command in (("up", ["corral", "up"]), ("check", ["corral", "check"]), ("train", ["corral", "train"])):
        words = evaluate(text, f'"${{{name}_command[@]}}"')[shell:]
        assert words[: len(expected) + 2] == [*expected, *command]
    assert evaluate(text, '"$engine" "$container"') == ["", ""]


def test_a_program_in_the_place_of_apptainer_gets_the_words_of_the_command(tmp_path: Path) -> None:
    """With the recipe's name and overrides whole, and the devices of the job."""
    program = tmp_path / "apptainer"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$HIP_VISIBLE_DEVICES" "${@: -2}"\n')
    program.chmod(0o755)
    text = script(work_in(tmp_path, f"name={NASTY[0]}", accelerator="amd"), options_in(tmp_path, **APPTAINER))
    command = f'{first_half(text)}\nexport PATH="{tmp_path}:$PATH"\n"${{train_command[@]}}"'
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "ROCR_VISIBLE_DEVICES": "2,3"}
    said = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert said.stdout.splitlines() == ["2,3", "cluster.devices_per_node=8", f"name={NASTY[0]}"], said.stderr


# --- how it is started


def test_the_script_is_submitted_by_its_full_path(work: LaunchSpec, tmp_path: Path) -> None:
    launch = slurm_launch(work, options_in(tmp_path), tmp_path / "launch")
    assert list(launch.files) == ["tiny.sbatch"]
    assert launch.commands == [["sbatch", f"{tmp_path}/launch/tiny.sbatch"]]


def test_the_folder_of_the_log_is_there_before_slurm_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm(write_recipe(tmp_path, Path("/models/tiny")), list(NODES), out=Path("here/launch"))
    assert (tmp_path / "here/launch/logs").is_dir()
    assert f"sbatch {tmp_path}/here/launch/tiny.sbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"container": "lxc", "image": "x"}, "--container lxc is not docker, podman, pyxis or apptainer"),
        ({"container": "docker"}, "--container and --image go together"),
        ({"container": "pyxis", "image": "x", "shm": "10g"}, "--shm is for docker and podman"),
        ({"container": "apptainer", "image": "x", "env": ["A"]}, "--env is not needed"),
        ({"container": "apptainer", "image": "-x"}, "--image -x is not the name of an image"),
        ({"container": "pyxis", "image": "x", "mount": ["/a,b"]}, "has no , and no :"),
        ({"env": ["WANDB_API_KEY"]}, "--mount and --env are for containers"),
        ({"accelerator": "tpu"}, "--accelerator tpu is not one of"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=re.escape(error)):
        slurm(write_recipe(tmp_path, Path("/models/tiny")), list(NODES), **options)


def asked(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


def evaluate_in(folder: Path, text: str) -> list[str]:
    folder.mkdir()
    return evaluate(text, '"${up_command[@]}"')
