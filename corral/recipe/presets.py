"""What an algorithm's name stands for, and every value decided: the user's, else the preset's, else the loss's own.

The formulas behind the names are in `corral/algorithms`; the numbers are those of the papers, or where a paper gives
none, those in common use.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

from corral.recipe.schema import (
    AdvantageName,
    AggregationName,
    AlgorithmName,
    KLEstimator,
    LossName,
    Recipe,
)

Value = TypeVar("Value")
Place = Literal["loss", "reward"]

GROUP_BASELINES: frozenset[AdvantageName] = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "turn_grpo", "gigpo"}
)
"""Advantages that compare the samples of one prompt with each other."""
DISCOUNTED: frozenset[AdvantageName] = frozenset({"gae", "reinforce", "reinforce_plus_plus"})
"""Advantages in which gamma occurs."""
WHITENED: frozenset[AdvantageName] = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Advantages whose formula whitens them over the batch."""
BY_TURN: frozenset[AdvantageName] = frozenset({"turn_grpo", "gigpo"})
"""Advantages in which turn_gamma occurs."""

FORCED_AGGREGATION: dict[LossName, AggregationName] = {
    "gspo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "gmpo": "seq_mean_token_mean",
}
"""Losses that are means over sequences by definition."""

CLIPS: dict[LossName, tuple[float, float]] = {
    "ppo": (0.2, 0.2),  # Schulman et al. 2017
    "gspo": (3e-4, 4e-4),  # arXiv:2507.18071; a ratio of whole sequences moves far less than one of tokens
    "cispo": (1.0, 0.2),  # arXiv:2506.13585 leaves the lower side open: 1 - 1 = 0
    "gmpo": (0.4, 0.4),  # arXiv:2507.20673; of the logarithm of the ratio
}
"""Losses that clip, and how far below and above a ratio of 1 (GMPO: of the log-ratio 0) they let it go."""

DPPO_THRESHOLDS: dict[LossName, float] = {"dppo_tv": 0.15, "dppo_kl": 0.05}  # arXiv:2602.04879


@dataclass(frozen=True)
class Preset:
    advantage: AdvantageName = "grpo"
    loss: LossName = "ppo"
    aggregation: AggregationName = "token_mean"
    clip_high: float | None = None
    """Where it differs from the loss's own."""
    kl_where: Place | None = None
    dynamic_sampling: bool = False


PRESETS: dict[AlgorithmName, Preset] = {
    "ppo": Preset(advantage="gae", kl_where="reward"),
    "grpo": Preset(),
    "dr_grpo": Preset(advantage="dr_grpo", aggregation="seq_mean_token_sum_norm"),
    "dapo": Preset(clip_high=0.28, dynamic_sampling=True),
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
    "cispo": Preset(loss="cispo"),
    "sapo": Preset(loss="sapo"),
    "gmpo": Preset(loss="gmpo"),
    "dro": Preset(loss="dro"),
    "dppo_tv": Preset(loss="dppo_tv"),
    "dppo_kl": Preset(loss="dppo_kl"),
}


@dataclass(frozen=True)
class ResolvedAlgorithm:
    """Every value of the algorithm. Those that its loss and advantage do not use hold a default."""

    advantage: AdvantageName
    loss: LossName
    aggregation: AggregationName
    aggregation_norm: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    max_mean_ratio: float | None
    reward_clip: float | None
    whiten: bool
    advantage_clip: float | None
    gamma: float
    gae_lambda: float
    turn_gamma: float
    turn_weight: float
    sapo_tau_positive: float
    sapo_tau_negative: float
    dro_beta: float
    dppo_threshold: float
    entropy_coefficient: float
    llds_coefficient: float
    old_logprobs: Literal["engine", "recompute"]
    kl_where: Place | None
    kl_estimator: KLEstimator
    kl_coefficient: float
    kl_controller: Literal["fixed", "adaptive"]
    kl_target: float
    kl_horizon: int
    correction_name: Literal["none", "token_tis", "sequence_tis", "icepop", "rejection"]
    correction_cap: float
    correction_floor: float
    correction_level: Literal["token", "sequence"]
    dynamic_sampling: bool
    max_rounds: int
    overlong_buffer: int | None
    overlong_penalty: float

    @property
    def advantage_options(self) -> dict[str, float]:
        """What the advantage's function is called with."""
        if self.advantage == "gigpo":
            return {"turn_gamma": self.turn_gamma, "turn_weight": self.turn_weight}
        if self.advantage == "turn_grpo":
            return {"turn_gamma": self.turn_gamma}
        return {"gamma": self.gamma, "gae_lambda": self.gae_lambda}

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_where is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage == "remax"


