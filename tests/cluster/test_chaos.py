"""The schedule of faults, the audit, the report; and a stand-in for a run, which is hit as a real one would be."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import start_corral
from deadlines import within
from guides import block
from hosts import CORRAL, Lab
from runs import write_recipe

from corral.cluster import chaos
from corral.cluster.chaos import ChaosRun
from corral.cluster.chaos_report import ChaosOptions, ChaosReport, FaultRecord, audit_folder, explain_end
from corral.cluster.faults import KINDS, Reach, descendants, make_schedule
from corral.cluster.node_processes import NodeProcess

STAND_IN = """
import json, os, signal, sys, time
folder, is_honest = sys.argv[1], sys.argv[2] == "honest"
def stop(*_):
    print("resume  the same command again" if is_honest else "bye", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print("warning: this one is printed at every start", flush=True)
metrics, ledger = f"{folder}/metrics.jsonl", f"{folder}/ledger.jsonl"
lines = open(metrics).readlines() if os.path.exists(metrics) else []
done = len([line for line in lines if line.endswith("\\n")])
try:
    for path, number in ((metrics, done), (ledger, 2 * done)):
        kept = open(path).readlines()[:number] if os.path.exists(path) else []
        with open(path + ".new", "w") as file:
            file.writelines(kept)
        os.replace(path + ".new", path)
    for step in range(done + 1, 1000000):
        prompt = step - 1 if is_honest else step
        with open(ledger, "a", buffering=1) as file:
            file.write(json.dumps({"step": step, "issued": str(prompt)}) + "\\n")
            file.write(json.dumps({"step": step, "trained": str(prompt)}) + "\\n")
        with open(metrics, "a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
        sys.stdout.write(f"step {step}\\n")  # at once: the handler may print between two parts of a line
        sys.stdout.flush()
        time.sleep(0.02)
except OSError as error:
    print(f"error: {error}", flush=True)
    sys.exit(1)
"""
FAULTS = ("kill-controller", "stop-controller", "full-disk", "kill-gcs")
OPTIONS = ChaosOptions(6, 1, FAULTS, 0.2, within(30), within(60))
SILENCE = f"--max-silence={within(60)}"


def test_the_schedule_is_the_seeds_and_kinds_are_equally_frequent() -> None:
    kinds = ["kill-worker", "hang-worker", "kill-controller"]
    schedule = make_schedule(200, 1, kinds, 5.0)
    assert schedule == make_schedule(200, 1, kinds, 5.0)
    assert schedule != make_schedule(200, 2, kinds, 5.0)
    assert sorted(Counter(fault.kind for fault in schedule).values()) == [66, 67, 67]
    assert all(0 <= fault.delay_s <= 10 and 0 <= fault.choice < 1 for fault in schedule)
    assert 4 < sum(fault.delay_s for fault in schedule) / 200 < 6
    assert 10 < sum(fault.during_recovery for fault in schedule) < 60


def test_processes_of_a_run_are_those_that_descend_from_it() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 21: 20}
    table = {pid: NodeProcess(pid, parent, "python", "python", "me") for pid, parent in parents.items()}
    assert set(descendants([10], table)) == {10, 11, 12}
    assert set(descendants([12, 20, None], table)) == {12, 20, 21}


def test_an_end_is_explained_by_an_error_or_by_how_to_go_on() -> None:
    assert explain_end(1, ["step 3", "error: no space left", "error: more"]) == "error: no space left"
    assert explain_end(0, ["resume  the same command again"]) == "resume  the same command again"
    assert explain_end(0, ["step 3"]) is None
    assert explain_end(-signal.SIGSEGV, ["step 3"]) is None


def write_run(folder: Path, ledger: str, steps: list[int]) -> Path:
    (folder / "ledger.jsonl").write_text(ledger)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    return folder


CLEAN = '{"step": 1, "issued": "0-3"}\n{"step": 1, "generated": "0-3"}\n{"step": 1, "trained": "0-3"}\n'


def test_a_clean_run_has_no_problems(tmp_path: Path) -> None:
    facts, problems = audit_folder(write_run(tmp_path, CLEAN, [1]))
    assert problems == []
    assert facts == ["ledger: 4 prompts issued (0 times again), 4 trained, 0 dropped, 0 open", "metrics: 1 steps"]


@pytest.mark.parametrize(
    ("ledger", "steps", "problem"),
    [
        (CLEAN + '{"step": 2, "issued": "4"}\n{"step": 2, "trained": "3-4"}\n', [1, 2], "trained twice"),
        (CLEAN + '{"step": 2, "issued": "6"}\n{"step": 2, "trained": "6"}\n', [1, 2], "prompts [4, 5] were lost"),
        (CLEAN, [1, 3], "not 1, 2, 3"),
        (CLEAN, [1, 1], "not 1, 2, 3"),
        (CLEAN, [], "and 0 have metrics"),
    ],
)
def test_what_is_lost_twice_or_missing_is_a_problem(
    tmp_path: Path, ledger: str, steps: list[int], problem: str
) -> None:
    _, problems = audit_folder(write_run(tmp_path, ledger, steps))
    assert len(problems) == 1
    assert problem in problems[0]


def test_the_report_has_a_row_for_each_kind_and_role() -> None:
    report = ChaosReport(OPTIONS, "run")
    report.faults = [
        FaultRecord(
            1, "kill-controller", "controller", 5, 0.0, 3, noticed_s=0.5, recovered_s=9.0, outcome="started again"
        ),
        FaultRecord(
            2, "kill-worker", "device 0 (rollout)", 6, 20.0, 9, noticed_s=1.0, recovered_s=4.0, outcome="went on"
        ),
        FaultRecord(
            3, "kill-worker", "device 1 (rollout)", 7, 30.0, 9, noticed_s=3.0, recovered_s=5.0, outcome="went on"
        ),
        FaultRecord(4, "kill-reward", "reward", 8, 40.0, 9, recovered_s=1.0, outcome="went on"),
    ]
    lines = [" ".join(line.split()) for line in report.text().splitlines()]
    assert "kill-worker rollout 2 1.0 / 2.0 / 3.0 4.0 / 4.5 / 5.0 2 went on" in lines
    assert "kill-reward 1 - 1.0 / 1.0 / 1.0 1 went on" in lines
    assert lines[-1] == "passed"
    assert [row["kind"] for row in report.as_dict()["kinds"]] == [
        "kill-worker rollout",
        "kill-reward",
        "kill-controller",
    ]
    report.problems.append("left behind: everything")
    assert report.text().endswith("problem: left behind: everything\nfailed")
    assert not report.as_dict()["passed"]


def stand_in_run(folder: Path, is_honest: bool, monkeypatch: pytest.MonkeyPatch) -> ChaosRun:
    monkeypatch.setattr(chaos, "POLL_S", 0.02)
    monkeypatch.setattr(chaos, "FULL_DISK_S", 1.0)
    command = [sys.executable, "-S", "-c", STAND_IN, str(folder), "honest" if is_honest else "careless"]
    options = OPTIONS if is_honest else replace(OPTIONS, num_faults=2)
    return ChaosRun(command, folder, options, Reach(False), lambda _: None)


def test_a_run_that_has_started_its_workers_again_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stand_in_run(tmp_path, True, monkeypatch)
    run.lines = [(1.0, "error: Ray's process on this node (raylet, 7) has ended, and with it this Ray")]
    assert run._is_ending()
    run.lines.append((2.0, "warning: the workers are started again, and the run goes on from step_000003"))
    assert not run._is_ending()
    run.lines.append((3.0, "error: File too large"))
    assert run._is_ending()


@pytest.mark.deadline("processes are hit at random moments, and have to recover in time")
@pytest.mark.slow
def test_a_run_is_hit_started_again_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = stand_in_run(tmp_path, True, monkeypatch).run()
    assert report.problems == [], (tmp_path / "logs" / "chaos.log").read_text()
    assert Counter(fault.kind for fault in report.faults) == dict.fromkeys(OPTIONS.kinds[:3], 2)
    assert all(fault.outcome == "started again" for fault in report.faults)
    assert all(fault.noticed_s is not None and fault.recovered_s is not None for fault in report.faults)
    assert report.impossible == ["kill-gcs: this run has no process of that kind here"]
    assert 4 <= len(report.ends) <= 7  # two faults may hit the same process


def test_a_run_that_loses_a_prompt_and_explains_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = stand_in_run(tmp_path, False, monkeypatch).run()
    assert any("prompts [0] were lost" in problem for problem in report.problems)
    assert any("that nothing explains" in problem for problem in report.problems)


def test_a_signal_means_no_more_faults_and_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stand_in_run(tmp_path, True, monkeypatch)
    run.options = replace(OPTIONS, num_faults=1000)

    def show(_: str) -> None:
        if len(run.report.faults) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.show = show
    report = run.run()
    assert report.problems == []
    assert [fault.outcome for fault in report.faults] == ["started again"] * len(report.faults)
    assert report.impossible[-1] == f"{1000 - len(report.faults)} faults, after a signal to stop"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_every_kind_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    assert [name for name in KINDS if f"`{name}`" not in page] == []


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_a_real_run_survives_the_faults_of_the_page(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    [command] = block("chaos").commands
    finished = start_corral(tmp_path, *command.split()[1:], "optimizer.learning_rate=1e-4", SILENCE).wait(500)
    log = (tmp_path / "runs" / "tiny-chaos" / "logs" / "chaos.log").read_text()
    assert finished.code == 0, finished.stdout + log
    assert finished.stdout.endswith("passed\n")
    assert (tmp_path / "runs" / "tiny-chaos" / "chaos.json").exists()


@pytest.mark.deadline("processes are hit at random moments, and have to recover in time")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one process", "stale"])
def test_a_run_in_forks_survives_them_too(tmp_path: Path, mode: str) -> None:
    script = Path(__file__).parents[1] / "chaos_in_forks.py"
    command = [sys.executable, str(script), "--mode", mode, "--faults", "5", "--report", str(tmp_path / "report.json")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=within(300))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    faults = json.loads((tmp_path / "report.json").read_text())["faults"]
    assert len({fault["kind"] for fault in faults}) == (5 if mode == "stale" else 4)


def chaos_on_hosts(lab: Lab, recipe: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The report of `corral chaos` on the first host, and what it printed."""
    lab.start_ray(devices=1)
    command = [*CORRAL, "chaos", str(recipe), "cluster.devices_per_node=1", "optimizer.learning_rate=1e-4", *options]
    output = lab.run(0, [*command, "--interval=1", SILENCE], timeout_s=500, OMP_NUM_THREADS="1").stdout
    return json.loads((recipe.parent / "runs" / "tiny-chaos" / "chaos.json").read_text()), output


@pytest.mark.xdist_group("ray")
@pytest.mark.lab
@pytest.mark.slow
def test_a_node_that_is_cut_off_is_noticed_and_can_be_reached_again(tmp_path: Path, tiny_model: Path) -> None:
    apart = ("cluster.nodes=3", "cluster.placement={actor: 0, rollout: 1-2}", "cluster.min_nodes=2")
    with Lab(3) as lab:
        recipe = write_recipe(tmp_path, tiny_model)
        report, output = chaos_on_hosts(lab, recipe, *apart, "--kinds=cut-off-node", "--faults=1")
        routes = [lab.run(host, ["ip", "route"]).stdout for host in (1, 2)]
    [fault] = report["faults"]
    assert report["passed"], output + (tmp_path / "runs" / "tiny-chaos" / "logs" / "chaos.log").read_text()
    assert fault["target"] in ("h2", "h3")
    assert 0 < fault["noticed_s"] < within(30)
    assert 30 < fault["recovered_s"] < within(120)
    assert [route for route in routes if "blackhole" in route] == []


@pytest.mark.core
@pytest.mark.xdist_group("ray")
@pytest.mark.lab
@pytest.mark.slow
def test_workers_of_other_nodes_are_hit_too(tmp_path: Path, tiny_model: Path) -> None:
    apart = ("cluster.nodes=2", "cluster.placement={rollout: 0, actor: 1}", "checkpoint.every=2")
    with Lab(2) as lab:
        recipe = write_recipe(tmp_path, tiny_model)
        kinds = "--kinds=kill-worker,kill-reward"
        report, _ = chaos_on_hosts(lab, recipe, *apart, kinds, "--faults=3", "--seed=2")
    targets = [fault["target"] for fault in report["faults"] if fault["kind"] == "kill-worker"]
    assert targets == ["device 1 (actor)", "device 0 (rollout)"]
