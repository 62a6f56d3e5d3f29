"""What a recipe may say but should think twice about: warnings."""

from collections.abc import Iterator

from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import AdvantageName, Recipe

Findings = Iterator[str]

OF_WHOLE_BATCH: frozenset[AdvantageName] = frozenset(
    {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg"}
)
"""Advantages with a number in them that is of the whole batch: whitening's mean and deviation, GPG's alpha."""


def recipe_warnings(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    yield from truncated_sampling(recipe)
    yield from learning_rates(recipe)
    yield from update_sizes(recipe, algorithm)
    yield from steps_that_do_nothing(recipe, algorithm)
    yield from kl_without_gradient(algorithm)
    yield from greedy_repeats(recipe)
    yield from uncorrected_staleness(recipe, algorithm)
    yield from stalled_pipeline(recipe, algorithm)


def truncated_sampling(recipe: Recipe) -> Findings:
    rollout = recipe.rollout
    for key, truncates in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0), ("min_p", rollout.min_p > 0)):
        if truncates:
            yield (
                f"`rollout.{key}: {getattr(rollout, key)}` draws from a truncated distribution, but log-probs are of "
                "the whole one, so the samples are slightly off-policy"
            )


def learning_rates(recipe: Recipe) -> Findings:
    for optimizer, where in ((recipe.optimizer, "optimizer"), (recipe.critic.optimizer, "critic.optimizer")):
        if optimizer.learning_rate > 1e-3:
            yield f"`{where}.learning_rate: {optimizer.learning_rate:g}` is unusually high; 1e-6 to 1e-4 is common"


def update_sizes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    batch = recipe.batch
    trajectories = batch.prompts_per_step * batch.samples_per_prompt
    if rest := trajectories % batch.updates_per_step:
        yield (
            f"{trajectories} trajectories do not divide into {batch.updates_per_step} updates: "
            f"the last {batch.updates_per_step - rest} have one less than the others"
        )
    if batch.updates_per_step * batch.ppo_epochs > 1 and algorithm.loss == "gpg":
        yield "the loss gpg has nothing that keeps the later updates of a step near the policy that played"


def steps_that_do_nothing(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    steps, updates = recipe.schedule.steps, recipe.batch.updates_per_step * recipe.batch.ppo_epochs
    if steps is None:
        return
    if algorithm.needs_critic and recipe.critic.warmup_steps >= steps:
        yield f"`critic.warmup_steps: {recipe.critic.warmup_steps}` covers all {steps} steps: only the critic learns"
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


def uncorrected_staleness(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    staleness = recipe.schedule.max_staleness
    if staleness and algorithm.correction_name == "none":
        effect = "tokens that older weights drew are learnt from as if the newest had drawn them"
        if algorithm.old_logprobs == "engine" and algorithm.loss != "gpg":
            effect = "that tokens were drawn by older weights is left to the loss's own ratio, which starts off 1"
        yield f"`schedule.max_staleness: {staleness}` with `algorithm.correction.name: none`: {effect}"


def stalled_pipeline(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    reasons = why_training_waits(recipe, algorithm)
    if recipe.schedule.pipelined and reasons:
        still = "only scoring goes on while the rest is played"
        if not is_scored(algorithm):
            still = "nothing is scored in this recipe, so nothing is left to do while the rest is played"
        yield f"`schedule.pipelined`: learning waits for the whole step because of {' and '.join(reasons)}; {still}"


def why_training_waits(recipe: Recipe, algorithm: ResolvedAlgorithm) -> list[str]:
    """What keeps gradients from being summed prompt by prompt as they are played. Empty: nothing does."""
    batch = recipe.batch
    reasons = {
        "dynamic sampling": algorithm.dynamic_sampling,
        f"`batch.ppo_epochs: {batch.ppo_epochs}`": batch.ppo_epochs > 1,
        f"`batch.updates_per_step: {batch.updates_per_step}`": batch.updates_per_step > 1,
        f"the advantage {algorithm.advantage}, which looks at the whole batch": algorithm.advantage in OF_WHOLE_BATCH,
        "`algorithm.whiten`, which looks at the whole batch": algorithm.whiten,
        "`algorithm.llds_coefficient`, whose share depends on the whole batch": algorithm.llds_coefficient > 0,
    }
    return [reason for reason, applies in reasons.items() if applies]


def is_scored(algorithm: ResolvedAlgorithm) -> bool:
    """Whether learning needs more numbers for what was played than playing itself leaves behind."""
    return algorithm.needs_reference or algorithm.needs_critic or algorithm.old_logprobs == "recompute"
