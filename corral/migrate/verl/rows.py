"""Keys of verl's that need no conversion: what Corral does anyway, what has no counterpart, and what is off."""

from collections.abc import Iterator

from corral.migrate.outcome import ForeignValue, Outcome, anything, boolean, built_in, number, text, unsupported
from corral.migrate.table import ForeignConfig, KeyRow, idle, lacking, needless, only, provided, turned
from corral.migrate.verl.batch import (
    ACTOR,
    ENGINES,
    MODEL,
    NO_CRITIC,
    ONE_CAP,
    REF,
    ROLLOUT,
    has_critic,
)
from corral.migrate.verl.kl import has_reference

NO_REFERENCE = "there is no KL, so no reference model"
TRAINER = "Corral's own trainer; `train` says how it uses memory and devices"
ENGINE = "Corral's own engine, with a whole model on every device; the plan says whether it fits"
SPEED = "speed and memory"
OWN_LOOP = "an agent loop of your own is an environment in Corral: `environment.name: file.py:Class`"
OWN_REWARD = "a reward is a function of a response: `custom_reward_function`"
TEXT_ONLY = "Corral trains on text only"
NO_PROFILER = "Corral has no profiler; times of all phases are in metrics.jsonl"
OF_THE_MODEL = "the model's own configuration is taken as it is"


OWN_KEYS = {
    "gdpo": ("gdpo_reward_keys", "gdpo_reward_weights"),
    "codapo": ("codapo_top_k", "codapo_weight_offset", "codapo_accuracy_key"),
}
"""Of estimators that Corral lacks."""


def area(key: str, note: str) -> Iterator[KeyRow]:
    """A key and all that is below it."""
    yield needless(key, note)
    yield needless(f"{key}.**", note)


def never(key: str, why: str) -> KeyRow:
    """Unsupported, whatever its value."""
    return KeyRow(key, anything, lambda *_: unsupported(why))


def of_estimator(name: str, key: str) -> KeyRow:
    row = never(f"algorithm.{key}", "see `algorithm.adv_estimator`")
    return provided(row, lambda config: config["algorithm.adv_estimator"] == name, f"the estimator is not {name}")


def switched(place: str, switch: str, why: str, off: object = None) -> Iterator[KeyRow]:
    """A part of verl's that Corral lacks, with the key that turns it on."""
    key = f"{place}.{switch}"

    def is_on(config: ForeignConfig) -> bool:
        return bool(config[key]) and config[key] != off

    def convert(config: ForeignConfig, _: ForeignValue) -> Outcome:
        return unsupported(why) if is_on(config) else built_in("off, as in Corral")

    yield turned(key, anything, convert)
    yield needless(place, "off, as in Corral")
    yield provided(never(f"{place}.**", f"see `{key}`"), is_on, f"`{key}` is off")


def lora_rows(model: str) -> Iterator[KeyRow]:
    why = "Corral trains all weights, without adapters"
    ranks = (f"{model}.lora_rank", f"{model}.lora.rank")

    def has_adapters(config: ForeignConfig) -> bool:
        return any(config[key] for key in ranks)

    for key in ranks:
        yield lacking(key, why)
    for key in ("lora_alpha", "target_modules", "target_modules.**", "exclude_modules", "lora_adapter_path", "lora.**"):
        yield provided(never(f"{model}.{key}", why), has_adapters, "the rank of adapters is 0")


def model_rows(model: str) -> Iterator[KeyRow]:
    """What actor and critic have in common."""
    yield from lora_rows(model)
    yield from switched(f"{model}.mtp", "enable", "Corral has no multi-token prediction")
    yield lacking(f"{model}.external_lib", "no module is imported for a model; see `model.trust_remote_code`")
    yield lacking(f"{model}.hf_config_path", OF_THE_MODEL)
    yield needless(f"{model}.override_config", "nothing is written below it")
    yield needless(f"{model}.override_config.attn_implementation", SPEED)
    yield lacking(f"{model}.override_config.**", OF_THE_MODEL)
    yield needless(f"{model}.use_remove_padding", "sequences are always packed without padding")
    for key in ("use_shm", "use_liger", "use_fused_kernels", "enable_activation_offload", "use_efficient_resharding"):
        yield needless(f"{model}.{key}", SPEED)
    for key in ("fused_kernel_options", "tiled_mlp"):
        yield from area(f"{model}.{key}", SPEED)


