"""A loss and an advantage from a user's file, with options and needs: in one process, pipelined, and on Ray workers."""

from pathlib import Path

import pytest
from commands import start_corral
from runs import steps_here, steps_in_mode, steps_of, write_recipe
from same_rows import assert_same

LIMIT_S = 240.0
OWN = '''\
from dataclasses import dataclass

import corral


@dataclass(frozen=True)
class LossOptions:
    cap: float = 2.0


@corral.loss(options=LossOptions, summary="the ratio, with an upper bound only", skips_zero_advantage=True)
def capped(terms, options):
    return -terms.advantages * terms.log_ratio.exp().clamp(max=options.cap)


def plain_loss(terms):
    """What the loss gpg is."""
    return -terms.advantages * terms.logprobs


@dataclass(frozen=True)
class Scale:
    scale: float = 1.0


@corral.advantage(options=Scale, needs=corral.Needs(groups=True, whole_batch=False))
def by_group(batch, options):
    """A statistic over all that it is given: with its declaration, the samples of one prompt."""
    return options.scale * (batch.rewards - batch.rewards.mean())


@corral.advantage(options=Scale)
def by_batch(batch, options):
    return options.scale * batch.whiten(batch.token_rewards.double())


@corral.advantage(needs=corral.Needs(whole_batch=False))
def wrongly_declared(batch, options):
    return batch.whiten(batch.token_rewards)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def own(folder: Path, loss: str = "capped", advantage: str = "by_group") -> tuple[str, ...]:
    return (f"algorithm.loss={folder}/own.py:{loss}", f"algorithm.advantage={folder}/own.py:{advantage}")


@pytest.mark.slow
def test_a_loss_of_the_users_trains_as_the_built_in_one_with_the_same_formula(folder: Path, tiny_model: Path) -> None:
    ours = steps_here(folder, tiny_model, "algorithm.loss=gpg")
    theirs = steps_here(folder, tiny_model, f"algorithm.loss={folder}/own.py:plain_loss")
    assert_same(theirs, ours)


@pytest.mark.slow
def test_an_advantage_of_the_users_sees_one_group_at_a_time_where_it_says_so(folder: Path, tiny_model: Path) -> None:
    """The mean over what it is given is then the group's, as in dr_grpo."""
    ours = steps_here(folder, tiny_model, "algorithm.advantage=dr_grpo")
    theirs = steps_here(folder, tiny_model, f"algorithm.advantage={folder}/own.py:by_group")
    assert_same(theirs, ours)


def test_options_reach_the_functions(folder: Path, tiny_model: Path) -> None:
    plain = steps_here(folder, tiny_model, *own(folder), "schedule.steps=1")
    scaled = steps_here(folder, tiny_model, *own(folder), "algorithm.advantage.scale=2", "schedule.steps=1")
    assert scaled[0]["policy/gradient_norm"] == pytest.approx(2 * plain[0]["policy/gradient_norm"], rel=1e-4)


@pytest.mark.parametrize("advantage", ["by_group", "by_batch"])
@pytest.mark.slow
def test_pipelined_it_computes_the_same(folder: Path, tiny_model: Path, advantage: str) -> None:
    chosen = own(folder, advantage=advantage)
    synchronous = steps_in_mode(folder, tiny_model, False, *chosen)
    assert_same(steps_in_mode(folder, tiny_model, True, *chosen), synchronous)


@pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])
def test_an_estimator_that_whitens_without_declaring_it_is_refused(
    folder: Path, tiny_model: Path, pipelined: bool
) -> None:
    with pytest.raises(Exception, match=r"declare it with Needs\(whole_batch=True\)"):
        steps_in_mode(folder, tiny_model, pipelined, *own(folder, advantage="wrongly_declared"))


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_pipelined_on_ray_workers_it_is_the_run_of_one_process(folder: Path, tiny_model: Path) -> None:
    options = ("algorithm.loss.cap=1.5", "algorithm.advantage.scale=2")
    alone = steps_here(folder, tiny_model, *own(folder), *options)
    apart = ("cluster.devices_per_node=2", "cluster.placement={rollout: 0, actor: 1}")
    write_recipe(folder, tiny_model)
    parts = ("algorithm.loss=own.py:capped", "algorithm.advantage=own.py:by_group")
    changes = ("name=apart", "schedule.pipelined=true", *apart, *parts, *options)
    run = start_corral(folder, "train", "recipe.yaml", *changes).wait(LIMIT_S)
    assert run.code == 0, run.stderr
    assert_same(steps_of(folder / "runs" / "apart"), alone)
