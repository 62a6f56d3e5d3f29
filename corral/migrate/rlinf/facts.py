"""What RLinf takes where nothing is said, and what several of its keys say together.

Its configurations are whole files, and its guides show pieces of them. What a piece leaves out is taken from the file
that it is a piece of, RLinf's example for a model of 1.5B: these are the defaults.
"""

from collections.abc import Callable
from typing import Any

from corral.migrate.outcome import Kind, anything, unsupported
from corral.migrate.table import Convert, ForeignConfig, KeyRow, needless, same, turned

ACTOR_OPTIMISER = {
    "lr": 2e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-5,
    "weight_decay": 0.05,
    "clip_grad": 0.8,
    "lr_decay_iters": 10,
    "lr_warmup_fraction": 0.01,
}
CRITIC_OPTIMISER = {
    "lr": 1e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "lr_decay_iters": 1650,
    "lr_warmup_fraction": 0.0,
}
DEFAULTS: dict[str, Any] = {
    "cluster.num_nodes": 1,
    "runner.max_epochs": 5,
    "runner.save_interval": 50,
    "runner.seq_length": 28672,
    "runner.max_tokens_per_mbs": 28672,
    "runner.experiment_name": "grpo-1.5b",
    "algorithm.group_size": 16,
    "algorithm.n_minibatches": 4,
    "algorithm.training_batch_size_per_gpu": 1,
    "algorithm.recompute_logprobs": True,
    "algorithm.adv_type": "grpo",
    "algorithm.loss_type": "actor",
    "algorithm.kl_beta": 0.0,
    "algorithm.kl_penalty_type": "low_var_kl",
    "algorithm.ratio_clip_eps": 0.2,
    "algorithm.early_stop_imp_ratio": 5.0,
    "data.max_prompt_length": 1024,
    "data.filter_prompt_by_length": True,
    "data.rollout_batch_size": 512,
    "data.answer_key": "solutions",
    "data.apply_chat_template": False,
    "data.seed": 1234,
    "data.train_data_paths": ["boba-106k.jsonl"],
    "rollout.model.model_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "actor.training_backend": "megatron",
    "actor.offload_weight": True,
    "actor.offload_grad": True,
    "actor.offload_optimizer": True,
    "actor.model.precision": "fp16",
    "actor.model.tensor_model_parallel_size": 2,
    "actor.model.recompute_granularity": "full",
    "reward.reward_type": "math",
    "reward.reward_scale": 5.0,
    "reward.reward_max_val": 1.0,
    "reward.reward_min_val": -1.0,
    **{
        f"{role}.{'lr_sched' if key.startswith('lr_') else 'optim'}.{key}": value
        for role, section in (("actor", ACTOR_OPTIMISER), ("critic", CRITIC_OPTIMISER))
        for key, value in section.items()
    },
    **{
        f"{role}.{key}": "constant"
        for role in ("actor", "critic")
        for key in ("optim.lr_scheduler", "lr_sched.lr_decay_style")
    },
}
"""Of RLinf's example: `examples/math/config/qwen2.5-1.5b-grpo-megatron.yaml`, and the critic's of the one for PPO."""
ADVANTAGES = {
    **dict.fromkeys(("grpo", "math_grpo", "grpo-math", "grpo_dynamic"), "grpo"),
    **dict.fromkeys(("gae", "ppo"), "ppo"),
    "reinpp": "reinforce_plus_plus",
    "reinpp_baseline": "reinforce_plus_plus_baseline",
    "raw": "reinforce",
}
LOSSES = {
    **dict.fromkeys(("actor", "math_ppo_actor", "math_actor", "actor_critic", "ppo", "grpo"), "ppo"),
    "gspo": "gspo",
}
NEVER_VALIDATES = "RLinf never validates reasoning tasks"
UNREAD_LENGTHS = "nothing reads it; see algorithm.overlong"


def said(config: ForeignConfig, key: str) -> Any:
    """As written; where that is null, what RLinf's example has."""
    value = config[key]
    return DEFAULTS[key] if value is None else value


def is_fsdp(config: ForeignConfig, role: str = "actor") -> bool:
    """Where nothing says it: whether the trainer has settings of FSDP."""
    key = f"{role}.training_backend"
    if key not in config and config.below(f"{role}.fsdp_config"):
        return True
    return bool(config[key] == "fsdp")


def is_search(config: ForeignConfig) -> bool:
    return bool(config["reward.reward_type"] == "searchr1")


def advantage_of(config: ForeignConfig) -> str:
    name = ADVANTAGES.get(said(config, "algorithm.adv_type"), "grpo")
    if name == "reinforce_plus_plus" and config["algorithm.use_reinpp_baseline"]:
        return "reinforce_plus_plus_baseline"
    return name


def loss_of(config: ForeignConfig) -> str:
    return LOSSES.get(said(config, "algorithm.loss_type"), "ppo")


def has_critic(config: ForeignConfig) -> bool:
    return advantage_of(config) == "ppo"


def kl_in_loss(config: ForeignConfig) -> bool:
    return bool(said(config, "algorithm.kl_beta") > 0)


def kl_in_reward(config: ForeignConfig) -> bool:
    beta = config["algorithm.reinpp_kl_beta"]
    return bool(beta and beta > 0 and advantage_of(config).startswith("reinforce_plus_plus"))


def has_kl(config: ForeignConfig) -> bool:
    return kl_in_loss(config) or kl_in_reward(config)


# --- rows


def usual(key: str, kind: Kind, convert: Convert) -> KeyRow:
    return turned(key, kind, convert, DEFAULTS[key])


def usual_same(key: str, ours: str, kind: Kind) -> KeyRow:
    return same(key, ours, kind, DEFAULTS[key])


def area(key: str, note: str) -> tuple[KeyRow, KeyRow]:
    """A key, and all that is below it."""
    return needless(key, note), needless(f"{key}.**", note)


def foreign(key: str, why: str) -> KeyRow:
    """Unsupported, whatever its value."""
    return turned(key, anything, lambda *_: unsupported(why))


def all_of(make: Callable[[str, str], KeyRow], prefix: str, names: str, note: str) -> tuple[KeyRow, ...]:
    return tuple(make(f"{prefix}.{name}", note) for name in names.split())
