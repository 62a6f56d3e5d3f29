"""Search-R1: an early verl, in which the model searches, with keys and defaults of its own."""

import sys

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, no_effect, unsupported
from corral.migrate.table import ForeignConfig, load_table
from corral.migrate.verl import TABLE as VERL
from corral.migrate.verl import algorithm, data, run, sizes
from corral.migrate.verl.data import reward_function, validates
from corral.migrate.verl.sizes import positive, searches

SCORES = ("structure_format_score", "final_format_score", "retrieval_score")


# --- the search


def do_search(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The rows have the whole prompt in them already."""
    ours = {"environment.name": "search", "environment.options.prompt": None}
    if given.value:
        stop = ["</search>", "</answer>"]
        return converted({**ours, "rollout.stop": stop}, "a turn ends at its tag; prompts are in the rows already")
    note = "the first reply is scored; prompts are in the rows already"
    return converted({**ours, "environment.options.do_search": False}, note)


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not str(given.value).startswith(("http://", "https://")):
        raise ValueError("should begin with http://")
    return mapped("environment.options.retriever", given.value)


def reranks(config: ForeignConfig) -> bool:
    return bool(config["reranker.do_rerank"])


def state_masking(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value or not searches(config):
        return built_in("what was found is never trained on")
    return unsupported("what was found is never trained on")


def search_reward(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Scores of the form show which of Search-R1's two programs was started."""
    function = reward_function(config)
    if function is not None:
        return mapped("environment.reward.name", function)
    if given.where:
        return no_effect("`custom_reward_function.path` is null")
    if any(f"reward_model.{score}" in config for score in SCORES):
        return converted({"environment.reward.name": "search_r1"}, "exact match, and the form of the answer")
    return converted({"environment.reward.name": "em"}, "exact match")


def format_score(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if all(f"reward_model.{score}" not in config for score in SCORES):
        return no_effect("exact match, without scores of the form")
    score = given.key.rpartition(".")[2]
    return mapped(f"environment.reward.options.{score}", 0 if given.value is None else given.value)


# --- sizes


def start_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = {"data.max_prompt_tokens": given.value, "data.overlong": "truncate_left"}
    return converted(ours, f"the last {given.value} tokens of a prompt are kept")


def context_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        ours = {"data.max_prompt_tokens": given.value, "data.overlong": "filter"}
        return converted(ours, f"prompts of more than {given.value} tokens are left out")
    note = f"{given.value} tokens for replies and what is found; Search-R1 forgets the beginning of a longer context"
    return converted({"rollout.max_response_tokens": given.value}, note)


def reply_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        return mapped("rollout.max_response_tokens", given.value)
    most, of_all = positive(config, "data.max_response_length"), positive(config, "data.max_prompt_length")
    if most > of_all:
        return converted({"rollout.max_turn_tokens": of_all}, f"{most}, of which all replies together have {of_all}")
    return mapped("rollout.max_turn_tokens", most)


def group_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        many = (given.value or 1) > 1
        return unsupported("without a search, samples are `rollout.n`") if many else no_effect("`do_search` is false")
    return mapped("batch.samples_per_prompt", given.value)


def engine_samples(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        return mapped("batch.samples_per_prompt", given.value)
    return built_in("`n_agent` decides") if given.value in (1, None) else unsupported("`n_agent` are the samples")


def sampling(config: ForeignConfig, given: ForeignValue, name: str) -> Outcome:
    """What says that validation is greedy gets lost on its way to Search-R1's engine, so that it is not."""
    if not (searches(config) and validates(config)):
        return mapped(f"rollout.{name}", given.value)
    ours = {f"rollout.{name}": given.value, f"validation.{name}": given.value}
    return converted(ours, f"{given.value:g}, in validation as well, as Search-R1 does")


# --- the run


def steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("`total_epochs` decides")
    return mapped("schedule.steps", given.value, f"Search-R1 stops one step earlier, after {given.value - 1}")


def search_validation_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("validation.every", max(0, given.value or 0))


TABLE = load_table("search_r1", sys.modules[__name__], algorithm, data, run, sizes, base=VERL)
