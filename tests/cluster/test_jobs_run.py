"""Jobs on a cluster of two hosts: what is sent with them, what is said of them, and how they end.

The head controls and learns, the other host plays. What is submitted lies in a folder that only the head has, and Ray's
folders are not in the same place on both.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import CORRAL, begin_up
from hosts import Lab
from runs import RECIPE, steps_of

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("jobs")]

HEAD, OTHER = 0, 1
PRIVATE = f"/tmp/corral-{os.getuid()}"
"""Every host has its own."""
PROJECT = f"{PRIVATE}/project"
CLUSTER = """\
cluster:
  nodes: 2
  devices_per_node: 1
  placement: {actor: 0, rollout: 1}
  environment: [SECRET_OF_THE_RECIPE]
"""
REWARD = '''\
"""Writes down where it is called, and what it finds there."""

import os
import socket
import time

from helpers.letters import share_of_vowels

SECRETS = ("SECRET_OF_THE_RECIPE", "SECRET_OF_THE_COMMAND", "SECRET_OF_THE_FILE")


def score(response, notes, seconds=0.0):
    found = [os.environ.get(name, "-") for name in SECRETS]
    with open(notes, "a") as file:
        file.write(" ".join([socket.gethostname(), os.getcwd(), *found]) + "\\n")
    time.sleep(seconds)
    return share_of_vowels(response)
'''
HELPER = """\
def share_of_vowels(response):
    with open("vowels.txt") as file:
        vowels = file.read()
    return sum(letter in vowels for letter in response) / 8
