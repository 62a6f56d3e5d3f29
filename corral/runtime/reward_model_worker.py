"""The role of the reward model: scores conversations when their trajectories are over.

Each worker has a whole classifier and knows nothing of the others, so nobody has to call them in a certain order: one
on the trainers' devices computes when these do not. With `reward_model.shard` several have one together, on devices of
their own, and compute at the same time. Scores become rewards at the controller (`add_model_scores` in
`loop/rollout_step.py`).
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from corral.data.plugins import error_line
from corral.data.rows import Conversation
from corral.envs.base import uses_rewards
from corral.model.joined_weights import joining_later
from corral.model.sequence_classifier import SequenceClassifier, load_classifier
from corral.recipe.errors import UserError
from corral.recipe.placement import role_mesh
from corral.recipe.schema import Recipe
from corral.rewards.reward_function import Score
from corral.runtime.group import Group
from corral.runtime.worker import Role, WorkerContext
from corral.training.process_mesh import ProcessMesh
from corral.training.sharding import ShardedModel


class RewardModelWorker(Role):
    """A frozen classifier, as `reward_model` has it."""

    def __init__(self, context: WorkerContext, recipe: Recipe) -> None:
        for environment in recipe.tagged_environments.values():
            if any(reward.is_model for reward in environment.named_rewards.values()) and not uses_rewards(environment):
                raise UserError(
                    f"environment `{environment.name}` has rewards of its own, and would never ask for that of the "
                    "reward model: its class takes no `pool`"
                )
        self.context = context
        shard, offload = recipe.reward_model.shard, "parameters" in recipe.train.offload
        with joining_later() if shard > 1 else nullcontext():
            self.classifier = load_classifier(
                recipe.reward_model,
                context.device,
                max_tokens=recipe.batch.max_tokens_per_micro_batch,
                offload=offload or shard > 1,
            )
        if shard > 1:
            shape = role_mesh(recipe, "reward_model", context.size)
            mesh = ProcessMesh.build(shape, context.device, context.timeout_s, context.replicas)
            self.classifier = ShardedClassifier.of(self.classifier, mesh, offload)

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Returns a score for each conversation, or why it has none."""
        if self.context.device.type == "cuda" and "rollout" in self.context.roles:
            self.context.roles["rollout"].release_cache()
        scores: list[Score | None] = [None] * len(conversations)
        sequences: dict[int, list[int]] = {}
        for number, conversation in enumerate(conversations):
            try:
                sequences[number] = self.classifier.tokens_of(conversation)
            except Exception as error:  # a chat template raises what its author thought of
                scores[number] = Score(
                    None, error=f"the reward model cannot read the conversation: {error_line(error)}"
                )
        for number, score in zip(sequences, self.classifier.scores(list(sequences.values())), strict=True):
            is_finite = math.isfinite(score)
            scores[number] = Score(score) if is_finite else Score(None, error=f"the reward model computed {score}")
        return [score for score in scores if score is not None]


@dataclass(frozen=True)
class ShardedClassifier(SequenceClassifier):
    """A classifier of which each rank of a mesh has a part of every parameter, as trainers have of theirs."""

    sharded: ShardedModel = field(kw_only=True)

    @classmethod
    def of(cls, whole: SequenceClassifier, mesh: ProcessMesh, offload: bool) -> "ShardedClassifier":
        """Shards a classifier in place, whose weights are in the host's memory."""
        sharded = ShardedModel(whole.model, whole.model, mesh, trained=False, offload=offload, in_float32=())
        return cls(whole.model, whole.tokenizer, whole.device, whole.max_length, whole.max_tokens, sharded=sharded)

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Called by all ranks, each with sequences of its own or none: parameters are gathered for all at once, so a
        rank with fewer batches computes a token in their place."""
        batches = list(self.batches(sequences))
        scores = [0.0] * len(sequences)
        for turn in range(self.sharded.mesh.max(len(batches), "shard")):
            batch = batches[turn] if turn < len(batches) else []
            computed = self.sharded(partial(self.logits, [sequences[number] for number in batch] or [[0]]))
            for number, logit in zip(batch, computed, strict=False):
                scores[number] = logit
        return scores


@dataclass(frozen=True)
class RewardModelGroup:
    """All workers of the role, as the controller sees them."""

    group: Group[RewardModelWorker]
    is_sharded: bool = False
    """Whether workers have a classifier together, and so are all called, for one thing after the other."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Returns a score for each conversation. The longest go first, each to the worker with the least to do."""
        async with self.turn if self.is_sharded else nullcontext():
            return await self._score(conversations)

    async def _score(self, conversations: Sequence[Conversation]) -> list[Score]:
        lengths = [sum(len(message["content"]) for message in one.messages) for one in conversations]
        shards: list[list[int]] = [[] for _ in range(self.group.size)]
        loads = [0] * self.group.size
        for number in sorted(range(len(conversations)), key=lambda one: -lengths[one]):
            rank = loads.index(min(loads))
            shards[rank].append(number)
            loads[rank] += lengths[number] + 1
        ranks = [rank for rank, shard in enumerate(shards) if shard or self.is_sharded]
        arguments = [([conversations[number] for number in shards[rank]],) for rank in ranks]
        answers = await self.group.each(RewardModelWorker.score, arguments, ranks=ranks)
        scores = {
            number: score
            for rank, answer in zip(ranks, answers, strict=True)
            for number, score in zip(shards[rank], answer, strict=True)
        }
        return [scores[number] for number in range(len(conversations))]
