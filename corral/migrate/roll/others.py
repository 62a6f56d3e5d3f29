"""What else a ROLL configuration may have: models, back ends, tools, and pipelines that Corral does not have."""

from corral.migrate.outcome import ForeignValue, Outcome, boolean, built_in, no_effect, text, unsupported
from corral.migrate.roll.facts import empty
from corral.migrate.table import ForeignConfig, idle, lacking, needless, only, turned

ROLES = ("actor_train", "actor_infer", "reference", "critic")
PARTS = ("strategy_args", "model_args", "data_args", "training_args", "generating_args", "system_envs")
SECTIONS = (
    *(f"{role}.{part}" for role in ROLES for part in PARTS),
    *ROLES, "rewards", "reward", "validation", "checkpoint_config", "tracker_kwargs", "system_envs",
    "reward_normalization", "train_env_manager", "val_env_manager", "train_infer_correction",
)  # fmt: skip
"""That a file may leave empty."""
OFF = "off, as in Corral"
COUNTED = "a loss is divided by the counts of its whole update"
DPO = "Corral learns from rewards; it has no DPO"
SFT = "Corral learns from rewards; it has no supervised fine-tuning"
DISTILLATION = "Corral learns from rewards; it has no distillation"


def lora(config: ForeignConfig, given: ForeignValue) -> Outcome:
    role = given.key.partition(".")[0]
    if config[f"{role}.model_args.lora_target"]:
        return unsupported("all parameters are trained")
    return no_effect("it belongs to `lora_target`")


