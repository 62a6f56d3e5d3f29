"""ROLL's keys for a step: how many are played, of which lengths, how tokens are drawn, and in how many updates."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    integer,
    integers,
    mapped,
    no_effect,
    number,
    texts,
    unsupported,
)
from corral.migrate.roll.facts import (
    DEFAULT_PROMPT,
    TRAINING,
    amount,
    count,
    data_parallel,
    group_size,
    is_rlvr,
    lengths,
    num_prompts,
    num_trajectories,
    num_updates,
    plural,
    share,
    taken,
    update_size,
    usual,
    validates,
)
from corral.migrate.table import ForeignConfig, idle, needless, only, same, turned

SAMPLING = "actor_infer.generating_args"


# --- how many


def batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    size, samples = taken(config, "rollout_batch_size"), group_size(config)
    ours = {"batch.prompts_per_step": num_prompts(config), "batch.samples_per_prompt": samples}
    if is_rlvr(config):
        return converted(ours, f"{size} prompts, {plural(samples, 'answer')} each: {size * samples} trajectories")
    if size % samples:
        raise ValueError(f"should be a multiple of `train_env_manager.group_size`, {samples}: groups are played whole")
    return converted(ours, f"{size} trajectories in groups of {samples}: {plural(size // samples, 'board')}")


def samples(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("batch.samples_per_prompt", group_size(config))


def answers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_rlvr(config):
        return no_effect("games are in groups of `train_env_manager.group_size`")
    return samples(config, given)


def updates(config: ForeignConfig, given: ForeignValue) -> Outcome:
    trajectories, size, made = num_trajectories(config), update_size(config), num_updates(config)
    each, times = (
        taken(config, f"{TRAINING}.{name}") for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    note = (
        f"{each} x {times} x {data_parallel(config)} = {size} trajectories per update, of {trajectories}: "
        f"{plural(made, 'update')} per step"
    )
    return converted({"batch.updates_per_step": made}, note)


def micro_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Besides the number of updates, how much is computed at once."""
    found = updates(config, given)
    tokens = sum(lengths(config))
    if is_dynamic(config):
        return found
    each = taken(config, f"{TRAINING}.per_device_train_batch_size")
    ours = {**found.ours, ("batch", "max_tokens_per_micro_batch"): each * tokens}
    return converted(ours, f"{found.note}; {each} x {tokens} tokens at once")


def is_dynamic(config: ForeignConfig) -> bool:
    asked = config["actor_train.use_dynamic_batching_in_train"]
    return bool(asked and config["actor_train.max_tokens_per_microbatch_in_train"])


