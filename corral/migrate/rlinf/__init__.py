"""RLinf's keys, of its first guides (`task_type: math`) and of today (`reasoning`).

Tasks with an answer in words are read, and of agents the one that searches. Robots and images are not.
"""

from corral.migrate.rlinf import (
    algorithm,
    batch,
    data,
    devices,
    model,
    optimiser,
    run,
)
from corral.migrate.rlinf.facts import area
from corral.migrate.rlinf.model import FSDP
from corral.migrate.table import KeyTable

TABLE = KeyTable(
    title="RLinf",
    rows=(
        *devices.ROWS,
        *run.ROWS,
        *batch.ROWS,
        *algorithm.ROWS,
        *data.ROWS,
        *model.ROWS,
        *optimiser.ROWS,
        *area("profile_data", "it is for RLinf's placement tuner"),
        *area("hydra", "Hydra's own"),
    ),
    aliases={
        "rollout.model_dir": "rollout.model.model_path",
        "rollout.model_arch": "rollout.model.model_type",
        "rollout.precision": "rollout.model.precision",
        "rollout.attention_backend": "rollout.sglang.attention_backend",
        "rollout.sglang_decode_log_interval": "rollout.sglang.decode_log_interval",
        "rollout.use_torch_compile": "rollout.sglang.use_torch_compile",
        "rollout.torch_compile_max_bs": "rollout.sglang.torch_compile_max_bs",
        "actor.checkpoint_load_path": "actor.model.megatron_checkpoint",
        "actor.model.gradient_checkpointing": f"{FSDP}.gradient_checkpointing",
        "actor.model.sharding_strategy": f"{FSDP}.sharding_strategy",
        f"{FSDP}.amp_grad_scaler.**": f"{FSDP}.grad_scaler.**",
    },
)
