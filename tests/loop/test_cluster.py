"""The same recipe on two hosts with two devices each: it learns the same, and loses nothing when something dies."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import APART, NODES, ClusterRun
from hosts import Lab
from runs import steps_here, steps_of

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

SLOWLY = (
    "environment.reward.name={folder}/vowels.py:slowly",
    "environment.reward.options.calls={folder}/calls",
    "environment.reward.options.seconds=0.02",
)
LONG = ("schedule.steps=12", "batch.prompts_per_step=8")
MEASURED = ("reward/mean", "policy/loss", "policy/gradient_norm", "policy/entropy", "length/mean")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Each host's own name is a loopback address, as on Debian."""
    with Lab(2, loopback_names=True) as lab:
        lab.start_ray(devices=2)
        yield lab


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """The steps of the same recipe in one process."""
    return steps_here(tmp_path_factory.mktemp("alone"), tiny_model, *LONG)


def test_colocated_it_is_the_run_of_one_process(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "colocated", *NODES, *LONG)
    said = run.wait()
    assert run.code == 0, said
    assert_same(steps_of(run.path), alone)
    assert all(row["transfer/probe_deviation"] < 1e-4 for row in steps_of(run.path))
    assert_all_trained(run)


def test_apart_it_is_the_run_of_one_process_too(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "apart", *APART, *LONG)
    said = run.wait()
    assert run.code == 0, said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_pipelined_it_learns_the_same(lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "pipelined", *APART, *LONG, "schedule.pipelined=true")
    said = run.wait()
    assert run.code == 0, said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_running_ahead_it_learns_as_much(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    run = ClusterRun(lab, tmp_path, tiny_model, "ahead", *APART, *LONG, "schedule.max_staleness=1")
    said = run.wait()
    assert run.code == 0, said
    rows = steps_of(run.path)
    assert max(row["staleness/max"] for row in rows) == 1
    assert gain(rows) > 0.5 * gain(alone) > 0
    assert_all_trained(run)


def test_prompts_of_a_player_that_dies_are_played_elsewhere(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    run = ClusterRun(lab, tmp_path, tiny_model, "player", *APART, *LONG, *slowly)
    run.wait_until(lambda: run.num_steps >= 2 and len((tmp_path / "calls").read_bytes()) % 32 > 8)
    run.kill_workers(host=0)
    said = run.wait()
    assert run.code == 0, said
    assert "was killed by signal 9" in said
    assert "are played elsewhere" in said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_when_all_players_die_the_next_ones_go_on(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    ahead = ("schedule.max_staleness=1", "cluster.transfer=object")
    run = ClusterRun(lab, tmp_path, tiny_model, "players", *APART, *LONG, *slowly, *ahead)
    run.wait_until(lambda: run.num_steps >= 2)
    run.kill_workers(host=0, number=2)
    said = run.wait()
    assert run.code == 0, said
    assert said.count("plays again") == 2
    assert gain(steps_of(run.path)) > 0.5 * gain(alone)
    assert_all_trained(run)


def test_a_trainer_that_dies_costs_the_steps_since_the_last_checkpoint(
    lab: Lab, tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    run = ClusterRun(lab, tmp_path, tiny_model, "trainer", *APART, *LONG, *slowly, "checkpoint.every=2")
    run.wait_until(lambda: run.num_steps >= 5)
    run.kill_workers(host=1)
    said = run.wait()
    assert run.code == 0, said
    assert "was killed by signal 9" in said
    assert "the run goes on from step_" in said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_without_a_node_the_run_goes_on_with_the_rest(
    tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]
) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    with Lab(2) as lab:
        lab.start_ray(devices=2, health_checks={})
        patience = ("cluster.min_nodes=1", "cluster.node_timeout_s=5", "checkpoint.every=2")
        run = ClusterRun(lab, tmp_path, tiny_model, "colocated", *NODES, *LONG, *slowly, *patience)
        run.wait_until(lambda: run.num_steps >= 3)
        lab.cut(1)
        said = run.wait()
    assert run.code == 0, said
    assert f"node 1, h2 ({lab.hosts[1].address}), with devices 2-3, was lost" in said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_a_node_that_only_played_is_done_without(tmp_path: Path, tiny_model: Path, alone: list[dict[str, Any]]) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    with Lab(2) as lab:
        lab.start_ray(devices=2, health_checks={})
        placed = ("cluster.placement={actor: 0, rollout: 1-3}", "cluster.min_nodes=1", "cluster.node_timeout_s=5")
        run = ClusterRun(lab, tmp_path, tiny_model, "player", *NODES, *LONG, *slowly, *placed)
        run.wait_until(lambda: run.num_steps >= 3)
        lab.cut(1)
        said = run.wait()
    assert run.code == 0, said
    assert "the run goes on without it" in said
    assert "are started again" not in said
    assert_same(steps_of(run.path), alone)
    assert_all_trained(run)


def test_without_a_node_that_is_needed_the_run_ends_soon_and_names_it(tmp_path: Path, tiny_model: Path) -> None:
    slowly = [override.format(folder=tmp_path) for override in SLOWLY]
    with Lab(2) as lab:
        lab.start_ray(devices=2, health_checks={})
        run = ClusterRun(lab, tmp_path, tiny_model, "colocated", *NODES, *LONG, *slowly, "checkpoint.every=2")
        run.wait_until(lambda: run.num_steps >= 3)
        lab.cut(1)
        cut = time.monotonic()
        said = run.wait()
    assert time.monotonic() - cut < 60
    assert run.code == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"error: node 1, h2 ({lab.hosts[1].address}), with devices 2-3, was lost"), said


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name in MEASURED:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (row["step"], name)


def assert_all_trained(run: ClusterRun) -> None:
    audit = run.audit()
    assert audit.clean
    assert audit.trained == 96


def gain(rows: list[dict[str, Any]]) -> float:
    rewards = [row["reward/mean"] for row in rows]
    return float(sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3)