def profiler_rows(role: str) -> Iterator[KeyRow]:
    """Today's, and those of verl 0.4."""
    note = "times of all phases are logged; see `global_profiler`"
    yield from area(f"{role}.profiler", note)
    for key in ("profile_ranks", "profile_ranks_all", "profile_discrete"):
        yield needless(f"{role}.{key}", note)


def engine_rows(role: str) -> Iterator[KeyRow]:
    """Of whatever trains an actor or a critic over there."""
    for key in ("strategy", "use_torch_compile", "use_remove_padding", "pad_to_length", "nccl_timeout", "load_weight"):
        yield needless(f"{role}.{key}", TRAINER)
    for key in ("shuffle", "data_loader_seed"):
        yield needless(f"{role}.{key}", "the order within a batch follows from `seed`")
    yield from area(f"{role}.checkpoint", "a checkpoint holds all that a resumed run needs, and loads in transformers")
    yield from profiler_rows(role)
    yield needless(f"{role}.rollout_n", "as `rollout.n`")
    yield needless(f"{role}.use_fused_kernels", SPEED)
    for key in ("ppo_infer_micro_batch_size_per_gpu", "ppo_infer_max_token_len_per_gpu"):
        yield needless(f"{role}.{key}", ONE_CAP)
    yield from switched(f"{role}.qat", "enable", "Corral does not train quantised models")


