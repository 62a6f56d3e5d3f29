"""A classifier as the reward: runs with it, what is recorded of it, and what a recipe may say about it."""

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import pytest
from runs import VALIDATION, rows_of, steps_here, train_here, write_recipe
from tiny import DEVICE, save_tiny_classifier, save_vowel_classifier
from transformers import AutoModelForSequenceClassification

from corral.data.rows import Conversation, Message
from corral.loop.components import open_rollout_components
from corral.loop.validation import validate
from corral.model.sequence_classifier import load_classifier
from corral.observe.console import Console
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.schema import RewardModel
from corral.recipe.shape import ModelShape
from corral.runtime.worker import WorkerContext, build_role


@pytest.fixture(scope="module")
def vowels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward-models") / "vowels"
    save_vowel_classifier(folder)
    return folder


def scored_by(model: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides: the reward model's score is the only reward."""
    return (
        "~environment.reward",
        "environment.reward.name=reward_model",
        f"reward_model.path={model}",
        "reward_model.dtype=float32",
        *overrides,
    )


@pytest.mark.slow
def test_a_run_raises_the_score_of_its_reward_model(tmp_path: Path, tiny_model: Path, vowels: Path) -> None:
    overrides = scored_by(vowels, "optimizer.learning_rate=0.03", "schedule.steps=10")
    rewards = [row["reward/mean"] for row in steps_here(tmp_path, tiny_model, *overrides)]
    assert min(rewards[-2:]) > max(rewards[:2]) + 0.5  # answers of vowels alone have 5.1, those without any 3.5


@pytest.mark.slow
def test_its_score_is_one_of_several_rewards_with_weight_and_name(
    tmp_path: Path, tiny_model: Path, vowels: Path
) -> None:
    run = train_here(
        tmp_path,
        tiny_model,
        "~environment.reward",
        f"environment.rewards.vowels.name={tmp_path}/vowels.py:share_of_vowels",
        "environment.rewards.liked.name=reward_model",
        "environment.rewards.liked.weight=3",
        f"reward_model.path={vowels}",
        "reward_model.dtype=float32",
        "logging.trajectories=true",
        "schedule.steps=1",
        *VALIDATION,
    )
    classifier = load_classifier(RewardModel(path=str(vowels), dtype="float32"), DEVICE, 256)
    written = [one for file in (run / "trajectories").iterdir() for one in read_trajectories(file)]
    assert len(written) == 16 + 2 * 6
    for one in written:
        [prompt] = re.findall(r"user\n(.*)<\|end\|>", one["prompt"])
        response = classifier.tokenizer.decode(one["response_tokens"], skip_special_tokens=True)
        messages = [Message(role="user", content=prompt), Message(role="assistant", content=response)]
        [liked] = classifier.scores([classifier.tokens_of(Conversation(messages))])
        assert one["rewards"]["liked"] == pytest.approx(liked, abs=1e-5)
        assert one["reward"] == pytest.approx(one["rewards"]["vowels"] + 3 * liked, abs=1e-5)
    before, step, _ = rows_of(run)
    assert step["reward/mean"] == pytest.approx(step["reward/vowels/mean"] + 3 * step["reward/liked/mean"])
    assert step["reward/liked/std"] > 0
    assert before["validation/mean@1"] == pytest.approx(
        before["validation/reward/vowels/mean"] + 3 * before["validation/reward/liked/mean"]
    )


@pytest.mark.parametrize(
    "cluster",
    [
        (),
        pytest.param(
            ("cluster.devices_per_node=2",),
            marks=(pytest.mark.slow, pytest.mark.xdist_group("ray")),
            id="on Ray",
        ),
        pytest.param(("rollout.engine.own_process=true",), marks=pytest.mark.slow, id="own process"),
    ],
)
def test_an_evaluation_has_the_same_score_as_the_validation_of_a_run(
    tmp_path: Path, tiny_model: Path, vowels: Path, cluster: tuple[str, ...]
) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), [*scored_by(vowels), *VALIDATION, *cluster])
    console = Console(io.StringIO())

    async def evaluate() -> dict[str, float]:
        async with open_rollout_components(recipe, console) as parts:
            return (await validate(parts, console)).metrics

    of_run = tmp_path / "runs" / "tiny" / "logs"
    of_run.mkdir(parents=True)
    found = asyncio.run(evaluate())
    logs = [file.parent.relative_to(tmp_path) for file in tmp_path.rglob("worker-*.log")]
    assert logs == [Path("runs/tiny-evaluation/logs")] * (2 if "cluster.devices_per_node=2" in cluster else 0)
    assert not list(of_run.iterdir())
    before = rows_of(train_here(tmp_path, tiny_model, *scored_by(vowels), *VALIDATION, "schedule.steps=1"))[0]
    assert found["validation/mean@1"] == before["validation/mean@1"] > 0


