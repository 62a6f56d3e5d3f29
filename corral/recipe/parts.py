"""What an algorithm is put together from: the kinds of parts with what is declared of each, and the presets.

The parts, with the papers' numbers, are declared in `corral/algorithms`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.algorithms import advantages, corrections, losses
from corral.algorithms import pair_losses as pair_losses  # for its declarations
from corral.algorithms.declarations import AdvantageDeclaration, Declaration, LossDeclaration


@dataclass(frozen=True)
class PartKind:
    noun: str
    declared: Mapping[str, Declaration]
    of_a_user: Callable[..., Declaration] | None = None
    """Declares a function that its author did not. None: a part of this kind is one of those declared here."""


KINDS: dict[tuple[str, ...], PartKind] = {
    ("algorithm", "advantage"): PartKind("advantage", advantages.ADVANTAGES, AdvantageDeclaration),
    ("algorithm", "loss"): PartKind("loss", losses.LOSSES, LossDeclaration),
    ("algorithm", "aggregation"): PartKind("aggregation", losses.AGGREGATIONS),
    ("algorithm", "correction"): PartKind("correction", corrections.CORRECTIONS),
    ("algorithm", "shaping"): PartKind("shaping", advantages.SHAPINGS),
    ("algorithm", "kl", "estimator"): PartKind("KL estimator", losses.KL_ESTIMATORS),
    ("algorithm", "kl", "controller"): PartKind("KL controller", losses.KL_CONTROLLERS),
}


KLPlace = Literal["loss", "reward"]


@dataclass(frozen=True)
class Preset:
    """Which parts an algorithm's name stands for."""

    advantage: str = "grpo"
    loss: str = "ppo"
    aggregation: str = "token_mean"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loss that differ from its own defaults."""
    kl_where: KLPlace | None = None
    dynamic_sampling: bool = False

    @property
    def trains_on_rows(self) -> bool:
        """Whether the answers of the rows are trained on, and nothing is rolled out for training."""
        return losses.LOSSES[self.loss].trains_on_rows

    @property
    def trains_on_pairs(self) -> bool:
        """Whether each row has two answers, of which one was preferred."""
        return losses.LOSSES[self.loss].trains_on_pairs


PRESETS: dict[str, Preset] = {
    "grpo": Preset(),
    "ppo": Preset(advantage="gae", kl_where="reward"),
    "dr_grpo": Preset(advantage="dr_grpo", aggregation="seq_mean_token_sum_norm"),
    "dapo": Preset(loss_options={"clip_high": 0.28}, dynamic_sampling=True),
    "gspo": Preset(loss="gspo"),
    "rloo": Preset(advantage="rloo"),
    "reinforce": Preset(advantage="reinforce"),
    "reinforce_plus_plus": Preset(advantage="reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": Preset(advantage="reinforce_plus_plus_baseline"),
    "remax": Preset(advantage="remax"),
    "opo": Preset(advantage="opo"),
    "gpg": Preset(advantage="gpg", loss="gpg"),
    "grpo_passk": Preset(advantage="grpo_passk"),
    "turn_grpo": Preset(advantage="turn_grpo"),
    "gigpo": Preset(advantage="gigpo"),
    "distill": Preset(advantage="distill"),
    "cispo": Preset(loss="cispo"),
    "sapo": Preset(loss="sapo"),
    "gmpo": Preset(loss="gmpo"),
    "dro": Preset(loss="dro"),
    "dppo_tv": Preset(loss="dppo_tv"),
    "dppo_kl": Preset(loss="dppo_kl"),
    "sft": Preset(advantage="none", loss="nll"),
    "dpo": Preset(advantage="none", loss="dpo"),
    "ipo": Preset(advantage="none", loss="ipo"),
    "simpo": Preset(advantage="none", loss="simpo"),
}
