"""The same recipe on two hosts with two devices each: it learns the same, and loses nothing when something dies."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import same_rows
from cluster_runs import APART, NODES, ONE_ROLLOUT_WORKER, ClusterRun
from deadlines import within
from hosts import Lab
from runs import slowly, steps_here, steps_of

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

LONG = ("schedule.steps=12", "batch.prompts_per_step=8")
"""Enough to see that it learns."""
FEW = 6
SHORT = (f"schedule.steps={FEW}", "batch.prompts_per_step=8")
"""Enough to see that it computes the same."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Each host's own name is a loopback address, as on Debian. Ray's health checks are as they are by default."""
    with Lab(2, loopback_names=True) as lab:
        lab.start_ray(devices=2, health_checks={})
        yield lab


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """The steps of the same recipe in one process. The first ones are those of a shorter run."""
    return steps_here(tmp_path_factory.mktemp("alone"), tiny_model, *LONG)


@pytest.mark.core
def test_colocated_it_is_the_run_of_one_process(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "colocated", *NODES, *SHORT)
    run.finish()
    assert_same(steps_of(run.path), alone)
    assert all(row["transfer/probe_deviation"] < 1e-4 for row in steps_of(run.path))
    assert_all_trained(run)


def test_pipelined_it_learns_the_same(lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]) -> None:
    """The trainers are on both hosts, which both send."""
    placed = (*NODES, "cluster.placement={rollout: 0, actor: 1-2}")
    run = ClusterRun(lab, tmp_path, tiny_model, "pipelined", *placed, *SHORT, "schedule.pipelined=true")
    run.finish()
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_asynchronous_it_learns_as_much(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "asynchronous", *ONE_ROLLOUT_WORKER, *LONG, "schedule.max_staleness=1")
    run.finish()
    rows = steps_of(run.path)
    assert max(row["staleness/max"] for row in rows) == 1
    assert gain(rows) > 0.5 * gain(alone) > 0
    assert_all_trained(run, steps=12)