@pytest.mark.parametrize("on_error", ["-1", "drop"])
def test_a_conversation_that_is_too_long_gets_on_error_and_is_counted(
    tmp_path: Path, tiny_model: Path, vowels: Path, on_error: str
) -> None:
    overrides = scored_by(vowels, "reward_model.max_length=40", f"environment.reward.on_error={on_error}")
    [row] = steps_here(tmp_path, tiny_model, *overrides, "schedule.steps=1", "environment.max_error_rate=null")
    assert 0 < row["samples/errors"] < 16
    assert row["samples/dropped"] == (row["samples/errors"] if on_error == "drop" else 0)
    assert (row["reward/mean"] < 0) is (on_error == "-1")


def test_greedy_baselines_and_zero_variance_groups_see_the_score(
    tmp_path: Path, tiny_model: Path, vowels: Path
) -> None:
    remax = ("algorithm.name=remax", "logging.trajectories=true", "schedule.steps=1")
    steps_here(tmp_path, tiny_model, *scored_by(vowels), *remax)
    [file] = tmp_path.glob("runs/*/trajectories/*")
    leads = [one["advantages"][0] for one in read_trajectories(file)]
    assert 0 < max(leads) < 1  # to a greedy answer without its score the lead would be the whole score, 3.5 or more
    [row] = steps_here(
        tmp_path,
        tiny_model,
        *scored_by(vowels),
        "algorithm.dynamic_sampling={enabled: true, max_rounds: 1}",
        "schedule.steps=1",
    )
    assert row["samples/trajectories"] > 0


BY_MODEL = "environment.reward.name=reward_model"
IN_SHARDS = f"{BY_MODEL} reward_model.path=x reward_model.shard=2"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (BY_MODEL, "`reward_model.path` is its folder or hub name"),
        ("reward_model.path=x", "`reward_model.path` has no effect: no reward of the recipe has the name"),
        (
            f"{BY_MODEL} reward_model.path=x environment.reward.workers=3",
            "`environment.reward.workers` has no effect: the reward model is no function",
        ),
        (
            "environment.rewards.a.name=reward_model environment.rewards.b.name=reward_model reward_model.path=x",
            "`environment.rewards`: a and b are both the reward model's score",
        ),
        (
            f'{BY_MODEL} reward_model.path=x cluster.devices_per_node=2 cluster.placement={{"actor":0,"rollout":1}}',
            "`cluster.placement` has no devices for reward_model",
        ),
        (
            f"{IN_SHARDS} cluster.devices_per_node=2",
            "`reward_model.shard: 2`: the reward model is on devices of actor, rollout, which compute at other times",
        ),
        (
            f'{IN_SHARDS} cluster.devices_per_node=4 cluster.placement={{"actor,rollout":0,"reward_model":"1-3"}}',
            "`reward_model.shard: 2` does not divide the number of the role's devices, 3",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, tiny_model: Path, overrides: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(expected)):
        make_plan(load_recipe(write_recipe(tmp_path, tiny_model), ["~environment.reward", *overrides.split()]))


