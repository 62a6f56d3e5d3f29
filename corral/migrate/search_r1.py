"""Search-R1: an early verl, in which the model searches, with keys and defaults of its own."""

import sys

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped
from corral.migrate.table import ForeignConfig, load_table
from corral.migrate.verl import TABLE as VERL
from corral.migrate.verl import algorithm, run
from corral.migrate.verl.run import positive, searches


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not str(given.value).startswith(("http://", "https://")):
        raise ValueError("should begin with http://")
    return mapped("environment.options.retriever", given.value)


def reply_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not searches(config):
        return mapped("rollout.max_response_tokens", given.value)
    most, of_all = positive(config, "data.max_response_length"), positive(config, "data.max_prompt_length")
    if most > of_all:
        return converted({"rollout.max_turn_tokens": of_all}, f"{most}, of which all replies together have {of_all}")
    return mapped("rollout.max_turn_tokens", most)


def steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("`total_epochs` decides")
    return mapped("schedule.steps", given.value, f"Search-R1 stops one step earlier, after {given.value - 1}")


TABLE = load_table("search_r1", sys.modules[__name__], algorithm, run, base=VERL)
