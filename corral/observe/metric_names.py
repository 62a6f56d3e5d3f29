"""Names of verl for Corral's metrics (`logging.names: verl`), for trackers in which runs of both are compared.

Metrics for which verl has none keep theirs. `docs/runs-and-checkpoints.md` lists them, with what is not quite the same.
"""

import re
from collections.abc import Mapping

VERL: dict[str, tuple[str, ...]] = {
    "reward/mean": ("critic/score/mean", "critic/rewards/mean"),
    "length/mean": ("response_length/mean",),
    "length/max": ("response_length/max",),
    "stop/length": ("response_length/clip_ratio",),
    "policy/loss": ("actor/pg_loss",),
    "policy/entropy": ("actor/entropy",),
    "policy/gradient_norm": ("actor/grad_norm",),
    "policy/learning_rate": ("actor/lr",),
    "policy/clipped": ("actor/pg_clipfrac",),
    "policy/approx_kl": ("actor/ppo_kl",),
    "kl/mean": ("actor/kl_loss",),
    "kl/coefficient": ("actor/kl_coef",),
    "value/loss": ("critic/vf_loss",),
    "time/rollout_s": ("timing_s/gen",),
    "time/train_s": ("timing_s/update_actor",),
    "time/transfer_s": ("timing_s/update_weights",),
    "time/validate_s": ("timing_s/testing",),
    "time/save_s": ("timing_s/save_checkpoint",),
    "time/step_s": ("timing_s/step", "perf/time_per_step"),
    "speed/tokens_per_device_s": ("perf/throughput",),
}
SCORE = re.compile(r"validation/(.+)/(mean@\d+)")
"""The held-out score of one of several sources."""


def verl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    return {new: value for name, value in metrics.items() for new in names_of(name)}


def names_of(name: str) -> tuple[str, ...]:
    score = SCORE.fullmatch(name)
    return (f"val-core/{score[1]}/reward/{score[2]}",) if score else VERL.get(name, (name,))