def test_an_environment_that_never_asks_for_the_reward_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import corral\n\n\nclass Own(corral.Env):\n    async def reset(self, row, seed): ...\n"
        "    async def step(self, reply): ...\n"
    )
    overrides = scored_by(tmp_path, f"environment.name={tmp_path}/own.py:Own")
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    context = WorkerContext(0, 1, "127.0.0.1", DEVICE, 60.0)
    with pytest.raises(UserError, match=r"would never ask for that of the reward model: its class takes no `pool`"):
        build_role("reward_model", context, recipe, None)


def test_the_plan_has_its_devices_and_memory(tmp_path: Path, tiny_model: Path) -> None:
    save_tiny_classifier(tmp_path / "classifier", num_hidden_layers=4)
    apart = ("cluster.devices_per_node=2", 'cluster.placement={"actor,rollout": 0, "reward_model": 1}')
    together, alone = (
        make_plan(
            load_recipe(write_recipe(tmp_path, tiny_model), [*scored_by(tmp_path / "classifier"), *overrides]),
            ModelShape.from_folder(tiny_model),
        )
        for overrides in ((), apart)
    )
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    weights = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.shape != (1, 32))
    sizes: list[dict[str, Any]] = [group["bytes"] for group in (together.as_dict() | alone.as_dict())["memory"]]
    assert "reward model weights" not in sizes[0]
    assert sizes[1]["reward model weights"] == {"rollout": weights, "logprobs": weights, "train": weights}
    assert sizes[1]["activations"].keys() == {"logprobs"}
    assert together.as_dict()["memory"][0]["bytes"]["reward model weights"]["train"] == weights
    assert "1 reward_model" in alone.text()


def test_a_classifier_that_does_not_fit_is_refused_with_what_would(tmp_path: Path, tiny_model: Path) -> None:
    save_tiny_classifier(tmp_path / "classifier", num_hidden_layers=12, intermediate_size=8192)

    def plan(*overrides: str) -> None:
        path = write_recipe(tmp_path, tiny_model)
        small = ("cluster.devices_per_node=3", "cluster.device_memory=0.035", "batch.max_tokens_per_micro_batch=64")
        recipe = load_recipe(path, [*scored_by(tmp_path / "classifier"), *small, *overrides])
        make_plan(recipe, ModelShape.from_folder(tiny_model))

    apart = 'cluster.placement={"actor,rollout": 0, reward_model: 1-2}'
    connected = "cluster.device_memory=0.33"  # with what NCCL takes
    with pytest.raises(RecipeError, match=r"without the reward model it would fit: give that devices of its own"):
        plan(connected)
    with pytest.raises(RecipeError, match=r"device 1-2 \(reward_model\) needs .* `reward_model.shard: 2` would spread"):
        plan(apart)
    plan(apart, "reward_model.shard=2", connected)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("placement", ['{"actor,rollout": 0, reward_model: 1}', '{"actor,rollout,reward_model": all}'])
def test_two_processes_compute_what_one_does(tmp_path: Path, tiny_model: Path, vowels: Path, placement: str) -> None:
    check_processes(tmp_path, tiny_model, vowels, "cluster.devices_per_node=2", f"cluster.placement={placement}")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_processes_have_a_classifier_together(tmp_path: Path, tiny_model: Path, vowels: Path) -> None:
    apart = ("cluster.devices_per_node=3", 'cluster.placement={"actor,rollout": 0, reward_model: 1-2}')
    check_processes(tmp_path, tiny_model, vowels, *apart, "reward_model.shard=2")


def check_processes(tmp_path: Path, tiny_model: Path, vowels: Path, *there_only: str) -> None:
    recipe = scored_by(vowels, "schedule.steps=3", *VALIDATION)
    alone = rows_of(train_here(tmp_path, tiny_model, *recipe, "name=alone"))
    there = rows_of(train_here(tmp_path, tiny_model, *recipe, "name=there", *there_only))
    assert len(alone) == len(there) == 5
    for mine, theirs in zip(alone, there, strict=True):
        for name in ("reward/mean", "reward/std", "validation/mean@1", "policy/loss", "policy/gradient_norm"):
            assert theirs.get(name) == pytest.approx(mine.get(name), abs=1e-4)
