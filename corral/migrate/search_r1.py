"""Search-R1: an early verl, in which the model searches, with keys and defaults of its own."""

from corral.migrate.table import (
    Given,
    Outcome,
    Reading,
    Row,
    Table,
    built_in,
    converted,
    idle,
    lacking,
    mapped,
    needless,
    no_effect,
    number,
    same,
    text,
    truth,
    turned,
    unsupported,
    whole,
)
from corral.migrate.verl import ALIASES, ROWS, epochs, recompute
from corral.migrate.verl.algorithm import dual_clip
from corral.migrate.verl.batch import (
    ACTOR,
    MICRO_OF_ALL,
    MODEL,
    ROLLOUT,
    micro,
    positive,
    provided,
    searches,
)
from corral.migrate.verl.data import NOT_VALIDATED, REWARD_PLACES, reward_function, validates
from corral.migrate.verl.kl import kl_in_reward

NO_SEARCH = "`do_search` is false"
SCORES = ("structure_format_score", "final_format_score", "retrieval_score")


# --- the search


def do_search(reading: Reading, given: Given) -> Outcome:
    """The rows have the whole prompt in them already."""
    ours = {"environment.name": "search", "environment.options.prompt": None}
    if given.value:
        stop = ["</search>", "</answer>"]
        return converted({**ours, "rollout.stop": stop}, "a turn ends at its tag; prompts are in the rows already")
    words = "the first reply is scored; prompts are in the rows already"
    return converted({**ours, "environment.options.do_search": False}, words)


def retriever(reading: Reading, given: Given) -> Outcome:
    if not str(given.value).startswith(("http://", "https://")):
        raise ValueError("should begin with http://")
    return mapped("environment.options.retriever", given.value)


def is_reranked(reading: Reading) -> bool:
    return bool(reading["reranker.do_rerank"])


def masking(reading: Reading, given: Given) -> Outcome:
    if given.value or not searches(reading):
        return built_in("what was found is never trained on")
    return unsupported("what was found is never trained on")


def answer_only(reading: Reading, given: Given) -> Outcome:
    return unsupported("Search-R1 stops with an error, too") if given.value else built_in("off")


def reward(reading: Reading, given: Given) -> Outcome:
    """Which of Search-R1's two programs was started is told by the scores of the form."""
    function = reward_function(reading)
    if function is not None:
        return mapped("environment.reward.name", function)
    if given.where:
        return no_effect("`custom_reward_function.path` is null")
    if any(f"reward_model.{score}" in reading for score in SCORES):
        return converted({"environment.reward.name": "search_r1"}, "exact match, and the form of the answer")
    return converted({"environment.reward.name": "em"}, "exact match")


def score_of_form(score: str) -> Row:
    def convert(reading: Reading, given: Given) -> Outcome:
        if all(f"reward_model.{one}" not in reading for one in SCORES):
            return no_effect("exact match, without scores of the form")
        return mapped(f"environment.reward.options.{score}", 0 if given.value is None else given.value)

    return turned(f"reward_model.{score}", number, convert, 0)


# --- sizes


def start(reading: Reading, given: Given) -> Outcome:
    ours = {"data.max_prompt_tokens": given.value, "data.overlong": "truncate_left"}
    return converted(ours, f"the last {given.value} tokens of a prompt are kept")


def context(reading: Reading, given: Given) -> Outcome:
    if not searches(reading):
        ours = {"data.max_prompt_tokens": given.value, "data.overlong": "filter"}
        return converted(ours, f"prompts of more than {given.value} tokens are left out")
    words = f"{given.value} tokens for replies and what is found; Search-R1 forgets the beginning of a longer context"
    return converted({"rollout.max_response_tokens": given.value}, words)


def reply(reading: Reading, given: Given) -> Outcome:
    if not searches(reading):
        return mapped("rollout.max_response_tokens", given.value)
    most, of_all = positive(reading, "data.max_response_length"), positive(reading, "data.max_prompt_length")
    if most > of_all:
        return converted({"rollout.max_turn_tokens": of_all}, f"{most}, of which all replies together have {of_all}")
    return mapped("rollout.max_turn_tokens", most)


def group(reading: Reading, given: Given) -> Outcome:
    if not searches(reading):
        many = (given.value or 1) > 1
        return unsupported("without a search, samples are `rollout.n`") if many else no_effect(NO_SEARCH)
    return mapped("batch.samples_per_prompt", given.value)


