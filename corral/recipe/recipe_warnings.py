"""Warnings: what a recipe may say, but is probably not meant."""

from collections.abc import Iterator

from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Recipe

Findings = Iterator[str]


def recipe_warnings(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    yield from truncated_sampling(recipe)
    yield from learning_rates(recipe)
    yield from update_sizes(recipe, algorithm)
    yield from steps_that_do_nothing(recipe, algorithm)
    yield from lone_samples(recipe, algorithm)
    yield from kl_without_gradient(algorithm)
    yield from greedy_repeats(recipe)
    yield from uncorrected_staleness(recipe, algorithm)
    yield from stalled_pipeline(recipe, algorithm)


def truncated_sampling(recipe: Recipe) -> Findings:
    rollout = recipe.rollout
    for key, truncates in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0), ("min_p", rollout.min_p > 0)):
        if truncates:
            yield (
                f"`rollout.{key}: {getattr(rollout, key)}` samples from a truncated distribution, but log-probs are of "
                "the whole one, so the samples are slightly off-policy"
            )


def learning_rates(recipe: Recipe) -> Findings:
    for optimizer, where in ((recipe.optimizer, "optimizer"), (recipe.critic.optimizer, "critic.optimizer")):
        if optimizer.learning_rate > 1e-3:
            yield f"`{where}.learning_rate: {optimizer.learning_rate:g}` is unusually high; 1e-6 to 1e-4 is common"


def update_sizes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    batch = recipe.batch
    number, noun = recipe.num_units, "pairs" if recipe.trains_on_pairs else "trajectories"
    if rest := number % batch.updates_per_step:
        yield (
            f"{number} {noun} do not divide into {batch.updates_per_step} updates: "
            f"the last {batch.updates_per_step - rest} have one less than the others"
        )
    loss = algorithm.loss.declaration
    if batch.updates_per_step * batch.ppo_epochs > 1 and not (loss.uses_old_policy or loss.trains_on_rows):
        name = algorithm.loss.name
        yield f"the loss {name} has nothing that keeps the later updates of a step near the policy that sampled"


def steps_that_do_nothing(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    steps, updates = recipe.schedule.steps, recipe.batch.updates_per_step * recipe.batch.ppo_epochs
    if steps is None:
        return
    if algorithm.needs_critic and recipe.critic.warmup_steps >= steps:
        warmup = recipe.critic.warmup_steps
        yield f"`critic.warmup_steps: {warmup}` covers all {steps} steps: only the critic is trained"
    if recipe.optimizer.warmup_steps >= steps * updates:
        yield f"`optimizer.warmup_steps: {recipe.optimizer.warmup_steps}` covers all {steps * updates} updates"
    for optimizer, where in ((recipe.optimizer, "optimizer"), (recipe.critic.optimizer, "critic.optimizer")):
        ratio = optimizer.warmup_ratio
        if ratio and int(ratio * steps * updates) == 0:
            yield f"`{where}.warmup_ratio: {ratio:g}` of {steps * updates} updates is less than one: nothing warms up"
    if recipe.data.validation is not None and recipe.validation.every > steps:
        yield f"`validation.every: {recipe.validation.every}` is more than the {steps} steps of the run"
    if recipe.checkpoint.every > steps:
        yield f"`checkpoint.every: {recipe.checkpoint.every}` is more than the {steps} steps of the run"


def lone_samples(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if recipe.batch.samples_per_prompt > 1:
        return
    advantage = algorithm.advantage
    if advantage.declaration.needs.groups and algorithm.lone_sample == "zero":
        yield (
            f"`batch.samples_per_prompt: 1` with the advantage {advantage.name}, which compares the samples of a "
            "prompt: all advantages are zero, and nothing is learned from rewards; take more samples, or let the "
            "reward itself count with `algorithm.lone_sample: raw`"
        )
    if getattr(advantage.options, "task_weight", False):
        yield (
            "`batch.samples_per_prompt: 1` with `algorithm.advantage.task_weight`, which compares the samples of a "
            "prompt: rewards add nothing, and the teacher alone is learned from"
        )


def kl_without_gradient(algorithm: ResolvedAlgorithm) -> Findings:
    if algorithm.kl is not None and algorithm.kl.where == "loss" and algorithm.kl.estimator.name == "k1":
        yield "`algorithm.kl.estimator: k1` in the loss has a gradient that is zero on average; k3 or k1+ has not"


def greedy_repeats(recipe: Recipe) -> Findings:
    validation = recipe.validation
    if recipe.data.validation is not None and validation.temperature == 0 and validation.samples_per_prompt > 1:
        yield (
            f"`validation.samples_per_prompt: {validation.samples_per_prompt}` with `validation.temperature: 0` "
            "samples the same answer again and again"
        )


def uncorrected_staleness(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    staleness = recipe.schedule.max_staleness
    if staleness and algorithm.correction.name == "none":
        effect = "tokens that older weights sampled are trained on as if the newest had sampled them"
        if algorithm.old_logprobs == "engine" and algorithm.loss.declaration.uses_old_policy:
            effect = "that tokens were sampled by older weights is left to the loss's own ratio, which starts off 1"
        yield f"`schedule.max_staleness: {staleness}` with `algorithm.correction.name: none`: {effect}"


def stalled_pipeline(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    reasons = why_training_waits(recipe, algorithm)
    if recipe.schedule.pipelined and reasons:
        still = "only log-probs and values are computed while the rest is generated"
        if not needs_logprobs(algorithm):
            still = "this recipe computes no log-probs before training, so nothing is left to do meanwhile"
        yield f"`schedule.pipelined`: training waits for the whole step because of {' and '.join(reasons)}; {still}"


def why_training_waits(recipe: Recipe, algorithm: ResolvedAlgorithm) -> list[str]:
    """What keeps gradients from being summed prompt by prompt as samples are finished. Empty: nothing does."""
    batch, advantage = recipe.batch, algorithm.advantage
    reasons = {
        "dynamic sampling": algorithm.dynamic_sampling,
        f"`batch.ppo_epochs: {batch.ppo_epochs}`": batch.ppo_epochs > 1,
        f"`batch.updates_per_step: {batch.updates_per_step}`": batch.updates_per_step > 1,
        f"the advantage {advantage.name}, which needs the whole batch": advantage.declaration.needs.whole_batch,
        "the critic, which is trained with the whole step": algorithm.needs_critic,
        "`algorithm.whiten`, which needs the whole batch": algorithm.whiten,
        "`algorithm.llds_coefficient`, whose divisor depends on the whole batch": algorithm.llds_coefficient > 0,
    }
    return [reason for reason, applies in reasons.items() if applies]


def needs_logprobs(algorithm: ResolvedAlgorithm) -> bool:
    """Whether training needs log-probs or values that sampling does not leave behind."""
    return algorithm.needs_reference or algorithm.needs_critic or algorithm.old_logprobs == "recompute"
