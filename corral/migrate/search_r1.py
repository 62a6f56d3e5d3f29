"""Search-R1: an early verl, in which the model searches, with keys and defaults of its own."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.table import ForeignConfig, KeyRow, KeyTable, idle, lacking, needless, provided, same, turned
from corral.migrate.verl import ALIASES, ROWS, epochs, recompute
from corral.migrate.verl.algorithm import dual_clip
from corral.migrate.verl.batch import (
    ACTOR,
    MICRO_OF_ALL,
    MODEL,
    ROLLOUT,
    micro,
    positive,
    searches,
)
from corral.migrate.verl.data import NOT_VALIDATED, REWARD_PLACES, reward_function, validates
from corral.migrate.verl.kl import kl_in_reward

NO_SEARCH = "`do_search` is false"
SCORES = ("structure_format_score", "final_format_score", "retrieval_score")


# --- the search


def do_search(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The rows have the whole prompt in them already."""
    ours = {"environment.name": "search", "environment.options.prompt": None}
    if given.value:
        stop = ["</search>", "</answer>"]
        return converted({**ours, "rollout.stop": stop}, "a turn ends at its tag; prompts are in the rows already")
    words = "the first reply is scored; prompts are in the rows already"
    return converted({**ours, "environment.options.do_search": False}, words)


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not str(given.value).startswith(("http://", "https://")):
        raise ValueError("should begin with http://")
    return mapped("environment.options.retriever", given.value)


def is_reranked(config: ForeignConfig) -> bool:
    return bool(config["reranker.do_rerank"])


def masking(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value or not searches(config):
        return built_in("what was found is never trained on")
    return unsupported("what was found is never trained on")


def answer_only(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return unsupported("Search-R1 stops with an error, too") if given.value else built_in("off")


def reward(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Which of Search-R1's two programs was started is told by the scores of the form."""
    function = reward_function(config)
    if function is not None:
        return mapped("environment.reward.name", function)
    if given.where:
        return no_effect("`custom_reward_function.path` is null")
    if any(f"reward_model.{score}" in config for score in SCORES):
        return converted({"environment.reward.name": "search_r1"}, "exact match, and the form of the answer")
    return converted({"environment.reward.name": "em"}, "exact match")


def score_of_form(score: str) -> KeyRow:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if all(f"reward_model.{one}" not in config for one in SCORES):
            return no_effect("exact match, without scores of the form")
        return mapped(f"environment.reward.options.{score}", 0 if given.value is None else given.value)

    return turned(f"reward_model.{score}", number, convert, 0)


# --- sizes


def start(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = {"data.max_prompt_tokens": given.value, "data.overlong": "truncate_left"}
    return converted(ours, f"the last {given.value} tokens of a prompt are kept")


def context(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        ours = {"data.max_prompt_tokens": given.value, "data.overlong": "filter"}
        return converted(ours, f"prompts of more than {given.value} tokens are left out")
    words = f"{given.value} tokens for replies and what is found; Search-R1 forgets the beginning of a longer context"
    return converted({"rollout.max_response_tokens": given.value}, words)


def reply(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        return mapped("rollout.max_response_tokens", given.value)
    most, of_all = positive(config, "data.max_response_length"), positive(config, "data.max_prompt_length")
    if most > of_all:
        return converted({"rollout.max_turn_tokens": of_all}, f"{most}, of which all replies together have {of_all}")
    return mapped("rollout.max_turn_tokens", most)


def group(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        many = (given.value or 1) > 1
        return unsupported("without a search, samples are `rollout.n`") if many else no_effect(NO_SEARCH)
    return mapped("batch.samples_per_prompt", given.value)


def engine_samples(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        return mapped("batch.samples_per_prompt", given.value)
    return built_in("`n_agent` decides") if given.value in (1, None) else unsupported("`n_agent` are the samples")


def temperature(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """What says that validation is greedy gets lost on its way to Search-R1's engine, so that it is not."""
    if not (searches(config) and validates(config)):
        return mapped("rollout.temperature", given.value)
    ours = dict.fromkeys(("rollout.temperature", "validation.temperature"), given.value)
    return converted(ours, f"{given.value:g}, in validation as well, as Search-R1 does")


def top_p(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not (searches(config) and validates(config)):
        return mapped("rollout.top_p", given.value)
    ours = dict.fromkeys(("rollout.top_p", "validation.top_p"), given.value)
    return converted(ours, f"{given.value:g}, in validation as well, as Search-R1 does")


# --- the run


def steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("`total_epochs` decides")
    return mapped("schedule.steps", given.value, f"Search-R1 stops one step earlier, after {given.value - 1}")


def validation_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("validation.every", max(0, given.value or 0))


# --- rows

OWN = (
    turned("do_search", boolean, do_search, True),
    provided(same("max_turns", "rollout.max_turns", integer, 10), searches, NO_SEARCH),
    provided(turned("retriever.url", text, retriever, "http://127.0.0.1:8000/retrieve"), searches, NO_SEARCH),
    provided(same("retriever.topk", "environment.options.topk", integer), searches, NO_SEARCH),
    lacking("reranker.do_rerank", "the retriever reranks by itself: `corral retriever serve --reranker`"),
    *(
        provided(KeyRow(f"reranker.{key}", kind, lambda *_: unsupported("see `do_rerank`")), is_reranked, "it is off")
        for key, kind in (("url", text), ("topk", integer))
    ),
    turned(f"{ACTOR}.state_masking", boolean, masking),
    idle("algorithm.state_masking.**", "`actor.state_masking` finds what was found without markers"),
    turned("algorithm.no_think_rl", boolean, answer_only),
    *(score_of_form(score) for score in SCORES),
    turned(f"{REWARD_PLACES[0]}.path", text, reward, None),
    turned(f"{REWARD_PLACES[1]}.path", text, reward),
    provided(turned("data.max_start_length", integer, start, 256), searches, NO_SEARCH),
    turned("data.max_prompt_length", integer, context, 512),
    turned("data.max_response_length", integer, reply, 512),
    provided(same("data.max_obs_length", "rollout.max_observation_tokens", integer, 512), searches, NO_SEARCH),
    turned(f"{ROLLOUT}.n_agent", integer, group, 1),
    turned(f"{ROLLOUT}.n", integer, engine_samples, 1),
    turned(f"{ROLLOUT}.temperature", number, temperature, 1.0),
    turned(f"{ROLLOUT}.top_p", number, top_p, 0.95),
    needless(f"{ROLLOUT}.prompt_length", "as `data.max_prompt_length`"),
    needless(f"{ROLLOUT}.response_length", "as `data.max_response_length`"),
    turned(MICRO_OF_ALL, integer, micro(MICRO_OF_ALL), 64),
    turned(f"{MODEL}.enable_gradient_checkpointing", boolean, recompute, False),
    turned(f"{ACTOR}.clip_ratio_c", number, dual_clip),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", number, 0.001),
    turned("algorithm.use_kl_in_reward", boolean, kl_in_reward, True),
    turned("trainer.total_training_steps", integer, steps),
    turned("trainer.total_epochs", number, epochs, 30),
    provided(turned("trainer.test_freq", integer, validation_every, -1), validates, NOT_VALIDATED),
    needless("data.val_batch_size", "all rows are validated on; Search-R1 leaves out those that fill no batch"),
)

REPLACED = {row.key for row in OWN}
TABLE = KeyTable(
    "Search-R1",
    (*OWN, *(row for row in ROWS if row.key not in REPLACED)),
    {**ALIASES, "data.train_data_num": "data.train_max_samples", "data.val_data_num": "data.val_max_samples"},
)