def asked(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if "agentic" in (given.value or "agentic") or "rlvr" in given.value:
        return built_in("what the other keys say")
    return unsupported("Corral plays games and answers questions")


MODELS = [
    row
    for role in ROLES
    for row in (
        needless(f"{role}.model_args.attn_implementation", "attention of Corral's own"),
        needless(f"{role}.model_args.model_type", "by the model's own configuration"),
        needless(f"{role}.model_args.device_map", "devices are those of the role"),
        needless(f"{role}.model_args.num_labels", "a critic has one value for each token"),
        needless(f"{role}.model_args.gradient_checkpointing_use_reentrant", "only who trains computes backward"),
        lacking(f"{role}.model_args.vision_dp", "the model reads, and does not see"),
        lacking(f"{role}.model_args.lora_target", "all parameters are trained"),
        *[
            turned(f"{role}.model_args.{name}", lambda value: value, lora)
            for name in ("lora_rank", "lora_alpha", "lora_dropout", "additional_target", "autocast_adapter_dtype")
        ],
        lacking(f"{role}.model_args.adapter_name_or_path", "adapters are not loaded; merge it into the model"),
        lacking(f"{role}.model_args.freeze_module_prefix", "all parameters are trained"),
        lacking(f"{role}.model_args.moe_aux_loss_coef", "the loss of a mixture's router is not added"),
        lacking(f"{role}.model_args.model_config_kwargs.**", "a model is as its own configuration says"),
        needless(f"{role}.model_args.model_config_kwargs", "a model is as its own configuration says"),
        needless(f"{role}.name", "roles have their names"),
        *[
            needless(f"{role}.{name}", "micro-batches are packed by their tokens anyway")
            for name in (
                "sequence_length_round_in_train", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer",
                "sequence_length_round_in_infer", "use_sequence_packing", "sequence_packing_args.**",
                "use_remove_padding",
            )
        ],
        needless(f"{role}.logits_in_fp32", "log-probs are computed in float32"),
        needless(f"{role}.use_logits_chunking", "logits are computed in chunks: `train.logits_chunk`"),
        needless(f"{role}.logits_chunk_size", "logits are computed in chunks: `train.logits_chunk`"),
        needless(f"{role}.offload_nccl", "ROLL's own book-keeping"),
        only(f"{role}.apply_loss_scale", boolean, (True,), COUNTED, COUNTED),
        only(f"{role}.router_replay.mode", text, ("disable",), OFF, "a mixture's routes are not played again"),
        only(f"{role}.mtp_training_mode", text, ("disabled",), OFF, "one token is predicted at a time"),
    )
]  # fmt: skip

NOT_TRAINED = [
    row
    for role in ROLES[1:]
    for row in (
        needless(f"{role}.model_args.disable_gradient_checkpointing", "only who trains computes backward"),
        needless(f"{role}.model_args.ulysses_size", "spread as the actor is"),
        needless(f"{role}.worker_cls", "Corral's own workers"),
        needless(f"{role}.use_dynamic_batching_in_train", "it belongs to `actor_train`"),
        needless(f"{role}.max_tokens_per_microbatch_in_train", "it belongs to `actor_train`"),
    )
]

ROWS = [
    *MODELS,
    *NOT_TRAINED,
    lacking("actor_infer.generating_args.**", "log-probs would be those of another policy"),
    needless("val_env_manager.generating_args.**", "tokens are drawn as in training"),
    needless("actor_train.training_args.**", "Corral's own trainer"),
    *[idle(f"{role}.training_args.**", "nothing is trained there") for role in ("actor_infer", "reference")],
    *[idle(f"{role}.generating_args.**", "nothing is drawn there") for role in ("actor_train", "reference", "critic")],
    *[idle(f"{role}.pg_variant", "it belongs to `actor_train`") for role in ("actor_infer", "reference", "critic")],
    *[idle(f"{role}.tag_included", "it belongs to teachers") for role in ROLES],
    *[empty(section) for section in SECTIONS],
    idle("hydra.**", "Hydra's own"),
    idle("deepspeed_zero.**", "only what `strategy_config` takes of it counts"),
    idle("deepspeed_zero2.**", "only what `strategy_config` takes of it counts"),
    idle("deepspeed_zero3.**", "only what `strategy_config` takes of it counts"),
    idle("deepspeed_zero3_cpuoffload.**", "only what `strategy_config` takes of it counts"),
    idle("pg_variant", "a name to refer to: `actor_train.pg_variant` counts"),
    idle("model_name", "a name to refer to"),
    idle("track_name", "nothing reads it"),
    needless("save_hf_model", "checkpoints can be exported: `corral export`"),
    needless("save_logging_board_dir", "all of a run is in one folder"),
    needless("profiler_timeline", "`corral debug` shows what runs where"),
    needless("profiler_memory", "`corral plan` and the metrics tell of memory"),
    needless("profiler_output_dir", "all of a run is in one folder"),
    needless("length_profiler_dir", "all of a run is in one folder"),
    needless("report_length_and_rewards", "every trajectory is written to the run's folder"),
    lacking("rollout_mock.enable", "what was played is in the run's folder, and is not played back"),
    needless("rollout_mock.**", "it belongs to `rollout_mock.enable`"),
    only("exp_mode", text, ("train",), "training, as in Corral", "Corral trains"),
    turned("pipeline_cls", text, asked),
    *[
        lacking(key, DPO)
        for key in ("ipo", "beta", "label_smoothing", "chosen_key", "rejected_key", "train_batch_size")
    ],
    *[lacking(key, SFT) for key in ("sft_train.**", "prompt_key", "query_key", "response_key", "system_key")],
    *[
        lacking(key, DISTILLATION)
        for key in (
            "student.**", "teacher.**", "student_train.**", "student_infer.**", "student_pretrain", "teacher_pretrain",
            "logits_topk", "distill_loss_weight", "distill_on_prompt", "kd_temperature", "kd_objective",
            "teacher_temperature", "adaptive_kl_alpha", "skew_lambda", "logits_transfer_backend", "question_key",
            "answer_key", "is_pure_opd", "use_opd", "opd_kl_coef", "pure_opd_pipeline_type", "opd_token_kld_clip",
            "opsd_mode", "opsd_solution_key", "opsd_teacher_template", "opsd_max_solution_length",
        )
    ],
    lacking("vlm_filter.**", "the model reads, and does not see"),
]  # fmt: skip
