"""What a trainer is given to minimize: a pack's contribution to the loss, as a function of its tokens' log-probs.

Trainers know nothing of algorithms; here the two meet, on the worker.
"""

from dataclasses import dataclass, field

from torch import Tensor

from corral.algorithms.aggregate import AGGREGATIONS, GlobalCounts, aggregate
from corral.algorithms.declarations import with_options
from corral.algorithms.kl import kl_penalty
from corral.algorithms.losses import PolicyTerms, TokenLoss, llds, policy_token_loss, value_loss
from corral.data.batch import Pack
from corral.kernels.host_to_device import on_device
from corral.recipe.presets import ResolvedAlgorithm

TOKEN_MEAN = with_options(AGGREGATIONS["token_mean"])
SEQ_MEAN_TOKEN_MEAN = with_options(AGGREGATIONS["seq_mean_token_mean"])


@dataclass(frozen=True)
class UpdateTerms:
    """Numbers of the whole update that each contribution to its loss is computed with."""

    counts: GlobalCounts
    """What losses are divided by, whatever was left out or is computed elsewhere."""
    preserved: int
    """Number of trajectories to which the LLDS regularizer applies."""
    kl_coefficient: float


@dataclass
class LossStats:
    """Sums over the tokens that one worker computed of an update; they add up over workers."""

    loss: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    unread: list[tuple[str, TokenLoss]] = field(default_factory=list)
    """Losses whose numbers are still on the device: reading them would wait for it."""

    @property
    def mean_ratio(self) -> float:
        """Mean ratio of new to old probability, as the policy loss has it."""
        return self.sums.get("policy/ratio", 0.0) / max(self.num_tokens, 1)

    def add(self, name: str, token_loss: TokenLoss) -> None:
        self.unread.append((name, TokenLoss(token_loss.loss.detach(), token_loss.sums, token_loss.maxima)))

    def read(self) -> "LossStats":
        """These statistics, with everything that was added read from the device."""
        for name, token_loss in self.unread:
            for key, value in token_loss.sums.items():
                self.sums[f"{name}/{key}"] = self.sums.get(f"{name}/{key}", 0.0) + float(value)
            for key, value in token_loss.maxima.items():
                self.maxima[f"{name}/{key}"] = max(self.maxima.get(f"{name}/{key}", 0.0), float(value))
        self.unread.clear()
        return self

    def merge(self, other: "LossStats") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, 0.0), value)


@dataclass
class PolicyLossFunction:
    """A pack's contribution to the policy loss, as a function of its log-probs and entropy."""

    algorithm: ResolvedAlgorithm
    pack: Pack
    terms: UpdateTerms
    sums: LossStats

    def __call__(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        algorithm, device = self.algorithm, logprobs.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        column = {name: on_device(self.pack.column(name), device) for name in self.pack.batch.columns}
        terms = PolicyTerms(logprobs, column["old_logprobs"], column["advantages"], mask, offsets)
        token_loss = policy_token_loss(algorithm.loss, terms)
        entropy_sum = (entropy.detach() * mask).sum()
        self.sums.add(
            "policy", TokenLoss(token_loss.loss, {**token_loss.sums, "entropy": entropy_sum}, token_loss.maxima)
        )
        self.sums.num_tokens += int(self.pack.generated.sum())
        loss = token_loss.loss
        if "correction" in column:
            loss = loss * column["correction"]
        if algorithm.kl is not None and algorithm.kl.where == "loss":
            penalty = kl_penalty(algorithm.kl.estimator, logprobs, column["reference_logprobs"])
            loss = loss + self.terms.kl_coefficient * penalty
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * entropy
        total = aggregate(loss, mask, offsets, algorithm.aggregation, self.terms.counts)
        if algorithm.llds_coefficient:
            fallen = llds(logprobs, terms.old_logprobs, terms.advantages, mask, offsets)
            counts = GlobalCounts(self.terms.counts.num_tokens, self.terms.preserved)
            total = total + algorithm.llds_coefficient * aggregate(fallen, mask, offsets, SEQ_MEAN_TOKEN_MEAN, counts)
        return total


@dataclass
class ValueLossFunction:
    """A pack's contribution to the value loss, as a function of its values."""

    clip: float | None
    pack: Pack
    terms: UpdateTerms

    def __call__(self, values: Tensor) -> Tensor:
        device = values.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        old, returns = (on_device(self.pack.column(name), device) for name in ("values", "returns"))
        token_loss = value_loss(values, old, returns, mask, self.clip)
        return aggregate(token_loss.loss, mask, offsets, TOKEN_MEAN, self.terms.counts)
