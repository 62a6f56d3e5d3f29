"""The role of the reward model: scores conversations when their trajectories are over.

Each worker has a whole classifier and knows nothing of the others, so nobody has to call them in a certain order: one
on the trainers' devices computes when these do not. Scores become rewards at the controller (`add_model_scores` in
`loop/rollout_step.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from corral.data.plugins import error_line
from corral.data.rows import Conversation
from corral.envs.base import uses_rewards
from corral.model.sequence_classifier import load_classifier
from corral.recipe.errors import UserError
from corral.recipe.schema import Recipe
from corral.rewards.reward_function import Score
from corral.runtime.group import Group
from corral.runtime.worker import Role, WorkerContext


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
        self.classifier = load_classifier(
            recipe.reward_model,
            context.device,
            max_tokens=recipe.batch.max_tokens_per_micro_batch,
            offload="parameters" in recipe.train.offload,
        )

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
class RewardModelGroup:
    """All workers of the role, as the controller sees them."""

    group: Group[RewardModelWorker]

    async def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Returns a score for each conversation. The longest go first, each to the worker with the least to do."""
        lengths = [sum(len(message["content"]) for message in one.messages) for one in conversations]
        shards: list[list[int]] = [[] for _ in range(self.group.size)]
        loads = [0] * self.group.size
        for number in sorted(range(len(conversations)), key=lambda one: -lengths[one]):
            rank = loads.index(min(loads))
            shards[rank].append(number)
            loads[rank] += lengths[number] + 1
        ranks = [rank for rank, shard in enumerate(shards) if shard]
        arguments = [([conversations[number] for number in shards[rank]],) for rank in ranks]
        answers = await self.group.each(RewardModelWorker.score, arguments, ranks=ranks)
        scores = {
            number: score
            for rank, answer in zip(ranks, answers, strict=True)
            for number, score in zip(shards[rank], answer, strict=True)
        }
        return [scores[number] for number in range(len(conversations))]