def resolve_algorithm(recipe: Recipe) -> ResolvedAlgorithm:
    written, preset = recipe.algorithm, PRESETS[recipe.algorithm.name]
    loss = either(written.loss, preset.loss)
    clip_low, clip_high = CLIPS.get(loss, CLIPS["ppo"])
    if loss == preset.loss and preset.clip_high is not None:
        clip_high = preset.clip_high
    kl_where = written.kl.where if "where" in written.kl.model_fields_set else preset.kl_where
    correction, sampling = written.correction, written.dynamic_sampling
    stale = recipe.schedule.max_staleness > 0
    usual: Literal["none", "token_tis"] = "token_tis" if stale else "none"
    correction_name = either(correction.name, usual)
    return ResolvedAlgorithm(
        advantage=either(written.advantage, preset.advantage),
        loss=loss,
        aggregation=FORCED_AGGREGATION.get(loss, either(written.aggregation, preset.aggregation)),
        aggregation_norm=either(written.aggregation_norm, float(recipe.rollout.max_response_tokens)),
        clip_low=either(written.clip_low, clip_low),
        clip_high=either(written.clip_high, clip_high),
        dual_clip=written.dual_clip,
        max_mean_ratio=written.max_mean_ratio,
        reward_clip=written.reward_clip,
        whiten=written.whiten,
        advantage_clip=written.advantage_clip,
        gamma=either(written.gamma, 1.0),
        gae_lambda=either(written.gae_lambda, 1.0),
        turn_gamma=either(written.turn_gamma, 0.95),  # arXiv:2505.10978
        turn_weight=either(written.turn_weight, 1.0),
        sapo_tau_positive=either(written.sapo_tau_positive, 1.0),  # arXiv:2511.20347
        sapo_tau_negative=either(written.sapo_tau_negative, 1.05),
        dro_beta=either(written.dro_beta, 0.05),
        dppo_threshold=either(written.dppo_threshold, DPPO_THRESHOLDS.get(loss, DPPO_THRESHOLDS["dppo_tv"])),
        entropy_coefficient=written.entropy_coefficient,
        llds_coefficient=written.llds_coefficient,
        old_logprobs=either(written.old_logprobs, "recompute" if stale else "engine"),
        kl_where=kl_where,
        kl_estimator=either(written.kl.estimator, "k1" if kl_where == "reward" else "k3"),
        kl_coefficient=either(written.kl.coefficient, 0.001),
        kl_controller=either(written.kl.controller, "fixed"),
        kl_target=either(written.kl.target, 0.1),
        kl_horizon=either(written.kl.horizon, 10_000),
        correction_name=correction_name,
        correction_cap=either(correction.cap, 5.0 if correction_name == "icepop" else 2.0),
        correction_floor=either(correction.floor, 0.5),
        correction_level=either(correction.level, "token"),
        dynamic_sampling=either(sampling.enabled, preset.dynamic_sampling),
        max_rounds=either(sampling.max_rounds, 10),
        overlong_buffer=written.overlong.buffer_tokens,
        overlong_penalty=either(written.overlong.penalty, 1.0),
    )


def either(written: Value | None, otherwise: Value) -> Value:
    return otherwise if written is None else written
