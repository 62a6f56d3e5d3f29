"""What a trainer is given to minimise: a pack's share of the loss, as a function of what the model says of its tokens.

Trainers know nothing of algorithms; here the two meet, on the worker.
"""

from dataclasses import dataclass, field

from torch import Tensor

from corral.algorithms.aggregate import GlobalCounts, aggregate
from corral.algorithms.kl import kl_penalty
from corral.algorithms.losses import LOSSES, LossOptions, PolicyTerms, TokenLoss
from corral.algorithms.regularizers import llds
from corral.algorithms.values import value_loss
from corral.data.batch import Pack
from corral.kernels.device import on_device
from corral.recipe.presets import ResolvedAlgorithm


@dataclass(frozen=True)
class UpdateTerms:
    """What a share of the loss needs to know of the whole update."""

    counts: GlobalCounts
    """What losses are divided by, whatever was left out or is computed elsewhere."""
    preserved: int
    """Trajectories that the LLDS regularizer looks at."""
    kl_coefficient: float


@dataclass
class LossStats:
    """Over the tokens of one worker's share of an update; shares add up."""

    loss: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    unread: list[tuple[str, TokenLoss]] = field(default_factory=list)
    """Still on the device, which would have to be waited for."""

    @property
    def mean_ratio(self) -> float:
        """Of new to old probability, as the policy loss has it."""
        return self.sums.get("policy/ratio", 0.0) / max(self.num_tokens, 1)

    def add(self, name: str, token_loss: TokenLoss) -> None:
        self.unread.append((name, TokenLoss(token_loss.loss.detach(), token_loss.sums, token_loss.maxima)))

    def read(self) -> "LossStats":
        """Itself, with all that was added."""
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
    """A pack's share of the policy loss, as a function of its log-probs and entropy."""

    algorithm: ResolvedAlgorithm
    pack: Pack
    terms: UpdateTerms
    sums: LossStats

    def __call__(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        algorithm, device = self.algorithm, logprobs.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        column = {name: on_device(self.pack.column(name), device) for name in self.pack.batch.columns}
        terms = PolicyTerms(logprobs, column["old_logprobs"], column["advantages"], mask, offsets)
        token_loss = LOSSES[algorithm.loss](terms, loss_options(algorithm))
        entropy_sum = (entropy.detach() * mask).sum()
        self.sums.add(
            "policy", TokenLoss(token_loss.loss, {**token_loss.sums, "entropy": entropy_sum}, token_loss.maxima)
        )
        self.sums.num_tokens += int(self.pack.generated.sum())
        loss = token_loss.loss
        if "correction" in column:
            loss = loss * column["correction"]
        if algorithm.kl_where == "loss":
            penalty = kl_penalty(logprobs, column["reference_logprobs"], algorithm.kl_estimator)
            loss = loss + self.terms.kl_coefficient * penalty
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * entropy
        share = aggregate(loss, mask, offsets, algorithm.aggregation, self.terms.counts, algorithm.aggregation_norm)
        if algorithm.llds_coefficient:
            fallen = llds(logprobs, terms.old_logprobs, terms.advantages, mask, offsets)
            counts = GlobalCounts(self.terms.counts.num_tokens, self.terms.preserved)
            share = share + algorithm.llds_coefficient * aggregate(fallen, mask, offsets, "seq_mean_token_mean", counts)
        return share


def loss_options(algorithm: ResolvedAlgorithm) -> LossOptions:
    return LossOptions(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        sapo_tau_positive=algorithm.sapo_tau_positive,
        sapo_tau_negative=algorithm.sapo_tau_negative,
        dro_beta=algorithm.dro_beta,
        dppo_threshold=algorithm.dppo_threshold,
    )


@dataclass
class ValueLossFunction:
    """A pack's share of the value loss, as a function of its values."""

    clip: float | None
    pack: Pack
    terms: UpdateTerms

    def __call__(self, values: Tensor) -> Tensor:
        device = values.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        old, returns = (on_device(self.pack.column(name), device) for name in ("values", "returns"))
        token_loss = value_loss(values, old, returns, mask, self.clip)
        return aggregate(token_loss.loss, mask, offsets, "token_mean", self.terms.counts)
