"""RLinf's model, the engine that plays it, and the trainers (Megatron, FSDP) that train it."""

import re

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    format_value,
    integer,
    mapped,
    no_effect,
    text,
    unsupported,
)
from corral.migrate.rlinf.devices import devices_of
from corral.migrate.rlinf.facts import DEFAULTS, all_of, area, has_critic, is_fsdp, said, usual
from corral.migrate.table import Convert, ForeignConfig, idle, lacking, needless, only, same, turned

PRECISIONS: dict[str | None, str] = {
    **dict.fromkeys(("fp16", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true"), "float32"),
    None: "auto",
}
NOT_OF_TEXT = re.compile(r"vl|openpi|gr00t|dexbotic|dreamzero|fastwam|policy|cma|abot|resnet|cfg_model|value_model")
"""Model types of RLinf's that see, or move robots."""
FSDP = "actor.fsdp_config"
TENSOR = "actor.model.tensor_model_parallel_size"
OF_ENGINES = (
    "rollout_backend gpu_memory_utilization enforce_eager distributed_executor_backend max_running_requests "
    "cuda_graph_max_bs disable_log_stats detokenize padding group_name return_logprobs use_fixed_worker"
)
OF_CHECKS = "validate_weight validate_weight_first_sync validate_save_dir print_outputs collect_meta_stats"
OF_TRANSFERS = "sync_weight_nccl_max_ctas sync_weight_nccl_min_ctas sync_weight_disable_same_device_ipc"
OF_TRAINERS = (
    "group_name mcore_gpt spec_name enable_dp_load_balance calculate_flops pack_traj sync_precision "
    "combine_reference_model inference_split lr_sched_sync_with_optim"
)
OF_ROUTERS = "moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping"
NO_STAGES = "layers are not dealt over devices; those that are left shard the model"
ALL_TRAINED = "all parameters are trained"


def model_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None and given.key.startswith("actor"):
        return built_in("as rollout.model.model_path")
    return mapped("model.path", without_slash(given.value or DEFAULTS["rollout.model.model_path"]))


def without_slash(path: str) -> str:
    return path.rstrip("/") or path


def is_the_model(config: ForeignConfig, path: str | None) -> bool:
    """Or cannot be told from it: a folder of the same name."""
    paths = [config[key] for key in ("rollout.model.model_path", "actor.model.model_path") if key in config]
    return path is None or not paths or folder(path) in map(folder, paths)


def folder(path: str) -> str:
    return without_slash(path).rpartition("/")[2]


def tokenizer(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_the_model(config, given.value):
        return built_in("the model's own")
    return unsupported("a model has its own tokenizer")


def critic_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not has_critic(config):
        return no_effect("there is no critic")
    return built_in("the model's") if is_the_model(config, given.value) else mapped("critic.path", given.value)


def model_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and NOT_OF_TEXT.search(given.value):
        return unsupported("only models of text are trained")
    return built_in("what the model's own configuration says")


def dtype_of(config: ForeignConfig) -> str:
    """What is computed in."""
    written = said(config, "actor.model.precision")
    if is_fsdp(config):
        autocast = "actor.fsdp_config.amp_autocast"
        by_autocast = config[f"{autocast}.precision"] if config[f"{autocast}.enabled"] else None
        written = config["actor.fsdp_config.mixed_precision.param_dtype"] or by_autocast or written
    return PRECISIONS.get(written, "auto")


def precision(config: ForeignConfig, given: ForeignValue) -> Outcome:
    own, ours = a_precision(given), dtype_of(config)
    note = f"{format_value(given.value)}, here {ours}"
    if own != ours:
        note = f"{format_value(given.value)}, but computed in {ours}; the optimiser has float32 copies"
    return converted({"model.dtype": ours}, note)


def a_precision(given: ForeignValue) -> str:
    if given.value not in PRECISIONS:
        raise ValueError(f"should be one of {', '.join(name for name in PRECISIONS if name)}")
    return PRECISIONS[given.value]


def mixed_precision(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("actor.model.precision counts")
    return precision(config, given) if is_fsdp(config) else no_effect("only FSDP's trainer reads it")


def autocast_precision(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not config["actor.fsdp_config.amp_autocast.enabled"]:
        return no_effect("amp_autocast is off")
    return mixed_precision(config, given)


def rollout_precision(config: ForeignConfig, given: ForeignValue) -> Outcome:
    a_precision(given)
    return built_in(f"the engine computes as the trainer does, in {dtype_of(config)}")


def backend(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value not in ("megatron", "fsdp", None):
        raise ValueError("should be megatron or fsdp")
    return built_in("Corral has one trainer, which shards and splits models")


def tensor_parallel(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A piece of a configuration may have devices that the example's 2 does not divide."""
    devices = devices_of(config)
    counts = {name: len(own) for name, own in devices.by_component.items()} | {"actor": len(devices.of("actor"))}
    fits = all(count % DEFAULTS[TENSOR] == 0 for name, count in counts.items() if name != "rollout")
    if not given.where and (is_fsdp(config) or not fits):
        return built_in("1, as in Corral")
    return parallel("train.parallel.tensor")(config, given)


def parallel(ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        count, size = len(devices_of(config).of("actor")), 1 if given.value is None else given.value
        if size < 1 or count % size:
            raise ValueError(f"should divide the {count} device{'s' * (count > 1)} of actor")
        return mapped(ours, size)

    return convert


def sharding(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_fsdp(config):
        return no_effect("only FSDP's trainer reads it")
    count = len(devices_of(config).of("actor"))
    if given.value == "no_shard" and count > 1:
        ours = {"train.parallel.replicate": count, "train.parallel.shard": 1}
        return converted(ours, f"no_shard: {count} whole copies")
    if given.value == "hybrid_shard":
        return converted(hybrid_shards(config), "groups of devices with a copy each")
    return built_in("parameters, gradients and optimiser are sharded over all devices")


def hybrid_shards(config: ForeignConfig) -> dict[str, int]:
    count = len(devices_of(config).of("actor"))
    size = config["actor.fsdp_config.hybrid_shard_size"] or config["actor.fsdp_config.fsdp_size"] or -1
    if size < 1 or size >= count:
        return {}
    if count % size:
        raise ValueError(f"should make groups that divide the {count} devices of actor, and not of {size}")
    return {"train.parallel.replicate": count // size}


def shard_group(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = hybrid_shards(config) if is_fsdp(config) else {}
    if not ours:
        return built_in("one group of all devices")
    return converted(ours, f"groups of {given.value}: {ours['train.parallel.replicate']} copies")


def offloading(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The keys of all parts say the same list."""
    if not is_fsdp(config):
        keys = {"parameters": "offload_weight", "gradients": "offload_grad", "optimiser": "offload_optimizer"}
        parts = [part for part, key in keys.items() if said(config, f"actor.{key}")]
    elif given.key.endswith(("enable_offload", "cpu_offload")):
        everything = config["actor.enable_offload"] and not devices_of(config).disaggregated
        weights = everything or config["actor.fsdp_config.cpu_offload"]
        parts = ["parameters", "gradients"] * bool(weights) + ["optimiser"] * bool(everything)
    else:
        return no_effect("only Megatron's trainer reads it")
    kept = [part for part in parts if part == "optimiser" or is_sharded(config)]
    note = "" if kept == parts else "parameters and gradients stay: the model is not sharded"
    return mapped("train.offload", kept, note)


def is_sharded(config: ForeignConfig) -> bool:
    by_fsdp = is_fsdp(config) and config[f"{FSDP}.sharding_strategy"] == "no_shard"
    return len(devices_of(config).of("actor")) > 1 and not by_fsdp


def fsdp_offloading(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return offloading(config, given) if is_fsdp(config) else no_effect("only FSDP's trainer reads it")


def recompute(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_fsdp(config):
        return no_effect("only Megatron's trainer reads it")
    if given.value == "full":
        return mapped("train.recompute", "full", "in all layers")
    return built_in("off" if given.value is None else "attention's scores are never kept")


def checkpointing(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_fsdp(config):
        return no_effect("only FSDP's trainer reads it")
    if not given.value:
        return built_in("off")
    return converted({"train.recompute": "full"}, "true: activations are computed again in all layers")


ROWS = (
    usual("rollout.model.model_path", text, model_path),
    turned("rollout.model.model_type", text, model_type),
    turned("rollout.model.precision", text, rollout_precision),
    lacking("rollout.eos", "put it into sampling_params.stop_token_ids"),
    *all_of(
        needless, "rollout", "tensor_parallel_size pipeline_parallel_size", "each device has a whole model to play"
    ),
    *all_of(needless, "rollout", OF_ENGINES, "Corral's engine decides it"),
    *all_of(needless, "rollout", OF_CHECKS, "weights are checked after each transfer, trajectories written to files"),
    *all_of(needless, "rollout", OF_TRANSFERS, "`cluster.transfer` decides it"),
    lacking("rollout.is_eval", "it only evaluates"),
    *area("rollout.sglang", "Corral has an engine of its own"),
    *area("rollout.vllm", "Corral has an engine of its own"),
    *area("inference", "the reference is spread as the actor is"),
    usual("actor.training_backend", text, backend),
    usual("actor.offload_weight", boolean, offloading),
    usual("actor.offload_grad", boolean, offloading),
    usual("actor.offload_optimizer", boolean, offloading),
    turned("actor.enable_offload", boolean, fsdp_offloading),
    idle("actor.global_batch_size", "RLinf sets it: data.rollout_batch_size x group_size / n_minibatches"),
    idle("actor.micro_batch_size", "RLinf sets it: algorithm.training_batch_size_per_gpu"),
    *all_of(needless, "actor", OF_TRAINERS, "Corral's trainer decides it"),
    usual("actor.model.precision", text, precision),
    turned("actor.model.model_path", text, model_path),
    turned("actor.model.model_type", text, model_type),
    lacking("actor.model.megatron_checkpoint", "models of Hugging Face are loaded, and this is one of Megatron"),
    usual(TENSOR, integer, tensor_parallel),
    turned("actor.model.context_parallel_size", integer, parallel("train.parallel.context")),
    turned("actor.model.expert_model_parallel_size", integer, parallel("train.parallel.expert")),
    only("actor.model.pipeline_model_parallel_size", integer, (1,), "one stage", NO_STAGES),
    only("actor.model.virtual_pipeline_model_parallel_size", integer, (1,), "one stage", NO_STAGES),
    usual("actor.model.recompute_granularity", text, recompute),
    *all_of(needless, "actor.model", "recompute_method recompute_num_layers", "all layers or none"),
    *all_of(needless, "actor.model", "seq_length encoder_seq_length", "runner.seq_length counts"),
    lacking("actor.model.is_lora", ALL_TRAINED),
    *all_of(lacking, "actor.model", "freeze_language_model freeze_vision_model freeze_vision_projection", ALL_TRAINED),
    *all_of(lacking, "actor.model", "gptq_model load_in_8bit fp8", "models are not quantised"),
    *all_of(lacking, "actor.model", OF_ROUTERS, "a mixture's router has no loss or noise of its own"),
    *area("actor.model", "the model's own configuration says it, or Corral's trainer decides it"),
    turned("actor.tokenizer.tokenizer_model", text, tokenizer),
    same("actor.tokenizer.trust_remote_code", "model.trust_remote_code", boolean),
    *area("actor.tokenizer", "the model's own tokenizer says it"),
    *area("actor.megatron", "Corral's trainer decides it"),
    turned(f"{FSDP}.sharding_strategy", text, sharding),
    turned(f"{FSDP}.hybrid_shard_size", integer, shard_group),
    turned(f"{FSDP}.fsdp_size", integer, shard_group),
    turned(f"{FSDP}.gradient_checkpointing", boolean, checkpointing),
    turned(f"{FSDP}.cpu_offload", boolean, fsdp_offloading),
    turned(f"{FSDP}.mixed_precision.param_dtype", text, mixed_precision),
    turned(f"{FSDP}.amp_autocast.enabled", boolean, lambda *_: built_in("see its precision")),
    turned(f"{FSDP}.amp_autocast.precision", text, autocast_precision),
    *area(FSDP, "Corral's trainer decides it"),
    *area("actor.channel", "Corral's runtime decides it"),
)
