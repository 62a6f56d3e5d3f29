"""Trainers with replicas that are lost: the run goes on with what their replicas have in memory, at the same update.

No checkpoint is read. Everything is to the bit what it is in a run in which nothing happens."""

import asyncio
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ClusterRun
from commands import start_corral
from deadlines import within
from hosts import Lab
from runs import rows_of, same_outcome, slowly, write_recipe

from corral.loop.train import supervise
from corral.loop.training_loop import Interrupt
from corral.observe.console import Console, run_log
from corral.observe.ledger import Ledger
from corral.observe.run_folder import RunFolder
from corral.recipe.load import load_recipe

sys.path.insert(0, str(Path(__file__).parent))

import replica_faults
from forked_runtime import open_forks

pytestmark = [pytest.mark.slow]

EVERY = (
    "schedule.steps=3",
    "batch.updates_per_step=2",
    "batch.ppo_epochs=2",
    "checkpoint.every=1000",
    "logging.trajectories=true",
    f"cluster.call_timeout_s={within(300)}",
    "train.threads=1",
)
"""Four updates in each step, and one checkpoint, at the end."""
COPIES = ("cluster.devices_per_node=3", "cluster.placement={rollout: 0, actor: 1-2}", "train.parallel.replicate=2")
"""Two trainers with a whole model each."""
# Exact: an engine's log-probs do not depend on what else is in its batch, and prompts of a lost one are in others.
COLOCATED = ("cluster.devices_per_node=2", "train.parallel.replicate=2", "model.exact=true")
FIVE = ("cluster.devices_per_node=5", "cluster.placement={rollout: 0, actor: 1-4}")
SHARDED = (*FIVE, "train.parallel={replicate: 2, shard: 2}")
TENSOR = (*FIVE, "train.parallel={replicate: 2, tensor: 2}")
PPO = (
    "cluster.devices_per_node=3",
    "cluster.placement={rollout: 0, 'actor,critic,reference': 1-2}",
    "train.parallel.replicate=2",
    "algorithm.name=ppo",
    "algorithm.kl.coefficient=0.01",
)
LIMIT_S = 900.0
"""Seconds for a run: most of them pass while processes start, where others use the cores, too."""


def fault(method: str, call: int, when: str = "before", rank: int = 1, role: str = "actor") -> dict[str, Any]:
    return {"role": role, "rank": rank, "method": method, "call": call, "when": when}


def run_on_ray(folder: Path, model: Path, faults: list[dict[str, Any]], *changes: str) -> str:
    """Trains to the end; returns the output, on one line."""
    write_recipe(folder, model)
    (folder / "fault.json").write_text(json.dumps(faults))
    arguments = ("train", "recipe.yaml", "name=run", *EVERY, *changes)
    finished = start_corral(folder, *arguments, before=replica_faults.use_faults).wait(LIMIT_S)
    output = " ".join((finished.stdout + finished.stderr).split())
    assert finished.code == 0, output
    assert_happened(folder, faults, output)
    return output


def run_forked(folder: Path, model: Path, faults: list[dict[str, Any]], *changes: str) -> str:
    """The same without Ray, whose processes take long to start."""
    (folder / "fault.json").write_text(json.dumps(faults))
    recipe = load_recipe(write_recipe(folder, model), ("name=run", *EVERY, *changes))
    printed = io.StringIO()
    console = Console(printed)
    with (
        RunFolder.open(Path(recipe.logging.runs), recipe.name, "never") as run_folder,
        Interrupt(console.warn) as interrupt,
        run_log(run_folder.logs / "main.log", console),
    ):
        asyncio.run(supervise(recipe, run_folder, console, interrupt, None, folder / "recipe.yaml", open_forks))
    output = " ".join(printed.getvalue().split())
    assert_happened(folder, faults, output)
    return output


def assert_happened(folder: Path, faults: list[dict[str, Any]], output: str) -> None:
    for number, one in enumerate(faults):
        assert (folder / f"ended-{number}").exists(), f"{one} did not happen: {output}"