def dynamic(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not is_dynamic(config):
        return built_in("micro-batches are packed by their tokens anyway")
    wanted, least = config["actor_train.max_tokens_per_microbatch_in_train"], sum(lengths(config))
    note = f"{wanted} tokens at once" + (f": at least one trajectory, {least}" if wanted < least else "")
    return converted({"batch.max_tokens_per_micro_batch": max(wanted, least)}, note)


# --- lengths


def sequence(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompt, response = lengths(config)
    total = taken(config, "sequence_length")
    if "response_length" in config and "sequence_length" not in config:
        return built_in("`prompt_length` and `response_length` say it")
    if total < 2 or (is_rlvr(config) and total <= prompt):
        raise ValueError(f"should be above the prompt's length, {max(prompt, 1)}")
    ours = {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": response}
    return converted(ours, f"{total} tokens: {prompt} for the prompt and {response} for what follows")


def prompt_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompt, response = lengths(config)
    ours: dict[str, object] = {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": response}
    if is_rlvr(config):
        ours["data.overlong"] = "filter"
        return converted(ours, f"{prompt} tokens; longer prompts are left out, as in ROLL")
    return converted(ours, f"{prompt} tokens for the opening, {response} for what follows")


def response_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if "sequence_length" in config:
        return no_effect("`sequence_length` goes before it")
    return mapped("rollout.max_response_tokens", lengths(config)[1])


def validation_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, sum(lengths(config)), lengths(config)[0]):
        return built_in("as in training")
    return unsupported("validation has the lengths of the training")


# --- how tokens are drawn


def temperature(config: ForeignConfig, given: ForeignValue) -> Outcome:
    value = taken(config, f"{SAMPLING}.temperature")
    if value == 0:
        raise ValueError("should be above 0: with 0 all samples of a prompt would be the same")
    if not plays_as_trained(config):
        return mapped("rollout.temperature", value)
    ours = {"rollout.temperature": value, "validation.temperature": value}
    return converted(ours, f"{value:g}; in validation too, as in ROLL")


def top_p(config: ForeignConfig, given: ForeignValue) -> Outcome:
    value = taken(config, f"{SAMPLING}.top_p")
    both = {"rollout.top_p": value, "validation.top_p": value}
    return converted(both, f"{value:g}") if plays_as_trained(config) else mapped("rollout.top_p", value)


def top_k(config: ForeignConfig, given: ForeignValue) -> Outcome:
    value = max(taken(config, f"{SAMPLING}.top_k"), 0)
    return mapped("rollout.top_k", value, "0: all tokens" if not value else "in training; validation has none")


def plays_as_trained(config: ForeignConfig) -> bool:
    """Validation of games draws tokens as the training does, unless the training's are not `actor_infer`'s."""
    return validates(config) and not is_rlvr(config) and not own_validation(config)


def own_validation(config: ForeignConfig) -> bool:
    of_actor = any(one.key.startswith(f"{SAMPLING}.") for one in config.given.values())
    return bool(config.below("val_env_manager.generating_args")) and not of_actor


def validation_sampling(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Of `validation` (questions) and of `val_env_manager` (games)."""
    section, _, name = given.key.rpartition(".")
    of_games = section.startswith("val_env_manager")
    if of_games and not own_validation(config):
        return no_effect("those of `actor_infer` go before them")
    if of_games == is_rlvr(config):
        return no_effect("it belongs to " + ("games" if of_games else "questions"))
    if not validates(config):
        return built_in("there is no validation")
    if name == "temperature":
        return mapped("validation.temperature", given.value)
    if name == "num_return_sequences":
        return mapped("validation.samples_per_prompt", given.value)
    if not config[f"{section}.temperature"]:
        return no_effect("without a temperature the most likely token is taken")
    return mapped("validation.top_p", given.value)


VALIDATION_SAMPLING = [
    row
    for section in ("validation.generating_args", "val_env_manager.generating_args")
    for row in (
        turned(f"{section}.temperature", amount, validation_sampling),
        turned(f"{section}.top_p", share, validation_sampling),
        needless(f"{section}.top_k", "validation draws from all tokens"),
        needless(f"{section}.max_new_tokens", "as in training"),
        only(f"{section}.num_beams", integer, (1,), "no beams, as in Corral", "Corral does not search with beams"),
    )
]

ROWS = [
    turned("rollout_batch_size", count, batch, 128),
    turned("train_env_manager.group_size", count, samples, 1),
    turned("num_return_sequences_in_group", count, answers, 1),
    turned(f"{TRAINING}.per_device_train_batch_size", count, micro_batch, 1),
    turned(f"{TRAINING}.gradient_accumulation_steps", count, updates, 16),
    turned("actor_train.use_dynamic_batching_in_train", boolean, dynamic),
    turned("actor_train.max_tokens_per_microbatch_in_train", integer, dynamic),
    usual("ppo_epochs", "batch.passes", count, 1),
    needless("batch_adjust_mode", "nothing is copied or left out to fill a batch"),
    turned("sequence_length", count, sequence, 4096),
    turned("prompt_length", count, prompt_length, DEFAULT_PROMPT),
    turned("response_length", count, response_length),
    turned("val_prompt_length", count, validation_length),
    turned("val_sequence_length", count, validation_length),
    turned(f"{SAMPLING}.temperature", amount, temperature, 0.99),
    turned(f"{SAMPLING}.top_p", share, top_p, 0.99),
    turned(f"{SAMPLING}.top_k", integer, top_k, 100),
    same(f"{SAMPLING}.min_p", "rollout.min_p", share),
    same(f"{SAMPLING}.stop_strings", "rollout.stop", texts),
    same(f"{SAMPLING}.stop_token_ids", "rollout.stop_token_ids", integers),
    needless(f"{SAMPLING}.include_stop_str_in_output", "what was generated stays, the string that ended it too"),
    idle(f"{SAMPLING}.num_return_sequences", "ROLL sets it: 1 for games, the size of a group for questions"),
    only(f"{SAMPLING}.num_beams", integer, (1,), "no beams, as in Corral", "Corral does not search with beams"),
    only(f"{SAMPLING}.do_sample", boolean, (True,), "tokens are drawn, as in Corral", "training needs drawn tokens"),
    only(
        f"{SAMPLING}.repetition_penalty",
        number,
        (1,),
        "none, as in Corral",
        "log-probs would be those of another policy",
    ),
    idle(f"{SAMPLING}.max_length", "`max_new_tokens` goes before it"),
    *VALIDATION_SAMPLING,
    turned("validation.generating_args.num_return_sequences", count, validation_sampling),
    idle("val_env_manager.generating_args.num_return_sequences", "ROLL sets it to 1"),
]