ALL = (
    *(needless(".".join(["*"] * depth + ["_target_"]), "a class of verl's") for depth in range(1, 9)),
    *area("hydra", "Hydra's own"),
    needless("model_engine", TRAINER),
    # --- data
    lacking("data.tokenizer", "the tokenizer is the model's"),
    needless("data.val_batch_size", "all rows are validated on, as many at a time as fit"),
    needless("data.validation_shuffle", "all rows are validated on"),
    *(
        needless(f"data.{key}", "Corral reads rows by itself")
        for key in (
            "use_shm",
            "return_raw_input_ids",
            "return_raw_chat",
            "return_full_prompt",
            "need_tools_kwargs",
            "dataloader_num_workers",
            "filter_overlong_prompts_workers",
            "trust_remote_code",
            "cache_dir",
        )
    ),
    *(
        only(f"data.{kind}_key", text, (f"{kind}s",), "rows of text have no such column", TEXT_ONLY)
        for kind in ("image", "video", "audio")
    ),
    *(idle(f"data.{key}", "for pictures only") for key in ("image_patch_size", "return_multi_modal_inputs")),
    needless("data.mm_processor_kwargs", "nothing is written below it"),
    lacking("data.mm_processor_kwargs.**", TEXT_ONLY),
    *switched("data.custom_cls", "path", "rows of your own come from a function: `data.train.path: file.py:function`"),
    *switched("data.sampler", "class_path", "rows are drawn in a fixed or shuffled order"),
    *switched("data.datagen", "path", "rows of your own come from a function: `data.train.path: file.py:function`"),
    needless("data.apply_chat_template_kwargs", "nothing is written below it"),
    never(
        "data.apply_chat_template_kwargs.**",
        "the chat template gets no arguments; write them into `model.chat_template`",
    ),
    # --- actor
    only("actor_rollout_ref.hybrid_engine", boolean, (True,), "as in Corral", "verl has no other either"),
    needless("actor_rollout_ref.nccl_timeout", "`cluster.call_timeout_s`"),
    *model_rows(MODEL),
    *engine_rows(ACTOR),
    *(
        needless(f"{ACTOR}.{key}", SPEED)
        for key in (
            "calculate_entropy",
            "entropy_from_logits_with_chunking",
            "entropy_from_logits_chunk_size",
            "entropy_checkpointing",
            "sum_pi_squared_checkpointing",
            "use_prefix_grouper",
        )
    ),
    idle(f"{ACTOR}.calculate_sum_pi_squared", "for advantages that Corral lacks"),
    idle(f"{ACTOR}.freeze_vision_tower", "for pictures only"),
    *switched(f"{ACTOR}.router_replay", "mode", "a mixture's routes are not replayed", off="disabled"),
    needless(f"{ACTOR}.use_rollout_log_probs", "old log-probs are the engine's, unless a correction needs others"),
    *(
        lacking(f"{ACTOR}.megatron.override_transformer_config.{key}", "Corral has no losses that balance experts")
        for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
    ),
    *(needless(f"{ACTOR}.{engine}.**", TRAINER) for engine in ENGINES),
    # --- reference
    *(
        provided(row, has_reference, NO_REFERENCE)
        for row in (
            *(
                needless(f"{REF}.log_prob_{key}", ONE_CAP)
                for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
            ),
            *(needless(f"{REF}.{engine}.param_offload", "as `train.offload` says for all") for engine in ENGINES),
        )
    ),
    needless(f"{REF}.model", "the model as it was before training"),
    idle(f"{REF}.optim.**", "a reference is not trained"),
    needless(f"{REF}.ulysses_sequence_parallel_size", "spread as the actor"),
    *engine_rows(REF),
    *switched(f"{REF}.router_replay", "mode", "a mixture's routes are not replayed", off="disabled"),
    *(
        needless(f"{REF}.{key}", SPEED)
        for key in ("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size", "entropy_checkpointing")
    ),
    *(needless(f"{REF}.{engine}.**", TRAINER) for engine in ENGINES),
    # --- critic
    *(
        provided(row, has_critic, NO_CRITIC)
        for row in (
            *model_rows("critic.model"),
            needless("critic.model.enable_gradient_checkpointing", "as `train.recompute` says for actor and critic"),
            needless("critic.model.trust_remote_code", "as for the actor's model"),
            needless("critic.model.tokenizer_path", "the tokenizer is the model's"),
            needless("critic.model.custom_chat_template", "the tokenizer is the model's"),
            *engine_rows("critic"),
            needless("critic.ulysses_sequence_parallel_size", "spread as the actor"),
            needless("critic.loss_agg_mode", "a mean over all tokens of an update"),
            needless("critic.loss_scale_factor", "a mean over all tokens of an update"),
            *(needless(f"critic.{engine}.**", TRAINER) for engine in ("fsdp", *ENGINES[1:])),
        )
    ),
    # --- rollout
    *(
        needless(f"{ROLLOUT}.log_prob_{key}", ONE_CAP)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
    *(
        needless(f"{ROLLOUT}.{key}", ENGINE)
        for key in (
            "name",
            "mode",
            "dtype",
            "gpu_memory_utilization",
            "standalone_gpu_memory_utilization",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "free_cache_engine",
            "tensor_model_parallel_size",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "max_num_batched_tokens",
            "max_model_len",
            "max_num_seqs",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "scheduling_policy",
            "load_format",
            "layered_summon",
            "disable_log_stats",
            "multi_stage_wake_up",
            "update_weights_bucket_megabytes",
            "skip_tokenizer_init",
            "cast_to_rollout_dtype",
            "ray_actor_max_concurrency",
            "router_config_path",
            "limit_images",
            "swap_space",
        )
    ),
    *(
        row
        for key in ("engine_kwargs", "checkpoint_engine", "layer_name_map", "disaggregation", "prometheus", "router")
        for row in area(f"{ROLLOUT}.{key}", ENGINE)
    ),
    *profiler_rows(ROLLOUT),
    *area(f"{ROLLOUT}.trace", "every trajectory is written to the run's folder"),
    *area(f"{ROLLOUT}.mtp", "as `model.mtp`"),
    *area(f"{ROLLOUT}.qat", "as `actor.qat`"),
    needless(f"{ROLLOUT}.calculate_log_probs", "the engine always gives log-probs"),
    needless(f"{ROLLOUT}.logprobs_mode", "log-probs are those that samples were drawn with"),
    needless(f"{ROLLOUT}.seed", "samples follow from `seed`"),
    needless(f"{ROLLOUT}.full_determinism", "samples follow from `seed`; see `model.exact`"),
    needless(f"{ROLLOUT}.moe_load_balance_metrics_interval", "only for metrics"),
    *(
        idle(f"{ROLLOUT}.{key}", "only verl's former engine `hf` reads it")
        for key in ("do_sample", "micro_batch_size", "micro_batch_size_per_gpu")
    ),
    idle(f"{ROLLOUT}.nnodes", "for `trainer.v1.trainer_mode=separate_async`"),
    idle(f"{ROLLOUT}.n_gpus_per_node", "for `trainer.v1.trainer_mode=separate_async`"),
    only(f"{ROLLOUT}.repetition_penalty", number, (1,), "none", "Corral has no repetition penalty"),
    lacking(f"{ROLLOUT}.ignore_eos", "a turn ends at the model's end-of-turn token"),
    lacking(f"{ROLLOUT}.use_fire_sampling", "the first token is drawn like the others"),
    lacking(f"{ROLLOUT}.over_sample_rate", "no trajectory is dropped for being slow"),
    lacking(f"{ROLLOUT}.quantization", "the engine computes with the trainer's weights"),
    lacking(f"{ROLLOUT}.quantization.**", "the engine computes with the trainer's weights"),
    lacking(f"{ROLLOUT}.quantization_config_file", "the engine computes with the trainer's weights"),
    lacking(f"{ROLLOUT}.enable_rollout_routing_replay", "a mixture's routes are not replayed"),
    lacking(f"{ROLLOUT}.skip_rollout", "what was played before is not played back"),
    idle(f"{ROLLOUT}.skip_dump_dir", "for `skip_rollout`"),
    *switched(f"{ROLLOUT}.skip", "enable", "what was played before is not played back"),
    lacking(f"{ROLLOUT}.chat_scheduler", "an agent of your own is `environment.name: agent` in Corral"),
    needless(f"{ROLLOUT}.agent.num_workers", "all trajectories of a step are played at once"),
    lacking(f"{ROLLOUT}.agent.agent_loop_config_path", OWN_LOOP),
    lacking(f"{ROLLOUT}.agent.agent_loop_manager_class", OWN_LOOP),
    *switched(f"{ROLLOUT}.agent.custom_async_server", "path", "Corral has an engine of its own"),
    *area(f"{ROLLOUT}.custom", "only code of your own reads it"),
    # --- rewards
    needless("reward_model.launch_reward_fn_async", "rewards are computed while others are still playing"),
    needless("reward_model.use_reward_loop", "rewards are computed while others are still playing"),
    lacking("reward_model.reward_loop_module_path", OWN_REWARD),
    lacking("reward.reward_kwargs.**", "of verl's reward managers"),
    lacking("reward_model.reward_kwargs.**", "of verl's reward managers"),
    *(
        row
        for place in ("sandbox_fusion", "reward.sandbox_fusion", "reward_model.sandbox_fusion")
        for row in switched(place, "url", "Corral runs no code of the model's; a reward function may ask a server")
    ),
    *switched("reward_model", "enable", "Corral has no reward model; a reward function may ask a server"),
    *switched("reward.reward_model", "enable", "Corral has no reward model; a reward function may ask a server"),
    *switched("reward.reward_manager.module", "path", OWN_REWARD),
    *switched("reward_manager.module", "path", OWN_REWARD),
    needless("reward.reward_manager.source", "see `reward_manager.name`"),
    needless("reward_manager.source", "see `reward_manager.name`"),
    # --- what else there is
    lacking("trainer.v1.sampler.custom_sampler.path", "rows are drawn in a fixed or shuffled order"),
    needless("trainer.v1.**", "of asynchronous training, or of sampling from what was played"),
    lacking("trainer.profile_steps", NO_PROFILER),
    *(
        row
        for key in ("trainer.npu_profile", "trainer.controller_nsight_options", "trainer.worker_nsight_options")
        for row in area(key, "of profilers, which Corral lacks")
    ),
    *area("actor_rollout_ref.profiler", "times of all phases are logged; see `global_profiler`"),
    *area("algorithm.pf_ppo", "off, as in Corral"),
    *(of_estimator(name, key) for name, keys in OWN_KEYS.items() for key in keys),
    *switched("distillation", "enabled", "Corral does not train on a teacher's probabilities"),
    *area("transfer_queue", "trajectories go from engine to trainer by themselves"),
    *area("ray_kwargs", "Corral finds or starts Ray by itself: `cluster.address`"),
    *switched("global_profiler", "tool", NO_PROFILER),
    *(
        row
        for kind in ("rollout", "rollout_tq", "async_rollout")
        for row in switched(f"skip.{kind}", "enable", "what was played before is not played back")
    ),
)
"""Behind rows that say more of a key."""