def recoveries(output: str) -> list[float]:
    """How long each recovery took, in seconds."""
    found = re.findall(
        r"with the states of a replica, and the run goes on at the same update after ([0-9.]+) s", output
    )
    return [float(seconds) for seconds in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Any:
    """Returns the folder of a run with these settings to which nothing happens; each is made once."""
    runs: dict[tuple[str, ...], Path] = {}

    def find(*changes: str) -> Path:
        if changes not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert "has ended" not in run_forked(folder, tiny_model, [], *changes)
            runs[changes] = folder / "runs" / "run"
        return runs[changes]

    return find


CASES = {
    # At the begin of the second step; then, when gradients are summed, so that its replica makes the update; then a
    # checkpoint is made.
    "first_update": (COPIES, fault("accumulate", 5), fault("step", 6, "within", rank=0), fault("save", 1)),
    # Between two updates, the one at which the others meet; then its replica waits in the sum; then weights are sent.
    "next_update": (COPIES, fault("accumulate", 6, rank=0), fault("step", 7), fault("send_weights", 1, "after", 0)),
    # Both have made the update, and nobody was told; then while nobody calls the trainers.
    "last_update": (COPIES, fault("step", 8, "after", rank=0), fault("compute_logprobs", 2, "later")),
    "shards": (SHARDED, fault("accumulate", 6, rank=3), fault("step", 7, "within", rank=0)),
    "tensor_parallel": (TENSOR, fault("step", 5, "within", rank=1), fault("accumulate", 7, rank=2)),
    # Its prompts go to the other one, and it takes some again with the next weights; then the other one, in a rollout.
    "colocated": (COLOCATED, fault("accumulate", 6), fault("load_local_weights", 2, "later", rank=0, role="rollout")),
    "critic_and_reference": (PPO, fault("step", 6, "within", role="critic"), fault("step", 7, "after", rank=0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lost_trainer_has_the_states_of_its_replica(
    case: str, tmp_path: Path, tiny_model: Path, undisturbed: Any
) -> None:
    settings, *faults = CASES[case]
    output = run_forked(tmp_path, tiny_model, list(faults), *settings)
    print(f"{case}: recovered after {recoveries(output)} s")
    assert_same(tmp_path / "runs" / "run", undisturbed(*settings), output, len(faults))


@pytest.mark.lab
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("case", ["first_update", "last_update"])
def test_on_ray_its_process_is_started_again(case: str, tmp_path: Path, tiny_model: Path, undisturbed: Any) -> None:
    settings, *faults = CASES[case]
    output = run_on_ray(tmp_path, tiny_model, list(faults), *settings)
    print(f"{case} on Ray: recovered after {recoveries(output)} s")
    assert_same(tmp_path / "runs" / "run", undisturbed(*settings), output, len(faults))


def assert_same(run: Path, expected: Path, output: str, num_recoveries: int) -> None:
    assert len(recoveries(output)) == num_recoveries, output
    assert "the workers are started again" not in output
    assert same_outcome(run, expected, 3)
    audit = Ledger(run / "ledger.jsonl").audit()
    assert (audit.trained, audit.problems) == (12, ())


def test_without_a_whole_copy_the_run_begins_again_at_the_last_checkpoint(
    tmp_path: Path, tiny_model: Path, undisturbed: Any
) -> None:
    faults = [fault("accumulate", 6, rank=0), fault("accumulate", 6, rank=1)]
    output = run_forked(tmp_path, tiny_model, faults, *COPIES, "checkpoint.every=1")
    assert not recoveries(output)
    assert "no replica could give its states to the lost trainer" in output
    assert "the workers are started again, and the run goes on from step_000001" in output
    assert rows_of(tmp_path / "runs" / "run") == rows_of(undisturbed(*COPIES))


TWO_SETS = (
    "cluster.devices_per_node=5",
    "cluster.placement={rollout: 0, 'actor,reference': '1,3', critic: '2,4'}",
    "train.parallel.replicate=2",
    "algorithm.name=ppo",
)


@pytest.mark.lab
@pytest.mark.xdist_group("cluster")
@pytest.mark.parametrize(
    ("how", "placed", "lost"),
    [("kill", COPIES, "device 2"), ("cut", COPIES, "device 2"), ("kill", TWO_SETS, "devices 3-4")],
    ids=["kill", "cut", "two_sets"],
)
def test_a_spare_host_takes_the_place_of_a_lost_one(
    how: str,
    placed: tuple[str, ...],
    lost: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Any,
) -> None:
    """Two hosts with a trainer each, or with one of the actor and one of the critic, and a third one. The second host
    ends, or its cable is pulled. (The run to which nothing happens is on one host.)"""
    monkeypatch.setattr("cluster_runs.LIMIT_S", LIMIT_S)
    num_sets = 1 + (placed is TWO_SETS)
    with Lab(3) as lab:
        lab.start_ray(devices=num_sets + 1, health_checks={})
        settings = (
            *placed,
            "cluster.nodes=2",
            f"cluster.devices_per_node={num_sets + 1}",
            "cluster.node_timeout_s=5",
            *slowly(tmp_path, 0.05),
        )
        run = ClusterRun(lab, tmp_path, tiny_model, "run", *EVERY, *settings)
        run.wait_until(lambda: run.num_steps >= 1)
        (lab.kill if how == "kill" else lab.cut)(1)
        output = " ".join(run.finish().split())
    print(f"{how}: recovered after {recoveries(output)} s")
    assert f"node 1, h2 ({lab.hosts[1].address}), with {lost}, was lost" in output
    assert len(recoveries(output)) == num_sets
    assert "the workers are started again" not in output
    assert same_outcome(run.path, undisturbed(*placed), 3)
    assert (run.audit().trained, run.audit().reissued, run.audit().problems) == (12, 0, ())