"""
SECRETS = ("swordfish", "open-sesame", "xyzzy")
ASK = """
import pathlib, sys, urllib.request as ask
token = pathlib.Path("~/.corral/token").expanduser().read_text().strip()
print(ask.urlopen(ask.Request(sys.argv[1], headers={"Authorization": f"Bearer {token}"})).read().decode())
"""
WAIT_S = 90.0


class Project:
    """A folder with a recipe and its code on the head, and `corral` in it. `shared`: a folder that all hosts see."""

    def __init__(self, lab: Lab, shared: Path, model: Path) -> None:
        self.lab, self.shared = lab, shared
        text = RECIPE.format(folder=shared, model=model) + CLUSTER
        reward = f'"score.py:score", options: {{notes: {shared}/notes}}'
        files = {
            "recipe.yaml": text.replace(f'"{shared}/vowels.py:share_of_vowels"', reward),
            "score.py": REWARD,
            "helpers/letters.py": HELPER,
            "vowels.txt": "aeiou",
            "runtime_env.yaml": f"env_vars: {{SECRET_OF_THE_FILE: {SECRETS[2]}}}\n",
        }
        for name, content in files.items():
            path = shared / "project" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        lab.run(HEAD, ["cp", "-r", str(shared / "project"), PROJECT])

    def command(self, *arguments: str) -> list[str]:
        return ["sh", "-c", 'cd "$0" && exec "$@"', PROJECT, *CORRAL, *arguments]

    def corral(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.lab.run(HEAD, self.command(*arguments), timeout_s=WAIT_S, check=False, OMP_NUM_THREADS="1", **env)

    def begin(self, *arguments: str) -> "subprocess.Popen[str]":
        return self.lab.begin(HEAD, self.command(*arguments), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")

    def submit(self, name: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.corral("submit", "recipe.yaml", f"name={name}", *arguments, **env)

    def jobs(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self.corral("jobs", "--json").stdout)
        return found

    def run_folder(self, name: str) -> Path:
        return self.shared / "runs" / name

    def slowly(self, steps: int) -> tuple[str, ...]:
        return (f"schedule.steps={steps}", "environment.reward.options.seconds=0.05", "batch.prompts_per_step=8")

    def wait_for_steps(self, name: str, number: int) -> None:
        metrics = self.run_folder(name) / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= number)

    def ask_dashboard(self, path: str) -> str:
        return self.lab.run(HEAD, [sys.executable, "-c", ASK, f"http://127.0.0.1:8265{path}"]).stdout

    def signal(self, number: signal.Signals, *arguments: str) -> None:
        """To the command with these arguments."""
        [pid] = self.lab.run(HEAD, ["pgrep", "-f", f"^{sys.executable} .*{' '.join(arguments)}"]).stdout.split()
        self.lab.run(HEAD, ["kill", f"-{number.value}", pid])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Project]:
    with Lab(2) as lab:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[HEAD].address}
        head = begin_up(lab, HEAD, devices=1, RANK="0", **place)
        other = begin_up(lab, OTHER, f"--temp-dir={PRIVATE}/elsewhere", devices=1, RANK="1", **place)
        for process in (other, head):
            said, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, said + lab.errors.read_text()
        yield Project(lab, tmp_path_factory.mktemp("shared"), tiny_model)


def test_a_job_runs_with_its_code_and_secrets_on_every_node_and_nobody_else_sees_them(project: Project) -> None:
    options = ("--env", f"SECRET_OF_THE_COMMAND={SECRETS[1]}", "--runtime-env", "runtime_env.yaml")
    finished = project.submit("first", *options, SECRET_OF_THE_RECIPE=SECRETS[0])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [job] = [entry for entry in project.jobs() if entry["id"].startswith("first-")]
    lines = finished.stdout.splitlines()
    assert "sends 3 files of code" in finished.stdout
    assert lines[-1].startswith(f"job {job['id']} succeeded after ")
    assert lines[-1].endswith(f"; run folder {project.run_folder('first')}")
    assert len(steps_of(project.run_folder("first"))) == 2
    notes = {tuple(line.split()) for line in (project.shared / "notes").read_text().splitlines()}
    [(host, folder, *secrets)] = notes
    assert host == "h2"
    assert folder.startswith(f"{PRIVATE}/elsewhere/")
    assert secrets == list(SECRETS)

    asked = ("/api/jobs/", f"/api/jobs/{job['id']}", "/api/v0/actors?detail=1", "/api/v0/runtime_envs?detail=1")
    told = "".join(map(project.ask_dashboard, (*asked, "/api/v0/workers?detail=1", f"/api/jobs/{job['id']}/logs")))
    assert job["id"] in told
    assert "DeviceProcess" in told
    for secret in SECRETS:
        assert secret not in told
        assert secret not in finished.stdout
        for number in (HEAD, OTHER):
            where = [PRIVATE, "--exclude=runtime_env.yaml"] if number == HEAD else [PRIVATE]
            found = project.lab.run(number, ["grep", "-rlF", secret, *where], check=False)
            assert found.stdout == "", "no file of any host has it"


def test_a_job_that_fails_says_why_in_its_last_lines(project: Project) -> None:
    finished = project.submit("failing", "model.path=./nowhere")
    assert finished.returncode == 1
    assert finished.stdout.splitlines()[-1] == f"error: model.path: {PROJECT}/nowhere is not a folder"
    [line] = finished.stderr.splitlines()
    assert line.startswith("error: job failing-")
    assert " failed with exit code 2 after " in line
    assert line.endswith(f"; run folder {project.run_folder('failing')}")
    assert "failed, exit code 2" in project.corral("status", "failing").stdout


def test_a_job_goes_on_without_its_terminal_and_saves_when_it_is_stopped_and_is_resumed(project: Project) -> None:
    unknown = project.submit("long", "--resume")
    assert unknown.returncode == 2
    assert (
        unknown.stderr
        == f"error: --resume: there is no checkpoint in {project.run_folder('long')} on h1 to go on from\n"
    )

    submitting = project.begin("submit", "recipe.yaml", "name=long", *project.slowly(40))
    project.wait_for_steps("long", 2)
    project.signal(signal.SIGINT, "submit", "recipe.yaml", "name=long")
    said, _ = submitting.communicate(timeout=20)
    [job] = [entry["id"] for entry in project.jobs() if entry["id"].startswith("long-")]
    assert submitting.returncode == 1
    assert f"job {job} goes on: `corral logs {job} -f` follows it again, `corral stop {job}` stops it" in said

    second = project.submit("long", "--no-wait")
    assert second.returncode == 2
    assert f"job {job} is running and writes {project.run_folder('long')} already" in second.stderr

    stopped = project.corral("stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    [step] = [int(path.name[5:]) for path in (project.run_folder("long") / "checkpoints").iterdir()]
    last = stopped.stdout.splitlines()[-1]
    assert last.startswith(
        f"job {job} was stopped: a checkpoint of step {step} of 40 is in {project.run_folder('long')}"
    )
    assert project.corral("stop", job).stderr == f"error: job {job} does not run any more: it was stopped\n"

    resuming = project.begin("submit", "recipe.yaml", "name=long", f"schedule.steps={step + 4}", "--resume")
    project.wait_for_steps("long", step + 1)
    project.signal(signal.SIGHUP, "submit", "recipe.yaml", "name=long")
    assert resuming.wait(timeout=20) == -signal.SIGHUP
    wait_until(lambda: all(entry["state"] in ("succeeded", "stopped", "failed") for entry in project.jobs()))
    resumed = project.jobs()[0]
    assert resumed["state"] == "succeeded"
    assert f"goes on after step {step}" in project.corral("logs", resumed["id"]).stdout
    assert [row["step"] for row in steps_of(project.run_folder("long"))] == list(range(1, step + 5))


def test_a_few_letters_are_enough_if_they_mean_one_job(project: Project) -> None:
    jobs = [entry["id"] for entry in project.jobs()]
    table = project.corral("jobs").stdout.splitlines()
    assert table[0].split() == ["job", "state", "started", "duration", "run", "folder"]
    assert [line.split()[0] for line in table[1:]] == jobs
    assert project.corral("logs", "failing", "--tail=1").stdout.startswith("error: model.path")
    several = project.corral("logs", "long")
    assert several.returncode == 2
    assert several.stderr.startswith("error: several jobs begin with `long`: long-")
    none = project.corral("logs", "frist")
    assert none.returncode == 2
    assert "there is no job `frist`" in none.stderr


def test_elsewhere_than_on_the_head_it_is_said_what_to_do(project: Project) -> None:
    said = project.lab.run(OTHER, [*CORRAL, "jobs"], check=False)
    assert said.returncode == 2
    [line] = said.stderr.splitlines()
    head = project.lab.hosts[HEAD].address
    assert f"the dashboard listens on the loopback of the head node, {head}, only" in line
    assert f"ssh -L 8265:127.0.0.1:8265 {head}" in line


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
