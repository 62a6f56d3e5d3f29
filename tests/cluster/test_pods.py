"""A job of PAI-DLC or Kubeflow: three hosts that share no folder, with the variables that pods have."""

import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import SMALL, UP_S, begin_up, corral
from deadlines import wait_until, within
from hosts import CORRAL, Lab
from runs import RECIPE, REWARD
from runs import write_recipe as write_local_recipe

from corral.cluster.identity import head_address, is_known
from corral.cluster.launchers.launch_spec import LaunchSpec
from corral.cluster.launchers.pods import RANK, check_common_token, pods_script
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.runtime.token import find_token

PRIVATE = f"/tmp/corral-{os.getuid()}"
"""Every host has its own."""
PORT = "23456"
SERVICE = "10.255.7.7"


def pod(number: int, token: str, **own: str) -> dict[str, str]:
    """Variables of a pod of PAI-DLC."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "dlc-master-0",
        "MASTER_PORT": PORT,
        "HOME": f"{PRIVATE}/home",
        "RAY_AUTH_TOKEN": token,
        **own,
    }


# --- without hosts


def test_a_head_in_a_pod_may_have_a_service_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not is_known("no-such-host.invalid", None)
    assert is_known(SERVICE, None)
    with pytest.raises(UserError, match=rf"that is {SERVICE}, .*--address"):
        head_address(SERVICE, None, False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert is_known("no-such-host.invalid", None)
    own = head_address(None, None, False)
    assert head_address(SERVICE, None, False) == head_address("no-such-host.invalid", None, False) == own


def test_pods_without_a_token_in_common_fail_before_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN"):
        check_common_token()
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN has 4 characters"):
        find_token(None, None, {"RAY_AUTH_TOKEN": "1234"})


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"RANK": "2"}, "2"),
        ({"RANK": "16", "PET_NODE_RANK": "2"}, "2"),
        ({"NODE_RANK": "1", "RANK": "0"}, "1"),
        ({}, "0"),
    ],
)
def test_a_pods_script_finds_its_rank_as_corral_does(variables: dict[str, str], rank: str) -> None:
    said = subprocess.run(["sh", "-c", f'echo "{RANK}"'], env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == rank


@pytest.mark.parametrize(("signals", "code"), [(1, 7), (2, 7), (0, 3)])
def test_a_signal_to_a_pod_reaches_its_run_whose_exit_code_is_the_pods(tmp_path: Path, signals: int, code: int) -> None:
    program = tmp_path / "corral"
    train = "trap 'sleep 0.2; exit 7' TERM; touch began; while test ! -e end; do sleep 0.02; done; exit 3"
    program.write_text(f'#!/bin/sh\necho "$*" >> said\ntest "$1" = train || exit 0\n{train}\n')
    program.chmod(0o755)
    recipe = load_recipe(write_local_recipe(tmp_path, tmp_path), ["cluster={nodes: 1, devices_per_node: 1}"])
    script = pods_script(LaunchSpec(recipe, Path("recipe.yaml")), ["corral", "train", "recipe.yaml"])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=environment) as pod:
        wait_until((tmp_path / "began").exists)
        for _ in range(signals):
            pod.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        if not signals:
            (tmp_path / "end").touch()
        assert pod.wait(within(10)) == code
    verbs = [line.split()[0] for line in (tmp_path / "said").read_text().splitlines()]
    assert verbs == ["up", "check", "train", "down"]


# --- on hosts


@pytest.fixture(scope="module")
def token() -> str:
    return secrets.token_hex(32)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        for host in range(3):
            made.run(host, ["mkdir", "-p", f"{PRIVATE}/home", f"{PRIVATE}/work"])
        yield made


@pytest.fixture
def down(lab: Lab, token: str) -> Iterator[None]:
    """Ends what a test has started on the hosts."""
    yield
    for host in (2, 1, 0):
        corral(lab, host, "down", "--force", **pod(host, token))


def name_head(lab: Lab, host: int, address: str) -> None:
    lab.run(host, ["sh", "-c", f"echo {address} dlc-master-0 >> /etc/hosts"])


def write(lab: Lab, host: int, name: str, content: str) -> None:
    lab.run(host, ["sh", "-c", f"cat > {PRIVATE}/work/{name} << 'END'\n{content}END\n"])


def write_recipe(lab: Lab, host: int = 0) -> None:
    """In a folder that no other host has."""
    text = RECIPE.format(folder=f"{PRIVATE}/work", model="blank-1m").replace(f"{PRIVATE}/work/vowels.py", "vowels.py")
    text += "cluster: {nodes: 3, devices_per_node: 1, placement: {actor: 0, rollout: 1-2}}\n"
    write(lab, host, "recipe.yaml", text)
    write(lab, host, "vowels.py", REWARD)


def in_work(*arguments: str) -> list[str]:
    return ["sh", "-c", f'cd {PRIVATE}/work && exec "$@"', "sh", *CORRAL, *arguments]


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("pods")
@pytest.mark.usefixtures("down")
def test_dlcs_variables_bring_up_a_cluster_that_takes_jobs(lab: Lab, token: str) -> None:
    for host in (1, 2):
        name_head(lab, host, lab.hosts[0].address)
    started = [begin_up(lab, host, devices=1, **pod(host, token)) for host in range(3)]
    wait_until(lambda: "waiting for the name dlc-master-0" in lab.errors.read_text(), said=lab.errors.read_text)
    name_head(lab, 0, lab.hosts[0].address)  # known a moment later than in the other pods
    for process in started:
        said, _ = process.communicate(timeout=UP_S)
        assert process.returncode == 0, f"{said}\n{lab.errors.read_text()}"
    variables = pod(0, token)
    write_recipe(lab)

    def head(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return lab.run(0, in_work(*arguments), timeout_s=120, check=False, OMP_NUM_THREADS="1", **variables)

    assert "3 devices on 3 nodes" in head("check", "3", "--nodes", "3").stdout
    submitted = head("submit", "recipe.yaml", "name=first", "--no-wait", "schedule.steps=1000")
    assert submitted.returncode == 0, submitted.stderr
    name = submitted.stdout.partition("submitted ")[2].split()[0]
    assert name in head("jobs").stdout
    wait_until(lambda: "reward" in head("logs", name).stdout, 180, lambda: head("logs", name).stdout, 1.0)
    stopped = head("stop", name)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped" in head("status", name).stdout.lower()


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("pods")
@pytest.mark.usefixtures("down")
def test_one_command_in_all_pods_trains_and_ends_them_all(lab: Lab, token: str) -> None:
    wrapper = f'test "$1" = up && set -- "$@" {shlex.join(SMALL)}\nexec {shlex.join(CORRAL)} "$@"\n'
    for host in range(3):
        write_recipe(lab, host)
        write(lab, host, "corral", f"#!/bin/sh\n{wrapper}")
    script = f"cd {PRIVATE}/work && chmod +x corral && PATH=$PWD:$PATH exec corral launch pods recipe.yaml --go"
    command = ["sh", "-c", f"{script} --accelerator none"]
    where = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "23457", "OMP_NUM_THREADS": "1"}
    started = [lab.begin(host, command, **pod(host, token, **where)) for host in range(3)]
    said = [process.communicate(timeout=within(240))[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], f"{said}\n{lab.errors.read_text()}"
    assert "all 3 nodes are there" in said[0]
    assert "this pod has left" in said[2] + lab.errors.read_text()
    assert (lab.run(0, ["wc", "-l", f"{PRIVATE}/work/runs/tiny/metrics.jsonl"]).stdout.split())[0] == "2"
