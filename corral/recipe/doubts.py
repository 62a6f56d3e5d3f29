"""What a recipe may say but should think twice about: warnings."""

from collections.abc import Iterator

from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Recipe

Findings = Iterator[str]


def doubts(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    yield from truncated_sampling(recipe)
    yield from learning_rates(recipe)
    yield from update_sizes(recipe, algorithm)
    yield from steps_that_do_nothing(recipe, algorithm)
    yield from kl_without_gradient(algorithm)
    yield from greedy_repeats(recipe)


def truncated_sampling(recipe: Recipe) -> Findings:
    rollout = recipe.rollout
    for key, truncates in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0), ("min_p", rollout.min_p > 0)):
        if truncates:
            yield (
                f"`rollout.{key}: {getattr(rollout, key)}` draws from a truncated distribution, but log-probs are of "
                "the whole one, so the samples are slightly off-policy"
            )


def learning_rates(recipe: Recipe) -> Findings:
    for optimiser, where in ((recipe.optimiser, "optimiser"), (recipe.critic.optimiser, "critic.optimiser")):
        if optimiser.learning_rate > 1e-3:
            yield f"`{where}.learning_rate: {optimiser.learning_rate:g}` is unusually high; 1e-6 to 1e-4 is common"


def update_sizes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    batch = recipe.batch
    trajectories = batch.prompts_per_step * batch.samples_per_prompt
    if rest := trajectories % batch.updates_per_step:
        yield (
            f"{trajectories} trajectories do not divide into {batch.updates_per_step} updates: "
            f"the last {batch.updates_per_step - rest} have one less than the others"
        )
    if batch.updates_per_step * batch.passes > 1 and algorithm.loss == "gpg":
        yield "the loss gpg has nothing that keeps the later updates of a step near the policy that played"


def steps_that_do_nothing(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    steps, updates = recipe.schedule.steps, recipe.batch.updates_per_step * recipe.batch.passes
    if steps is None:
        return
    if algorithm.needs_critic and recipe.critic.warmup_steps >= steps:
        yield f"`critic.warmup_steps: {recipe.critic.warmup_steps}` covers all {steps} steps: only the critic learns"
    if recipe.optimiser.warmup_steps >= steps * updates:
        yield f"`optimiser.warmup_steps: {recipe.optimiser.warmup_steps}` covers all {steps * updates} updates"
    if recipe.data.validation is not None and recipe.validation.every > steps:
        yield f"`validation.every: {recipe.validation.every}` is more than the {steps} steps of the run"
    if recipe.checkpoint.every > steps:
        yield f"`checkpoint.every: {recipe.checkpoint.every}` is more than the {steps} steps of the run"


def kl_without_gradient(algorithm: ResolvedAlgorithm) -> Findings:
    if algorithm.kl_where == "loss" and algorithm.kl_estimator == "k1":
        yield "`algorithm.kl.estimator: k1` in the loss has a gradient that is zero on average; k3 or k1+ has not"


def greedy_repeats(recipe: Recipe) -> Findings:
    validation = recipe.validation
    if recipe.data.validation is not None and validation.temperature == 0 and validation.samples_per_prompt > 1:
        yield (
            f"`validation.samples_per_prompt: {validation.samples_per_prompt}` with `validation.temperature: 0` plays "
            "the same answer again and again"
        )
