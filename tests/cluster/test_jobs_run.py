"""Jobs on a cluster of two hosts: what is sent with them, what is said of them, and how they end.

The head controls and learns, the other host plays. What is submitted lies in a folder that only the head has, and Ray's
folders are not in the same place on both.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import begin_up
from deadlines import wait_until, within
from hosts import CORRAL, Lab
from runs import RECIPE, num_steps, steps_of

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
NAMES = ("SECRET_OF_THE_RECIPE", "SECRET_OF_THE_COMMAND", "SECRET_OF_THE_FILE")
SECRETS = ("swordfish", "open-sesame", "xyzzy")
ASK = """
import pathlib, sys, urllib.request as ask
token = pathlib.Path("~/.corral/token").expanduser().read_text().strip()
print(ask.urlopen(ask.Request(sys.argv[1], headers={"Authorization": f"Bearer {token}"})).read().decode())
"""
SLOWLY = ("schedule.steps=60", "environment.reward.options.seconds=0.05")
LISTINGS = (
    "/api/jobs/",
    "/api/jobs/{job}",
    "/api/jobs/{job}/logs",
    "/api/v0/actors?detail=1",
    "/api/v0/runtime_envs?detail=1",
    "/api/v0/workers?detail=1",
)
WAIT_S = 90.0


class Project:
    """A folder with a recipe and its code on the head, and `corral` in it. `shared`: a folder that all hosts see."""

    def __init__(self, lab: Lab, shared: Path, model: Path) -> None:
        self.lab, self.shared = lab, shared
        text = RECIPE.format(folder=shared, model=model) + CLUSTER
        text = text.replace("environment: {reward", f"environment: {{env: [{', '.join(NAMES)}], reward")
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

    def begin(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        return self.lab.begin(HEAD, self.command(*arguments), OMP_NUM_THREADS="1", **env)

    def submit(self, name: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.corral("submit", "recipe.yaml", f"name={name}", *arguments, **env)

    def jobs(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self.corral("jobs", "--json").stdout)
        return found

    def num_running(self) -> int:
        """Asked of the dashboard itself: `corral jobs` would take a core's time from what is waited for."""
        return sum(job["status"] == "RUNNING" for job in json.loads(self.ask_dashboard("/api/jobs/")))

    def run_folder(self, name: str) -> Path:
        return self.shared / "runs" / name

    def wait_for_steps(self, name: str, number: int) -> None:
        wait_until(lambda: num_steps(self.run_folder(name)) >= number, WAIT_S)

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
            said, _ = process.communicate(timeout=within(WAIT_S))
            assert process.returncode == 0, said + lab.errors.read_text()
        yield Project(lab, tmp_path_factory.mktemp("shared"), tiny_model)


@dataclass(frozen=True)
class Stopped:
    """A job that was submitted, left with Ctrl-C, and stopped."""

    job: str
    submitting: "subprocess.CompletedProcess[str]"
    second: "subprocess.CompletedProcess[str]"
    """The same recipe, submitted while it ran."""
    stopping: "subprocess.CompletedProcess[str]"
    step: int
    """Of its checkpoint."""
    told: str
    """By the dashboard, while it ran."""


@pytest.fixture(scope="module")
def stopped(project: Project) -> Stopped:
    options = ("--env", f"SECRET_OF_THE_COMMAND={SECRETS[1]}", "--runtime-env", "runtime_env.yaml")
    submit = ("submit", "recipe.yaml", "name=long", *SLOWLY, *options)
    process = project.begin(*submit, SECRET_OF_THE_RECIPE=SECRETS[0])
    project.wait_for_steps("long", 2)
    project.signal(signal.SIGINT, *submit[:3])
    said, _ = process.communicate(timeout=within(WAIT_S))
    [job] = [entry["id"] for entry in project.jobs() if entry["id"].startswith("long-")]
    second = project.submit("long", "--no-wait")
    told = "".join(project.ask_dashboard(path.format(job=job)) for path in LISTINGS)
    stopping = project.corral("stop", "long")
    [checkpoint] = (project.run_folder("long") / "checkpoints").iterdir()
    submitting = subprocess.CompletedProcess(submit, process.returncode, said)
    return Stopped(job, submitting, second, stopping, int(checkpoint.name.removeprefix("step_")), told)


@pytest.mark.core
def test_code_and_variables_are_on_the_nodes_that_use_them(project: Project, stopped: Stopped) -> None:
    assert "sends 3 files of code" in stopped.submitting.stdout
    notes = {tuple(line.split()) for line in (project.shared / "notes").read_text().splitlines()}
    [(host, folder, *secrets)] = notes
    assert host == "h2"
    assert folder.startswith(f"{PRIVATE}/elsewhere/")
    assert secrets == list(SECRETS)


@pytest.mark.core
@pytest.mark.parametrize("secret", SECRETS)
def test_a_variable_is_in_no_listing_and_in_no_file(project: Project, stopped: Stopped, secret: str) -> None:
    assert stopped.job in stopped.told
    assert "DeviceProcess" in stopped.told
    assert secret not in stopped.told
    assert secret not in stopped.submitting.stdout
    for host in (HEAD, OTHER):
        files = project.lab.run(host, ["grep", "-rlF", secret, PRIVATE], check=False).stdout.splitlines()
        assert [file for file in files if file != f"{PROJECT}/runtime_env.yaml"] == []
    assert secret not in (project.run_folder("long") / "recipe.yaml").read_text()


