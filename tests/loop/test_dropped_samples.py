"""Samples without a reward: they are in no statistic, no loss and no count, and are written down."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from runs import VALIDATION, rows_of, steps_here, steps_in_mode, steps_of, train_here
from trajectories import make_trajectory

from corral.algorithms.advantages import ADVANTAGES, RewardedBatch, compute_advantages
from corral.algorithms.declarations import with_options
from corral.data.batch import Batch, Trajectory
from corral.loop.rollout_step import PromptGroup, RolloutResult, collect, drop_zero_variance_groups
from corral.loop.train_step import turns_of
from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RunError

REWARDS = '''
import corral


def picky(response, how="raise"):
    """Nothing for a response with an odd number of vowels."""
    vowels = sum(letter in "aeiou" for letter in response)
    if vowels % 2 == 0:
        return vowels / 8
    if how == "raise":
        raise ValueError("an odd number of vowels")
    return None


def never(response):
    return None


def in_dict(response):
    return {"score": picky(response, "return"), "length": len(response)}


async def later(response):
    return picky(response, "return")


def compared(responses):
    return [picky(response, "return") for response in responses]


def compared_dicts(responses):
    return [{"score": picky(response, "return")} for response in responses]


def for_verl(data_source, solution_str, ground_truth, extra_info=None):
    return picky(solution_str, "return")


class Stepped(corral.Env):
    async def reset(self, row, seed):
        return row.prompt

    async def step(self, reply):
        return corral.StepResult([], picky(reply, "return"), done=True)


class Blocking(corral.BlockingEnv):
    def reset(self, row, seed):
        return row.prompt

    def step(self, reply):
        return corral.StepResult([], picky(reply, "return"), done=True)


def agent(row, base_url, api_key):
    import httpx  # here: a process of the other functions need not wait for it

    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": "m", "messages": row.prompt}
    answer = httpx.post(f"{base_url}/chat/completions", headers=headers, json=body, timeout=150).json()
    return {"score": picky(answer["choices"][0]["message"]["content"], "return")}
'''


def picky(folder: Path, function: str = "picky") -> str:
    (folder / "picky.py").write_text(REWARDS)
    return f"environment.reward.name={folder}/picky.py:{function}"


def group_of(trajectories: Sequence[Trajectory], greedy: Trajectory | None = None) -> PromptGroup:
    def done(result: list[Trajectory]) -> "asyncio.Future[list[Trajectory]]":
        future: asyncio.Future[list[Trajectory]] = asyncio.Future(loop=LOOP)
        future.set_result(result)
        return future

    return PromptGroup(trajectories[0].prompt_id, done(list(trajectories)), None if greedy is None else done([greedy]))


LOOP = asyncio.new_event_loop()


def two_groups() -> list[Trajectory]:
    rng = np.random.default_rng(7)
    trajectories = [
        make_trajectory([3, 4], rng.integers(5, 90, 2 + i).tolist(), group=g, sample=i, reward=float(rng.normal()))
        for g in range(2)
        for i in range(5)
    ]
    for one in trajectories:
        one.turn_states = [0]
    return trajectories


def advantages_of(name: str, result: RolloutResult) -> torch.Tensor:
    batch = Batch.of(result.trajectories)
    found = compute_advantages(
        with_options(ADVANTAGES[name]),
        RewardedBatch(
            token_rewards=torch.from_numpy(batch.token_rewards),
            mask=torch.from_numpy(batch.generated),
            offsets=torch.from_numpy(batch.offsets),
            groups=torch.from_numpy(batch.groups),
            values=torch.linspace(-1, 1, len(batch.tokens)),
            teacher_lead=torch.linspace(1, -1, len(batch.tokens)),
            baselines=torch.tensor([result.baselines[int(group)] for group in batch.groups]),
            turns=turns_of(result.trajectories, batch.offsets),
        ),
    )
    return found.advantages


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_the_batch_without_the_dropped_samples(name: str) -> None:
    greedy = make_trajectory([3, 4], [5], reward=0.25)
    with_dropped, without = two_groups(), two_groups()
    for place in (1, 4, 7):
        with_dropped[place].is_dropped = True
        with_dropped[place].turn_rewards = [(with_dropped[place].turn_rewards[0][0], 1000.0)]
    without = [one for place, one in enumerate(without) if place not in (1, 4, 7)]
    results = [
        collect([group_of([one for one in trajectories if one.prompt_id == g], greedy) for g in range(2)], 1)
        for trajectories in (with_dropped, without)
    ]
    assert [len(result.dropped) for result in results] == [3, 0]
    assert torch.equal(advantages_of(name, results[0]), advantages_of(name, results[1]))


def test_a_curriculum_knows_the_rewards_of_filtered_groups_but_none_of_dropped_samples() -> None:
    trajectories = two_groups()
    for one in trajectories[:5]:
        one.turn_rewards = [(one.turn_rewards[0][0], 1.0)]
    trajectories[7].is_dropped = True
    trajectories[8].error = "the judge did not answer"  # and `on_error` gave it a number
    result = collect([group_of(trajectories[:5]), group_of(trajectories[5:])], 1)
    drop_zero_variance_groups(result, None)
    assert result.zero_variance == [0]
    others = [one.reward for place, one in enumerate(trajectories) if place >= 5 and place not in (7, 8)]
    assert result.row_rewards == [(0, [1.0] * 5, True), (1, others, False)]


def test_a_prompt_whose_greedy_answer_has_no_reward_is_dropped_as_a_whole() -> None:
    greedy = make_trajectory([3, 4], [5])
    greedy.is_dropped = True
    result = collect([group_of(two_groups()[:5], greedy)], 1)
    assert (result.trajectories, len(result.dropped), result.without_reward) == ([], 5, [0])


# Compared with the group, with the others of it, with a greedy answer, by turns, with a critic, with nothing; and with
# groups that are replaced. Losses see no difference between these samples and others.
@pytest.mark.parametrize("name", ["grpo", "rloo", "remax", "gigpo", "ppo", "reinforce", "dapo"])
@pytest.mark.slow
def test_algorithms_train_on_what_is_left(tmp_path: Path, tiny_model: Path, name: str) -> None:
    overrides = (picky(tmp_path), "environment.reward.on_error=drop", f"algorithm.name={name}")
    steps = steps_here(tmp_path, tiny_model, *overrides, "batch.samples_per_prompt=8")
    assert all(row["samples/dropped"] > 0 for row in steps)
    assert all(row["samples/errors"] == row["samples/dropped"] for row in steps)
    assert all(row["updates/made"] == 1 for row in steps)
    if name != "dapo":  # which replaces groups whose rewards are equal
        assert all(row["samples/trajectories"] + row["samples/dropped"] == 32 for row in steps)


@pytest.mark.parametrize("how", ["raise", "return"])
@pytest.mark.slow
def test_dropped_samples_are_written_down_and_in_no_statistic(tmp_path: Path, tiny_model: Path, how: str) -> None:
    overrides = (picky(tmp_path), "environment.reward.on_error=drop", f"environment.reward.options.how={how}")
    run = train_here(tmp_path, tiny_model, *overrides, "logging.trajectories=true", "schedule.steps=1", *VALIDATION)
    records = list(read_trajectories(run / "trajectories" / "step_000001.parquet"))
    kept, dropped = ([one for one in records if (one["reward"] is None) is which] for which in (False, True))
    [step] = steps_of(run)
    assert len(kept) + len(dropped) == 16
    assert len(dropped) == step["samples/dropped"] > 0
    assert step["samples/errors"] == (len(dropped) if how == "raise" else 0)
    assert step["reward/mean"] == pytest.approx(mean(one["reward"] for one in kept))
    assert not any("advantages" in one for one in dropped)
    for prompt_id in {one["prompt_id"] for one in kept}:
        group = [one for one in kept if one["prompt_id"] == prompt_id]
        rewards = [one["reward"] for one in group]
        deviation = stdev(rewards) if len(rewards) > 1 else 0.0
        for one in group:
            expected = (one["reward"] - mean(rewards)) / (deviation + 1e-6)
            assert one["advantages"] == pytest.approx([expected] * len(one["advantages"]), abs=1e-5)
    assert Ledger(run / "ledger.jsonl").audit().clean
    validation = [row for row in rows_of(run) if "validation/dropped" in row]
    assert len(validation) == 2
    assert all(row["validation/dropped"] <= 6 for row in validation)


WAYS = {
    **{name: f"environment.reward.name={{file}}:{name}" for name in ("in_dict", "later", "compared", "compared_dicts")},
    "for_verl": "environment.reward.name={file}:for_verl",
    "several": "environment={rewards: {one: {name: '{file}:later'}, two: {name: '{file}:in_dict'}}}",
    "several_compared": "environment={rewards: {one: {name: '{file}:later'}, two: {name: '{file}:compared'}}}",
    "environment": "environment.name={file}:Stepped",
    "blocking_environment": "environment.name={file}:Blocking",
    "agent": "environment={name: agent, options: {agent: '{file}:agent'}}",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """A step with the plain reward function, which returns None."""
    folder = tmp_path_factory.mktemp("plain")
    plainly = (picky(folder), "environment.reward.options.how=return", "schedule.steps=1")
    return steps_here(folder, tiny_model, *plainly)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_none_is_not_zero_however_the_reward_is_written(
    tmp_path: Path, tiny_model: Path, plain: dict[str, Any], way: str
) -> None:
    picky(tmp_path)
    override = WAYS[way].replace("{file}", str(tmp_path / "picky.py"))
    [step] = steps_here(tmp_path, tiny_model, override, "schedule.steps=1")
    assert plain["samples/dropped"] > 0
    names = ("samples/dropped", "samples/errors", "samples/trajectories", "policy/gradient_norm")
    assert [step[name] for name in names] == pytest.approx([plain[name] for name in names])
    times = 2 if way.startswith("several") else 1
    assert step["reward/mean"] == pytest.approx(times * plain["reward/mean"])


def test_a_pipelined_run_drops_the_same_samples(tmp_path: Path, tiny_model: Path) -> None:
    rows = []
    for pipelined in (False, True):
        (folder := tmp_path / str(pipelined)).mkdir()
        overrides = (picky(folder), "environment.reward.on_error=drop", "schedule.steps=1")
        rows.append(steps_in_mode(folder, tiny_model, pipelined, *overrides)[0])
    for name in ("samples/dropped", "reward/mean", "policy/loss", "policy/gradient_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-6)


def test_a_step_in_which_no_sample_has_a_reward_ends_the_run_in_words(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(RunError, match=re.escape("no sample has a reward, all 16 were dropped; the reward function")):
        steps_here(tmp_path, tiny_model, picky(tmp_path, "never"))
