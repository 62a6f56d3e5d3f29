"""RLinf's sizes: prompts, samples, updates, micro-batches, and how samples are drawn."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    format_value,
    integer,
    integers,
    mapped,
    no_effect,
    number,
    texts,
    unsupported,
)
from corral.migrate.rlinf.facts import all_of, said, usual, usual_same
from corral.migrate.table import Convert, ForeignConfig, idle, needless, only, same, turned

ALL_TOKENS = 1_000_000
"""`top_k` of RLinf's examples: more than any vocabulary."""
SAMPLING = "algorithm.sampling_params"


def prompt_tokens(config: ForeignConfig) -> int:
    tokens: int = said(config, "data.max_prompt_length")
    return tokens


def response_tokens(config: ForeignConfig) -> int:
    """Of everything behind the prompt."""
    left: int = max(said(config, "runner.seq_length") - prompt_tokens(config), 1)
    most = config["algorithm.sampling_params.max_new_tokens"]
    return left if most is None else min(left, most)


def sequence_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    length, prompt, tokens = said(config, "runner.seq_length"), prompt_tokens(config), response_tokens(config)
    if length <= prompt:
        raise ValueError(f"should be above `data.max_prompt_length`, which is {prompt}")
    return converted({"rollout.max_response_tokens": tokens}, f"{length} less {prompt} of the prompt: {tokens} at most")


def new_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("as many as runner.seq_length leaves")
    tokens = response_tokens(config)
    if tokens == given.value:
        return mapped("rollout.max_response_tokens", tokens)
    ours = {"rollout.max_response_tokens": tokens}
    return converted(ours, f"{given.value}, of which runner.seq_length leaves {tokens}")


def minibatches(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompts, samples = said(config, "data.rollout_batch_size"), said(config, "algorithm.group_size")
    updates = said(config, "algorithm.n_minibatches")
    if updates < 1:
        raise ValueError("should be at least 1")
    each = f"{prompts * samples // updates:,}"
    note = f"{prompts} x {samples} = {prompts * samples:,} trajectories a step, in {updates} updates of {each}"
    return mapped("batch.updates_per_step", updates, note)


def micro_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["runner.enable_dynamic_batch_size"]:
        return no_effect("enable_dynamic_batch_size: max_tokens_per_mbs counts")
    length, sequences = said(config, "runner.seq_length"), said(config, "algorithm.training_batch_size_per_gpu")
    return micro_batch_tokens(config, sequences * length, f"{sequences} x runner.seq_length {length}")


def micro_batch_budget(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not config["runner.enable_dynamic_batch_size"]:
        return no_effect("only with enable_dynamic_batch_size")
    budget = said(config, "runner.max_tokens_per_mbs")
    return micro_batch_tokens(config, budget, f"{budget} tokens")


def micro_batch_tokens(config: ForeignConfig, tokens: int, words: str) -> Outcome:
    trajectory = prompt_tokens(config) + response_tokens(config)
    if tokens < trajectory:
        words += f", and {trajectory} for one whole trajectory"
    most = max(tokens, trajectory)
    return converted({"batch.max_tokens_per_micro_batch": most}, f"{words}: {most} tokens at most")


def generation_batches(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 1:
        return built_in("one batch of prompts a step")
    ours = {"algorithm.dynamic_sampling.enabled": True, "algorithm.dynamic_sampling.max_rounds": given.value - 1}
    return converted(ours, f"{given.value} batches of prompts for a step at most: {given.value - 1} to refill it")


def top_k(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0 or given.value >= ALL_TOKENS:
        return converted({"rollout.top_k": 0}, f"{format_value(given.value)}: all tokens, 0 here")
    return mapped("rollout.top_k", given.value)


def not_greedy(greedy: bool) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value is greedy:
            return unsupported("samples of a prompt would all be the same; to train they are drawn")
        return built_in("samples are drawn")

    return convert


ROWS = (
    usual("runner.seq_length", integer, sequence_length),
    turned("runner.enable_dynamic_batch_size", boolean, lambda *_: built_in("micro-batches are filled by tokens")),
    usual("runner.max_tokens_per_mbs", integer, micro_batch_budget),
    usual_same("algorithm.group_size", "batch.samples_per_prompt", integer),
    usual("algorithm.n_minibatches", integer, minibatches),
    usual("algorithm.training_batch_size_per_gpu", integer, micro_batch),
    idle("algorithm.rollout_batch_size_per_gpu", "nothing reads it"),
    idle("algorithm.val_rollout_batch_size_per_gpu", "nothing reads it"),
    needless("algorithm.logprob_forward_micro_batch_size", "scoring has batch.max_tokens_per_micro_batch too"),
    needless("algorithm.shuffle_rollout", "prompts are drawn in random order already"),
    turned("algorithm.max_num_gen_batches", integer, generation_batches),
    turned(f"{SAMPLING}.do_sample", boolean, not_greedy(False)),
    turned(f"{SAMPLING}.use_greedy", boolean, not_greedy(True)),
    same(f"{SAMPLING}.temperature", "rollout.temperature", number),
    turned(f"{SAMPLING}.top_k", integer, top_k),
    same(f"{SAMPLING}.top_p", "rollout.top_p", number),
    only(f"{SAMPLING}.repetition_penalty", number, (1,), "none", "repetitions cannot be made less likely"),
    turned(f"{SAMPLING}.max_new_tokens", integer, new_tokens),
    only(f"{SAMPLING}.min_new_tokens", integer, (0, 1), "one token at least", "answers cannot be made longer"),
    same(f"{SAMPLING}.stop", "rollout.stop", texts),
    same(f"{SAMPLING}.stop_token_ids", "rollout.stop_token_ids", integers),
    *all_of(idle, SAMPLING, "temperature_train temperature_eval", "reasoning tasks do not read it"),
)
