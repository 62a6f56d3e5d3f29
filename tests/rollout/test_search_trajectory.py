"""A search trajectory of three turns, token by token: what was generated, and what everything else may see of it."""

import asyncio
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from stand_in_retriever import StandInRetriever
from tiny import tiny_tokenizer

from corral.algorithms.advantages import GaeOptions, RewardedBatch, gae
from corral.data.batch import Batch, Trajectory
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs.base import EnvSet
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards.scorer_pool import InProcessScorer, make_scorer
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import NO_IMAGES, Completion, FinishReason, PrefixHandle, Sampling

REPLIES = [
    "<think>who?</think><search>who wrote it</search>",
    "hmm",
    "<answer>Ann</answer>",
]
DRAWN = """\
. <|start|>user
. Who wrote it?<|end|>
. <|start|>assistant
. ^<think>who?</think><search>who wrote it</search>
. <information>All of it.</information>
. ^hmm
. Search or answer.
. ^<answer>Ann</answer>"""
"""A line begins with a dot, and what follows ^ was generated, to the end of the line."""


class Scripted:
    """An engine that says what it is told to, a character a token, each less likely than the one before."""

    def __init__(self, tokenizer: object, replies: list[str]) -> None:
        self.tokenizer, self.replies = tokenizer, list(replies)
        self.seen: list[list[int]] = []

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        prefix: PrefixHandle | None = None,
        keep_prefix: bool = False,
        images: Mapping[int, bytes] = NO_IMAGES,
    ) -> Completion:
        self.seen.append(list(tokens))
        said = self.tokenizer.encode(self.replies.pop(0), add_special_tokens=False)  # type: ignore[attr-defined]
        return Completion(said, [-float(i + 1) for i in range(len(said))], FinishReason.STOP_STRING, [3] * len(said))


@pytest.fixture
def retriever() -> Iterator[StandInRetriever]:
    server = StandInRetriever()
    yield server
    server.stop()


@pytest.fixture
def rolled_out(retriever: StandInRetriever) -> Trajectory:
    return rollout(retriever)


def rollout(
    retriever: StandInRetriever, answer: str = "Ann", max_observation_tokens: int | None = None, reward: str = "em"
) -> Trajectory:
    tokenizer = tiny_tokenizer()
    environment = Environment(
        name="search",
        reward=Reward(name=reward),
        options={
            "retriever": f"http://127.0.0.1:{retriever.port}",
            "topk": 1,
            "prompt": None,
            "observation": "\n<information>{documents}</information>\n",
            "document": "{text}",
            "invalid_feedback": "\nSearch or answer.\n",
        },
    )
    settings = Rollout(max_turns=2, max_response_tokens=400)
    envs = EnvSet({"": environment}, {"": make_scorer(environment, InProcessScorer)}, settings)
    driver = RolloutDriver(
        engine=Scripted(tokenizer, REPLIES),  # type: ignore[arg-type]
        envs=envs,
        chat=ChatRenderer(tokenizer, True),
        max_turns=2,
        max_prompt_tokens=100,
        max_response_tokens=400,
        seed=0,
        max_observation_tokens=max_observation_tokens,
    )
    row = Row([Message(role="user", content="Who wrote it?")], answer, "", {})
    prompt = Prompt(0, 0, row, render_prompt(tokenizer, row, True))
    try:
        [trajectory] = asyncio.run(driver.roll_out([prompt], 1, Sampling(max_tokens=400)))
    finally:
        envs.close()
    return trajectory


def draw(trajectory: Trajectory) -> str:
    """The whole text, with ^ where the model begins to speak. (Every one of its turns ends a line.)"""
    tokenizer, drawn, before = tiny_tokenizer(), "", False
    for token, generated in zip(trajectory.tokens, trajectory.generated, strict=True):
        drawn += ("^" if generated and not before else "") + tokenizer.decode([token])
        before = bool(generated)
    return "\n".join(f". {line}" for line in drawn.split("\n"))


def test_a_search_in_three_turns_token_by_token(rolled_out: Trajectory) -> None:
    assert rolled_out.error is None
    assert draw(rolled_out) == DRAWN
    tokenizer = tiny_tokenizer()
    generated = [tokenizer.encode(reply, add_special_tokens=False) for reply in REPLIES]
    assert rolled_out.tokens[rolled_out.generated].tolist() == [token for reply in generated for token in reply]
    assert rolled_out.logprobs[~rolled_out.generated].tolist() == [0.0] * int((~rolled_out.generated).sum())
    assert set(rolled_out.versions[~rolled_out.generated]) == {-1}
    assert rolled_out.logprobs[rolled_out.generated].tolist() == [
        -float(i + 1) for r in generated for i in range(len(r))
    ]


def test_what_the_model_does_not_see_counts_as_not_found(retriever: StandInRetriever) -> None:
    whole, cut = rollout(retriever, answer="it"), rollout(retriever, answer="it", max_observation_tokens=35)
    assert "<information>All of</information>" in draw(cut)
    assert (whole.metrics["found"], cut.metrics["found"]) == (1.0, 0.0)


def test_rewards_sit_on_the_last_token_of_each_turn(rolled_out: Trajectory) -> None:
    ends = np.flatnonzero(rolled_out.generated & ~np.append(rolled_out.generated[1:], False))
    assert rolled_out.turn_rewards == [(ends[0], 0.0), (ends[1], 0.0), (ends[2], 1.0)]


def test_observations_are_in_no_loss_no_value_and_no_whitening(rolled_out: Trajectory) -> None:
    """Numbers on tokens that were not generated can be anything: nothing changes."""
    batch = Batch.of([rolled_out, rolled_out])
    pack = batch.pack(1000)[0]
    assert pack.generated[pack.targets].all()
    assert len(pack.targets) == 2 * rolled_out.num_generated
    mask = torch.from_numpy(batch.generated)
    values = torch.linspace(0, 1, len(mask))
    tensors = {"mask": mask, "offsets": torch.from_numpy(batch.offsets), "groups": torch.from_numpy(batch.groups)}
    rewards = torch.from_numpy(batch.token_rewards)
    clean = gae(RewardedBatch(rewards, values=values, **tensors), GaeOptions(gamma=0.99, gae_lambda=0.95))
    nan = torch.tensor(torch.nan)
    poisoned = RewardedBatch(torch.where(mask, rewards, nan), values=torch.where(mask, values, nan), **tensors)
    found = gae(poisoned, GaeOptions(gamma=0.99, gae_lambda=0.95))
    assert torch.equal(found.advantages, clean.advantages)
    assert torch.equal(found.returns, clean.returns)
    assert found.advantages[~mask].abs().max() == 0
    whitened = found.advantages[mask]
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-5)


def test_the_reward_model_gets_the_conversation_with_what_was_found_in_the_models_own_turn(
    retriever: StandInRetriever, rolled_out: Trajectory
) -> None:
    assert rolled_out.conversation is None
    conversation = rollout(retriever, reward="reward_model").conversation
    assert conversation is not None
    found = "\n<information>All of it.</information>\n"
    assert conversation.messages == [
        Message(role="user", content="Who wrote it?"),
        Message(role="assistant", content=f"{REPLIES[0]}{found}hmm\nSearch or answer.\n{REPLIES[2]}"),
    ]