@pytest.fixture(scope="module")
def recovered(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> ClusterRun:
    """A run with rollout workers apart, one of which dies during a rollout."""
    folder = tmp_path_factory.mktemp("recovered")
    run = ClusterRun(lab, folder, tiny_model, "rollout", *APART, *SHORT, *slowly(folder, 0.02))
    run.wait_until(lambda: run.num_steps >= 2 and len((folder / "calls").read_bytes()) % 32 > 8)
    run.kill_workers(host=0)
    run.wait()
    return run


@pytest.mark.core
def test_apart_it_is_the_run_of_one_process_too(recovered: ClusterRun, alone: list[dict[str, Any]]) -> None:
    """Whether or not all rollout workers live."""
    assert recovered.code == 0, recovered.output
    assert_same(steps_of(recovered.path), alone)


@pytest.mark.core
def test_prompts_of_a_rollout_worker_that_dies_are_rolled_out_elsewhere(recovered: ClusterRun) -> None:
    assert "was killed by signal 9" in recovered.output
    assert "are rolled out elsewhere" in recovered.output
    assert_all_trained(recovered)


def test_when_all_rollout_workers_die_the_next_ones_go_on(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    placed = (*NODES, "cluster.placement={rollout: 0-1, actor: 2}")
    ahead = ("schedule.max_staleness=1", "cluster.transfer=object")
    run = ClusterRun(lab, tmp_path, tiny_model, "rollout", *placed, *LONG, *slowly(tmp_path, 0.02), *ahead)
    run.wait_until(lambda: run.num_steps >= 2)
    run.kill_workers(host=0, number=2)
    output = run.finish()
    assert output.count("takes rollouts again") == 2
    assert gain(steps_of(run.path)) > 0.5 * gain(alone)
    assert_all_trained(run, steps=12)


def test_a_trainer_that_dies_costs_the_steps_since_the_last_checkpoint(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(
        lab, tmp_path, tiny_model, "trainer", *ONE_ROLLOUT_WORKER, *SHORT, *slowly(tmp_path, 0.02), "checkpoint.every=2"
    )
    run.wait_until(lambda: run.num_steps >= 3)
    run.kill_workers(host=1)
    output = run.finish()
    assert "was killed by signal 9" in output
    assert "the run goes on from step_" in output
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


@pytest.mark.core
def test_without_a_node_the_run_goes_on_with_the_rest(
    tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    with Lab(2) as lab:
        lab.start_ray(devices=1, health_checks={})
        patience = ("cluster.min_nodes=1", "cluster.node_timeout_s=5", "checkpoint.every=2")
        small = ("cluster.nodes=2", "cluster.devices_per_node=1")
        run = ClusterRun(lab, tmp_path, tiny_model, "colocated", *small, *SHORT, *slowly(tmp_path, 0.02), *patience)
        run.wait_until(lambda: run.num_steps >= 3)
        lab.cut(1)
        output = run.finish()
    assert f"node 1, h2 ({lab.hosts[1].address}), with device 1, was lost" in output
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_the_run_goes_on_without_a_node_of_rollout_workers(
    tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    with Lab(2) as lab:
        lab.start_ray(devices=2, health_checks={})
        placed = ("cluster.placement={actor: 0, rollout: 1-2}", "cluster.min_nodes=1", "cluster.node_timeout_s=5")
        run = ClusterRun(lab, tmp_path, tiny_model, "rollout", *NODES, *SHORT, *slowly(tmp_path, 0.02), *placed)
        run.wait_until(lambda: run.num_steps >= 3)
        lab.cut(1)
        output = run.finish()
    assert "the run goes on without it" in output
    assert "are started again" not in output
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


@pytest.mark.core
def test_without_a_node_that_is_needed_the_run_ends_soon_and_names_it(
    lab: Lab, tmp_path: Path, tiny_model: Path
) -> None:
    """The last one with the module's cluster, whichever of its tests run: the node is cut off."""
    small = ("cluster.nodes=2", "cluster.devices_per_node=1", "checkpoint.every=2")
    run = ClusterRun(lab, tmp_path, tiny_model, "needed", *small, *LONG, *slowly(tmp_path, 0.02))
    run.wait_until(lambda: run.num_steps >= 3)
    lab.cut(1)
    cut = time.monotonic()
    run.wait()
    assert time.monotonic() - cut < within(60)
    assert run.code == 1
    last = run.output.strip().splitlines()[-1]
    assert last.startswith(f"error: node 1, h2 ({lab.hosts[1].address}), with device 1, was lost"), run.output


def test_a_run_does_not_begin_again_at_a_checkpoint_that_its_workers_do_not_see(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The second host has a disk of its own for runs, with a copy of the first checkpoint; then without any."""
    (tmp_path / "runs").mkdir()
    with Lab(2) as lab:
        lab.start_ray(devices=1)
        lab.run(1, ["mount", "-t", "tmpfs", "none", str(tmp_path / "runs")])
        small = ("cluster.nodes=2", "cluster.devices_per_node=1", "checkpoint.every=2", "checkpoint.keep=9")
        run = ClusterRun(lab, tmp_path, tiny_model, "unseen", *small, *SHORT, *slowly(tmp_path, 0.02))
        first = run.path / "checkpoints" / "step_000002"
        run.wait_until(first.exists)
        shutil.copytree(first, tmp_path / "copy")
        lab.run(1, ["mkdir", "-p", str(first.parent)])
        lab.run(1, ["cp", "-r", str(tmp_path / "copy"), str(first)])
        run.wait_until(lambda: run.num_steps >= 5)
        run.kill_workers(host=1)
        run.wait_until(lambda: run.num_steps < 5)
        lab.run(1, ["rm", "-r", str(first)])
        run.wait_until(lambda: run.num_steps >= 3)
        run.kill_workers(host=1)
        output = " ".join(run.wait().split())
    assert run.code == 1
    assert f"step_000004 cannot be gone on from: device 1 on h2 ({lab.hosts[1].address}) cannot load it" in output
    assert "(there is no such folder)" in output
    assert "the run goes on from step_000002" in output
    assert run.output.strip().splitlines()[-1].startswith("error: "), output
    assert "step_000002 cannot be gone on from" in run.output.strip().splitlines()[-1]


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """As the first steps that are expected."""
    assert [row["step"] for row in rows] == list(range(1, FEW + 1))
    same_rows.assert_same(rows, expected[:FEW])


def assert_all_trained(run: ClusterRun, steps: int = FEW) -> None:
    audit = run.audit()
    assert audit.clean
    assert audit.trained == 8 * steps


def gain(rows: list[dict[str, Any]]) -> float:
    rewards = [row["reward/mean"] for row in rows]
    return float(sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3)
