"""Trainers with replicas that are lost: the run goes on with what their replicas have in memory, at the same update.

No checkpoint is read. Everything is to the bit what it is in a run in which nothing happens."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ClusterRun
from commands import start_corral
from hosts import Lab
from runs import rows_of, same_outcome, write_recipe

from corral.observe.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent))

import replica_faults

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("ray")]

EVERY = (
    "schedule.steps=3",
    "batch.updates_per_step=2",
    "batch.ppo_epochs=2",
    "checkpoint.every=1000",
    "logging.trajectories=true",
    "cluster.call_timeout_s=300",
    "train.threads=1",
)
"""Four updates in each step, and one checkpoint, at the end."""
COPIES = ("cluster.devices_per_node=3", "cluster.placement={rollout: 0, actor: 1-2}", "train.parallel.replicate=2")
"""Two trainers with a whole model each."""
COLOCATED = ("cluster.devices_per_node=2", "train.parallel.replicate=2")
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


def fault(method: str, call: int, when: str = "before", rank: int = 1, role: str = "actor") -> dict[str, Any]:
    return {"role": role, "rank": rank, "method": method, "call": call, "when": when}


def run_with(folder: Path, model: Path, faults: list[dict[str, Any]], *changes: str) -> str:
    """Trains to the end; returns the output, on one line."""
    write_recipe(folder, model)
    (folder / "fault.json").write_text(json.dumps(faults))
    arguments = ("train", "recipe.yaml", "name=run", *EVERY, *changes)
    finished = start_corral(folder, *arguments, before=replica_faults.use_faults).wait(LIMIT_S)
    output = " ".join((finished.stdout + finished.stderr).split())
    assert finished.code == 0, output
    for number, one in enumerate(faults):
        assert (folder / f"ended-{number}").exists(), f"{one} did not happen: {output}"
    return output


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
            assert "was killed" not in run_with(folder, tiny_model, [], *changes)
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
    "critic_and_reference": (PPO, fault("step", 6, "within", role="critic"), fault("step", 7, "after", rank=0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lost_trainer_has_the_states_of_its_replica(
    case: str, tmp_path: Path, tiny_model: Path, undisturbed: Any
) -> None:
    settings, *faults = CASES[case]
    output = run_with(tmp_path, tiny_model, list(faults), *settings)
    print(f"{case}: recovered after {recoveries(output)} s")
    assert len(recoveries(output)) == len(faults), output
    assert "the workers are started again" not in output
    run = tmp_path / "runs" / "run"
    assert same_outcome(run, undisturbed(*settings), 3)
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]
    audit = Ledger(run / "ledger.jsonl").audit()
    assert (audit.trained, audit.reissued, audit.problems) == (12, 0, ())


def test_a_lost_trainer_that_also_rolls_out_takes_requests_again(
    tmp_path: Path, tiny_model: Path, undisturbed: Any
) -> None:
    """Its prompts go to the other one, and it gets weights with the next version."""
    faults = [fault("accumulate", 6), fault("load_local_weights", 3, "later", rank=0, role="rollout")]
    output = run_with(tmp_path, tiny_model, faults, *COLOCATED)
    assert len(recoveries(output)) == 2, output
    assert same_outcome(tmp_path / "runs" / "run", undisturbed(*COLOCATED), 3)


def test_without_a_whole_copy_the_run_begins_again_at_the_last_checkpoint(
    tmp_path: Path, tiny_model: Path, undisturbed: Any
) -> None:
    faults = [fault("accumulate", 6, rank=0), fault("accumulate", 6, rank=1)]
    output = run_with(tmp_path, tiny_model, faults, *COPIES, "checkpoint.every=1")
    assert not recoveries(output)
    assert "no replica could give its states to the lost trainer" in output
    assert "the workers are started again, and the run goes on from step_000001" in output
    assert rows_of(tmp_path / "runs" / "run") == rows_of(undisturbed(*COPIES))


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_spare_host_takes_the_place_of_a_lost_one(how: str, tmp_path: Path, tiny_model: Path) -> None:
    """Two hosts with a trainer each, and a third one. The second host ends, or its cable is pulled."""
    with Lab(3) as lab:
        lab.start_ray(devices=2, health_checks={})
        settings = (
            "cluster.nodes=2",
            "cluster.devices_per_node=2",
            "cluster.placement={rollout: 0, actor: 1-2}",
            "cluster.node_timeout_s=5",
            "train.parallel.replicate=2",
            f"environment.reward.name={tmp_path}/vowels.py:slowly",
            f"environment.reward.options.calls={tmp_path}/calls",
            "environment.reward.options.seconds=0.05",
        )
        undisturbed = ClusterRun(lab, tmp_path, tiny_model, "undisturbed", *EVERY, *settings)
        undisturbed.wait()
        assert undisturbed.code == 0, undisturbed.output
        run = ClusterRun(lab, tmp_path, tiny_model, "run", *EVERY, *settings)
        run.wait_until(lambda: run.num_steps >= 1)
        (lab.kill if how == "kill" else lab.cut)(1)
        output = " ".join(run.wait().split())
    assert run.code == 0, output
    print(f"{how}: recovered after {recoveries(output)} s")
    assert f"node 1, h2 ({lab.hosts[1].address}), with device 2, was lost" in output
    assert len(recoveries(output)) == 1
    assert "the workers are started again" not in output
    assert same_outcome(run.path, undisturbed.path, 3)
    assert (run.audit().trained, run.audit().reissued, run.audit().problems) == (12, 0, ())
