"""ROLL: every key of its agentic and RLVR pipelines, of the version of the guides and of today's.

Its other pipelines (DPO, SFT, distillation, models that see) are known as far as to say that Corral has none.
"""

from corral.migrate.roll import (
    algorithm,
    data,
    devices,
    environments,
    loss,
    optimiser,
    others,
    playing,
    run,
)
from corral.migrate.roll.facts import STRATEGY
from corral.migrate.table import KeyTable

VARIANT_KEYS = (
    "cispo_epsilon_low",
    "cispo_epsilon_high",
    "cispo_use_unified_mask",
    "tis_lower_bound",
    "tis_upper_bound",
    "topr_positive_weight",
    "topr_negative_weight",
    "kimi15_tau",
)
MODELS = ("actor_train", "actor_infer", "reference", "critic")

ALIASES = {
    "strategy_name": "actor_train.strategy_args.strategy_name",
    "strategy_config.**": f"{STRATEGY}.**",
    "strategy_config": STRATEGY,
    "max_steps_per_traj": "max_actions_per_traj",
    **{f"{manager}.env_groups": f"{manager}.num_env_groups" for manager in environments.MANAGERS},
    **{f"{manager}.n_groups": f"{manager}.num_groups_partition" for manager in environments.MANAGERS},
    **{f"{role}.model_args.flash_attn": f"{role}.model_args.attn_implementation" for role in MODELS},
    "train_env_manager.generating_args.**": "actor_infer.generating_args.**",
    **{key: f"actor_train.{key}" for key in VARIANT_KEYS},
    "use_rollout_importance_sampling_ratio": f"{loss.CORRECTION}.enabled",
    "rollout_importance_sampling_ratio_upper_bound": f"{loss.CORRECTION}.upper_bound",
}

TABLE = KeyTable(
    "ROLL",
    (
        *run.ROWS,
        *environments.ROWS,
        *playing.ROWS,
        *algorithm.ROWS,
        *loss.ROWS,
        *optimiser.ROWS,
        *devices.ROWS,
        *data.ROWS,
        *others.ROWS,
    ),
    ALIASES,
)