@pytest.mark.core
def test_ctrl_c_leaves_the_job_running(stopped: Stopped) -> None:
    assert stopped.submitting.returncode == 1
    last, job = stopped.submitting.stdout.splitlines()[-1], stopped.job
    assert last == f"job {job} goes on: `corral logs {job} -f` follows it again, `corral stop {job}` stops it"


@pytest.mark.core
def test_a_second_job_does_not_write_to_the_run_of_one_that_is_not_done(project: Project, stopped: Stopped) -> None:
    assert stopped.second.returncode == 2
    [line] = stopped.second.stderr.splitlines()
    assert line.startswith(f"error: job {stopped.job} is running and writes {project.run_folder('long')} already")


@pytest.mark.core
def test_a_job_that_is_stopped_saves_and_says_so(project: Project, stopped: Stopped) -> None:
    assert stopped.stopping.returncode == 0, stopped.stopping.stderr
    where = f"a checkpoint of step {stopped.step} of 60 is in {project.run_folder('long')}"
    assert stopped.stopping.stdout.splitlines()[-1].startswith(f"job {stopped.job} was stopped: {where}")
    again = project.corral("stop", stopped.job)
    assert again.returncode == 2
    assert again.stderr == f"error: job {stopped.job} does not run any more: it was stopped\n"


def test_a_resumed_job_goes_on_when_its_terminal_is_closed(project: Project, stopped: Stopped) -> None:
    faster = (f"schedule.steps={stopped.step + 4}", "--resume", "--resume-anyway")  # without SLOWLY's option
    submit = ("submit", "recipe.yaml", "name=long", *faster)
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under `nohup` ignore it, and so would the command
    process = project.begin(*submit)
    signal.signal(signal.SIGHUP, ours)
    wait_until(lambda: project.num_running() == 1, WAIT_S, pause_s=0.2)
    project.signal(signal.SIGHUP, *submit)
    assert process.wait(timeout=within(WAIT_S)) != 0
    followed = project.corral("logs", project.jobs()[0]["id"], "-f")
    assert f"resumed after step {stopped.step}" in followed.stdout
    assert "corral export" in followed.stdout.splitlines()[-1]
    wait_until(lambda: project.jobs()[0]["state"] == "succeeded", WAIT_S, pause_s=0.2)
    assert [row["step"] for row in steps_of(project.run_folder("long"))] == list(range(1, stopped.step + 5))


def test_without_a_checkpoint_there_is_nothing_to_resume(project: Project) -> None:
    refused = project.submit("new", "--resume")
    assert refused.returncode == 2
    where = project.run_folder("new")
    assert refused.stderr == f"error: --resume: there is no checkpoint in {where} on h1 to go on from\n"


def test_a_job_that_is_followed_ends_with_its_state_and_its_true_folder(project: Project) -> None:
    """One that begins anew beside an earlier run, in the folder it was submitted from."""
    (project.run_folder("again")).mkdir(parents=True)
    (project.run_folder("again") / "metrics.jsonl").write_text("{}\n")
    finished = project.submit("again", "checkpoint.resume=never", "~cluster", "--no-code")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last.startswith("job again-")
    assert " succeeded after " in last
    assert last.endswith(f"; run folder {project.run_folder('again-2')}")


@pytest.fixture(scope="module")
def failing(project: Project) -> "subprocess.CompletedProcess[str]":
    """A job whose model is not there."""
    return project.submit("failing", "model.path=./nowhere", "~cluster")


@pytest.mark.core
def test_a_job_that_fails_says_why_in_its_last_lines(
    project: Project, failing: "subprocess.CompletedProcess[str]"
) -> None:
    assert failing.returncode == 1
    assert failing.stdout.splitlines()[-1] == f"error: model.path: {PROJECT}/nowhere is not a folder"
    [line] = failing.stderr.splitlines()
    assert line.startswith("error: job failing-")
    assert " failed with exit code 2 after " in line
    assert line.endswith(f"; run folder {project.run_folder('failing')}")
    assert "failed, exit code 2" in project.corral("status", "failing").stdout
    assert project.corral("logs", "failing", "--tail=1").stdout == failing.stdout.splitlines()[-1] + "\n"


@pytest.mark.usefixtures("failing")
def test_a_few_letters_are_enough_if_they_mean_one_job(project: Project, stopped: Stopped) -> None:
    jobs = [entry["id"] for entry in project.jobs()]
    heading, *rows = project.corral("jobs").stdout.splitlines()
    assert heading.split() == ["job", "state", "started", "duration", "run", "folder"]
    assert [row.split()[0] for row in rows] == jobs
    several = project.corral("logs", "")
    assert several.returncode == 2
    assert several.stderr.startswith(f"error: several jobs begin with ``: {jobs[0]}, ")
    none = project.corral("logs", stopped.job.replace("long", "log"))
    assert none.returncode == 2
    assert f"did you mean {stopped.job}" in none.stderr


def test_elsewhere_than_on_the_head_it_is_said_what_to_do(project: Project) -> None:
    said = project.lab.run(OTHER, [*CORRAL, "jobs"], check=False)
    assert said.returncode == 2
    [line] = said.stderr.splitlines()
    head = project.lab.hosts[HEAD].address
    assert f"the dashboard listens on the loopback of the head node, {head}, only" in line
    assert f"ssh -L 8265:127.0.0.1:8265 {head}" in line
