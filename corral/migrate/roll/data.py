"""ROLL's keys for questions with answers that can be checked (RLVR): data, rewards, validation."""

from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    texts,
    unsupported,
)
from corral.migrate.roll.facts import empty, group_size, instead, is_rlvr, validates
from corral.migrate.table import ForeignConfig, idle, lacking, needless, only, turned

DATA = "actor_train.data_args"
REWARDS = {"MathRuleRewardWorker": "math"}
"""ROLL's workers, and our functions."""
FILTERED = "`algorithm.dynamic_sampling` leaves out groups whose rewards are all equal, and nothing else"


# --- data


def files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_rlvr(config):
        return no_effect("games are played on boards")
    paths = given.value or []
    ours: dict[str, Any] = {
        "data.train.path": paths[0] if len(paths) == 1 else paths,
        "data.answer_key": "ground_truth",
    }
    return converted(ours, "ROLL's rows have their answers in the column `ground_truth`")


def validation_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_rlvr(config):
        return no_effect("games are played on boards")
    if not validates(config):
        return built_in("`eval_steps` is 0: there is no validation")
    paths = given.value
    return mapped("data.validation.path", paths[0] if len(paths) == 1 else paths)


def prompt_column(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_rlvr(config):
        return no_effect("games are played on boards")
    return mapped("data.prompt_key", given.value)


def messages(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return unsupported(
        "ROLL's column of messages is text in JSON, which Corral would take for the question; it reads the column "
        "`prompt` (`data.prompt_key`), where ROLL's data have the plain question"
    )


def mixture(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if len(config.below(f"{DATA}.domain_interleave_probs")) == 1:
        return built_in("one domain, all of the data")
    return unsupported("rows are drawn as the files have them; mix them there")


# --- rewards


def domains(config: ForeignConfig) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in config.below("rewards")))


def reward_of(config: ForeignConfig, domain: str) -> str | None:
    return REWARDS.get((config[f"rewards.{domain}.worker_cls"] or "").rpartition(".")[2])


def main_domain(config: ForeignConfig) -> str:
    """Whose reward all rows have: the first that Corral has one for."""
    found = domains(config)
    return next((domain for domain in found if reward_of(config, domain)), found[0])


def reward_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    domain = given.key.split(".")[1]
    if not is_rlvr(config):
        return unsupported("games have rewards of their own")
    name, main = reward_of(config, domain), main_domain(config)
    if domain != main:
        return unsupported(f"one reward for all rows: that of {main}; `by_source` chooses by `data_source`")
    if name is None:
        why = f"Corral has {', '.join(REWARDS.values())} of ROLL's; write it as a function and name it here"
        return instead({"environment.reward.name": f"my_rewards:{domain}"}, why)
    return converted({"environment.reward.name": name}, "without what ROLL takes off for repetition")


def query_filter(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, "no_filter"):
        return built_in("none, as in Corral")
    if not is_rlvr(config) or group_size(config) == 1:
        return no_effect("there are no answers to compare")
    if given.value == "std_filter":
        return mapped("algorithm.dynamic_sampling.enabled", True, "groups whose rewards are all equal are left out")
    return unsupported(FILTERED)


def filter_bound(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in("`type` says what became of it")


RUNS_ELSEWHERE = "a reward is a function that runs beside the training"

ROWS = [
    turned(f"{DATA}.file_name", texts, files),
    turned(f"{DATA}.prompt", text, prompt_column),
    turned(f"{DATA}.messages", text, messages),
    turned(f"{DATA}.domain_interleave_probs.**", number, mixture),
    only(f"{DATA}.dataset_type", text, ("json", "parquet"), "by the file's name", "Corral reads jsonl and parquet"),
    idle(f"{DATA}.dataset_dir", "the names of files are whole"),
    idle(f"{DATA}.interleave_probs", "`domain_interleave_probs` goes before it"),
    idle(f"{DATA}.eval_file_name", "`validation.data_args.file_name` is what is validated on"),
    needless(f"{DATA}.template", "the tokenizer's own chat template, or `model.chat_template`"),
    needless(f"{DATA}.cache_path", "rows are read as they are needed"),
    needless(f"{DATA}.preprocessing_num_workers", "rows are read as they are needed"),
    *[needless(f"{DATA}.{name}", "rows have what their columns say") for name in ("tag", "id", "response")],
    lacking(f"{DATA}.**", "not something that Corral asks of data"),
    *[needless(f"{role}.data_args.**", "roles see the same text") for role in ("actor_infer", "reference", "critic")],
    needless("global_template", "the tokenizer's own chat template, or `model.chat_template`"),
    lacking("dataset_filter.**", "all rows are played; leave out others in the file"),
    turned("validation.data_args.file_name", texts, validation_files),
    idle("validation.eval_steps", "`eval_steps` at the top counts"),
    needless("validation.**", "validated is as trained"),
    idle("val_greedy", "nothing reads it"),
    only("val_n_sample", integer, (1,), "one, as in Corral", "`validation.samples_per_prompt` says how many"),
    turned("rewards.*.worker_cls", text, reward_class),
    turned("rewards.*.query_filter_config.type", text, query_filter),
    turned("rewards.*.query_filter_config.**", anything, filter_bound),
    only("rewards.*.response_filter_config.type", text, ("no_filter",), "none, as in Corral", FILTERED),
    turned("rewards.*.response_filter_config.**", anything, filter_bound),
    needless("rewards.*.tag_included", "one reward for all rows"),
    needless("rewards.*.world_size", "`environment.reward.workers` says how many"),
    needless("rewards.*.infer_batch_size", RUNS_ELSEWHERE),
    needless("rewards.*.use_local", RUNS_ELSEWHERE),
    *[
        needless(f"rewards.*.{name}.**", RUNS_ELSEWHERE)
        for name in ("model_args", "data_args", "strategy_args", "generating_args", "training_args")
    ],
    needless("rewards.*.device_mapping", RUNS_ELSEWHERE),
    needless("rewards.*.num_gpus_per_worker", RUNS_ELSEWHERE),
    needless("rewards.*.name", RUNS_ELSEWHERE),
    lacking("rewards.*.**", "not something that Corral's rewards have"),
    empty("rewards.*"),
    lacking("reward.**", "rewards of a model: call it from a function of yours (`environment.reward.name`)"),
    lacking("reward_model.**", "rewards of a model: call it from a function of yours (`environment.reward.name`)"),
    lacking("reward_system_config.**", "rewards are functions: `environment.reward.name`"),
    lacking("max_len_mask", "answers that are cut off count; `algorithm.overlong` lets them cost something"),
    idle("mask_type", "nothing reads it"),
    lacking("difficulty_mask", FILTERED),
    *[needless(f"difficulty_{side}_threshold", "`difficulty_mask` says what became of it") for side in ("low", "high")],
    lacking("error_max_len_clip", "long wrong answers count as others do"),
    needless("error_max_len_threshold", "`error_max_len_clip` says what became of it"),
    lacking("difficulty_loss_weight", "all samples weigh the same"),
    lacking("length_loss_weight", "all samples weigh the same"),
    lacking("postive_loss_coef", "there is no loss for good samples alone"),
    lacking("use_topr_neg_loss_coef", "there is no TOPR"),
    lacking("use_topr_loss", "there is no TOPR"),
    only("rl_loss_coef", number, (1,), "1, as in Corral", "the policy's loss counts 1"),
    needless("balance_length", "work is dealt by its size"),
    only("minibatch_data_iter_num", integer, (1,), "1, as in Corral", "`ppo_epochs` says how often data are passed"),
    lacking("is_use_additional_prompts", "`algorithm.dynamic_sampling` plays others instead of those it leaves out"),
    lacking("use_additional_prompts", "`algorithm.dynamic_sampling` plays others instead of those it leaves out"),
    needless("max_additional_running_prompts", "all of a step is played at once"),
    needless("is_num_return_sequences_expand", "samples of a prompt are played at the same time"),
    needless("generate_opt_level", "the engine takes what comes"),
    only(
        "user_defined_rollout_loop_cls", text,
        ("roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",),
        "ROLL's own", "what is played is an environment: `environment.name`",
    ),
    *[
        lacking(f"train_infer_{name}_mask", "tokens are left out by their ratio alone")
        for name in ("diff", "ratio_seq", "diff_seq")
    ],
    *[
        needless(f"train_infer_{name}_threshold_{side}", f"`train_infer_{name}_mask` says what became of it")
        for name in ("diff", "ratio_seq", "diff_seq")
        for side in ("low", "high")
    ],
    only("ratio_type", text, ("token",), "of tokens, as in Corral", "the ratio is that of tokens"),
    lacking("use_reward_scaling", "rewards are not scaled"),
    needless("use_reward_norm", "it belongs to `use_reward_scaling`"),
    lacking("add_len_reward", "length is not rewarded"),
    lacking("l2", "`optimiser.weight_decay` is there instead"),
]  # fmt: skip