def engine_samples(reading: Reading, given: Given) -> Outcome:
    if not searches(reading):
        return mapped("batch.samples_per_prompt", given.value)
    return built_in("`n_agent` decides") if given.value in (1, None) else unsupported("`n_agent` are the samples")


def temperature(reading: Reading, given: Given) -> Outcome:
    """What says that validation is greedy gets lost on its way to Search-R1's engine, so that it is not."""
    if not (searches(reading) and validates(reading)):
        return mapped("rollout.temperature", given.value)
    ours = dict.fromkeys(("rollout.temperature", "validation.temperature"), given.value)
    return converted(ours, f"{given.value:g}, in validation as well, as Search-R1 does")


def top_p(reading: Reading, given: Given) -> Outcome:
    if not (searches(reading) and validates(reading)):
        return mapped("rollout.top_p", given.value)
    ours = dict.fromkeys(("rollout.top_p", "validation.top_p"), given.value)
    return converted(ours, f"{given.value:g}, in validation as well, as Search-R1 does")


# --- the run


def steps(reading: Reading, given: Given) -> Outcome:
    if given.value is None:
        return built_in("`total_epochs` decides")
    return mapped("schedule.steps", given.value, f"Search-R1 stops one step earlier, after {given.value - 1}")


def validation_every(reading: Reading, given: Given) -> Outcome:
    return mapped("validation.every", max(0, given.value or 0))


# --- rows

OWN = (
    turned("do_search", truth, do_search, True),
    provided(same("max_turns", "rollout.max_turns", whole, 10), searches, NO_SEARCH),
    provided(turned("retriever.url", text, retriever, "http://127.0.0.1:8000/retrieve"), searches, NO_SEARCH),
    provided(same("retriever.topk", "environment.options.topk", whole), searches, NO_SEARCH),
    lacking("reranker.do_rerank", "the retriever reranks by itself: `corral retriever serve --reranker`"),
    *(
        provided(Row(f"reranker.{key}", kind, lambda *_: unsupported("see `do_rerank`")), is_reranked, "it is off")
        for key, kind in (("url", text), ("topk", whole))
    ),
    turned(f"{ACTOR}.state_masking", truth, masking),
    idle("algorithm.state_masking.**", "`actor.state_masking` finds what was found without markers"),
    turned("algorithm.no_think_rl", truth, answer_only),
    *(score_of_form(score) for score in SCORES),
    turned(f"{REWARD_PLACES[0]}.path", text, reward, None),
    turned(f"{REWARD_PLACES[1]}.path", text, reward),
    provided(turned("data.max_start_length", whole, start, 256), searches, NO_SEARCH),
    turned("data.max_prompt_length", whole, context, 512),
    turned("data.max_response_length", whole, reply, 512),
    provided(same("data.max_obs_length", "rollout.max_observation_tokens", whole, 512), searches, NO_SEARCH),
    turned(f"{ROLLOUT}.n_agent", whole, group, 1),
    turned(f"{ROLLOUT}.n", whole, engine_samples, 1),
    turned(f"{ROLLOUT}.temperature", number, temperature, 1.0),
    turned(f"{ROLLOUT}.top_p", number, top_p, 0.95),
    needless(f"{ROLLOUT}.prompt_length", "as `data.max_prompt_length`"),
    needless(f"{ROLLOUT}.response_length", "as `data.max_response_length`"),
    turned(MICRO_OF_ALL, whole, micro(MICRO_OF_ALL), 64),
    turned(f"{MODEL}.enable_gradient_checkpointing", truth, recompute, False),
    turned(f"{ACTOR}.clip_ratio_c", number, dual_clip),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", number, 0.001),
    turned("algorithm.use_kl_in_reward", truth, kl_in_reward, True),
    turned("trainer.total_training_steps", whole, steps),
    turned("trainer.total_epochs", number, epochs, 30),
    provided(turned("trainer.test_freq", whole, validation_every, -1), validates, NOT_VALIDATED),
    needless("data.val_batch_size", "all rows are validated on; Search-R1 leaves out those that fill no batch"),
)

REPLACED = {row.key for row in OWN}
TABLE = Table(
    "Search-R1",
    (*OWN, *(row for row in ROWS if row.key not in REPLACED)),
    {**ALIASES, "data.train_data_num": "data.train_max_samples", "data.val_data_num": "data.val_max_samples"},
)
