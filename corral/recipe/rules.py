"""Rules across keys: what a recipe may not say. (What is allowed but doubtful is in `recipe_warnings.py`.)

A key that was written but would have no effect is a problem: the user believes in something that will not happen. What
counts as written is what pydantic saw in the file or the overrides; presets and defaults never offend.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from corral.http_server import is_loopback
from corral.recipe.errors import RecipeError
from corral.recipe.mesh import mesh_shape
from corral.recipe.placement import MESH_ROLES, Placement, format_devices, resolve_placement
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.recipe_warnings import recipe_warnings
from corral.recipe.schema import Curriculum, Optimizer, Part, Recipe, RewardModel, Rollout, Section, Source, SourceRows

Findings = Iterator[str]
Rule = Callable[[Recipe, ResolvedAlgorithm], Findings]
PlacedRule = Callable[[Recipe, Placement], Findings]

NOT_IN_FOLDERS = 'leave out / \\ : * ? " < > | and a dot at the beginning'
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NEED_ROWS = ("question", "search", "tools", "reasoning_gym")
"""Environments that are nothing without a row's prompt."""
OWN_REWARDS = ("frozen_lake", "sokoban", "gymnasium", "reasoning_gym")
FUNCTION_KEYS = ("name", "options", "timeout_s", "workers", "concurrency")
"""Keys of `environment.reward` about its function."""
NOT_BLOCKING = ("question", "frozen_lake", "sokoban", "search", "agent")
OWN_DEADLINES = {
    "question": "a question only waits for its reward, which has `{where}.reward.timeout_s`",
    "search": "a search has `{where}.options.patience_s`, and each request of it `{where}.options.request_timeout_s`",
    "tools": "each call of a tool has `{where}.options.tool_timeout_s`",
}
"""Environments that do not read `environment.timeout_s`, and what bounds them."""
TRACKERS_WITH_PROJECTS = {"wandb", "mlflow", "swanlab", "trackio"}


def check(recipe: Recipe) -> list[str]:
    """Warnings about the recipe. Raises a RecipeError with all problems."""
    algorithm = resolve_algorithm(recipe)
    problems = [problem for rule in RULES for problem in rule(recipe, algorithm)]
    try:
        placement, unplaced = resolve_placement(recipe, algorithm)
    except RecipeError as error:
        raise RecipeError([*problems, *error.problems]) from None
    problems += [problem for placed_rule in PLACED_RULES for problem in placed_rule(recipe, placement)]
    if problems:
        raise RecipeError(problems)
    if placement.idle:
        unplaced.append(f"`cluster.placement`: nothing uses device {format_devices(placement.idle)}")
    return [*recipe_warnings(recipe, algorithm), *unplaced]


def max_trajectory_tokens(recipe: Recipe) -> int:
    """A prompt, and all that follows it: `max_response_tokens` bounds the whole of the turns, observations included."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens


def name_is_a_folder(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if problem := problem_of_run_name(recipe.name):
        yield problem


def problem_of_run_name(name: str) -> str | None:
    if not name or name[0] == "." or name != name.strip() or re.search(r'[/\\:*?"<>|\x00-\x1f]', name):
        return f"`name: {name!r}` cannot be the name of a folder, which it will be: {NOT_IN_FOLDERS}"
    if len(name.encode()) > 200:
        return f"`name` is {len(name.encode())} bytes long; as the name of a folder it may have 200"
    return None


def data_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    data = recipe.data
    yield from sources_or_one(data.train, "data.train")
    if data.validation is not None:
        yield from sources_or_one(data.validation, "data.validation")
        for name, one in data.validation.sources.items():
            where = f"data.validation.sources.{name}"
            yield from unused(one, where, ["weight"], "validation is of all rows; `max_rows` takes fewer of a source")
    yield from curriculum_keys(recipe)
    if data.template is not None and "{prompt}" not in data.template:
        yield "`data.template` has no `{prompt}` in it, so every question would be the same"
    if not data.chat:
        reason = "with `data.chat: false` there is no chat to render"
        yield from unused(data, "data", ["system"], reason)
        yield from unused(recipe.model, "model", ["chat_template", "chat_template_arguments"], reason)


def sources_or_one(source: Source, where: str) -> Findings:
    if source.sources:
        yield from unused(source, where, SourceRows.model_fields, f"`{where}.sources` are in its place")
        weights = [one.weight for one in source.sources.values()]
        if None in weights and any(weights):
            yield f"`{where}.sources`: some have a `weight` and others have none; give one to all of them, or to none"
    for name, one in source.named_sources.items():
        below = f"{where}.sources.{name}" if name else where
        if name and not re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", name):
            yield f"`{where}.sources`: {name!r} becomes part of metrics' names: use letters, digits, _ - . and /"
        if name and one.path == "boards":
            yield f"`{below}.path: boards`: boards of several games are mixed by `environments.*.weight`"
        yield from source_keys(one, below)
        for column, (low, high) in one.filters.items():
            if low is not None and high is not None and low > high:
                yield f"`{below}.filters.{column}: [{low:g}, {high:g}]` leaves nothing: the lower bound comes first"


def curriculum_keys(recipe: Recipe) -> Findings:
    curriculum = recipe.data.curriculum
    where = "data.curriculum"
    if curriculum.order_by is None:
        yield from unused(curriculum, where, ["descending"], f"there is no `{where}.order_by`")
    if recipe.trains_on_rows:
        reason = f"{recipe.algorithm.name} trains on rows, which have no rewards"
        yield from unused(curriculum, where, set(Curriculum.model_fields) - {"order_by", "descending"}, reason)
        return
    if curriculum.mean_reward is None:
        yield from unused(curriculum, where, ["others"], f"there is no `{where}.mean_reward`")
    elif curriculum.mean_reward[0] > curriculum.mean_reward[1]:
        low, high = curriculum.mean_reward
        yield f"`{where}.mean_reward: [{low:g}, {high:g}]` has no reward in it: the lower bound comes first"
    for skips, bound in (("skip_solved", "solved_reward"), ("skip_failed", "failed_reward")):
        if getattr(curriculum, skips) is None:
            yield from unused(curriculum, where, [bound], f"there is no `{where}.{skips}`")


def source_keys(source: SourceRows, where: str) -> Findings:
    """What `corral.data.sources` will do with the source, and which keys it reads then."""
    path = source.path if isinstance(source.path, str) else ""
    kind, found, _ = path.partition(":")
    if source.hub_name is not None:
        yield from unused(source, where, ["options", "size", "seed"], "a hub data set is not generated")
        return
    yield from unused(source, where, ["split", "subset"], "only hub data sets (`hf:..`, `ms:..`) have those")
    if kind in ("arithmetic", "pictures", "reasoning_gym") and found:
        return
    if path == "boards":
        yield from unused(source, where, ["options"], "boards follow from `size` and `seed`, and the environment")
        return
    if found:
        yield from unused(source, where, ["size", "seed"], "a function gets its arguments from `options`")
    else:
        yield from unused(source, where, ["options", "size", "seed"], "rows in files are not generated")


def environments_or_one(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if recipe.environments and "environment" in recipe.model_fields_set:
        yield "`environment` and `environments` are both set; keep one of them"
    for tag in recipe.environments:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", tag):
            yield f"`environments`: the tag {tag!r} becomes part of metrics' names: use letters, digits, _ - and ."


def rewards_or_one(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    for tag, environment in recipe.tagged_environments.items():
        where = f"environments.{tag}" if tag else "environment"
        if not environment.rewards:
            continue
        yield from unused(environment.reward, f"{where}.reward", FUNCTION_KEYS, f"`{where}.rewards` are in its place")
        for name, reward in environment.rewards.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                yield f"`{where}.rewards`: {name!r} becomes part of metrics' names: use letters, digits, _ - and ."
            if reward.sources == []:
                yield f"`{where}.rewards.{name}.sources` is empty: the reward would be for no row"


def reward_model_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if not recipe.needs_reward_model:
        reason = "no reward of the recipe has the name reward_model (`environment.reward.name`)"
        yield from unused(recipe.reward_model, "reward_model", RewardModel.model_fields, reason)
        return
    if recipe.reward_model.path is None:
        yield "a reward of the recipe is that of the reward model: `reward_model.path` is its folder or hub name"
    for tag, environment in recipe.tagged_environments.items():
        where = f"environments.{tag}" if tag else "environment"
        own = {name: reward for name, reward in environment.named_rewards.items() if reward.is_model}
        if len(own) > 1:
            yield f"`{where}.rewards`: {' and '.join(own)} are both the reward model's score; keep one of them"
        for name, reward in own.items():
            key = f"{where}.rewards.{name}" if name else f"{where}.reward"
            reason = "the reward model is no function; it has the section `reward_model`"
            yield from unused(reward, key, [one for one in FUNCTION_KEYS if one != "name"], reason)


def weights_of_boards(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    parts = parts_on_boards(recipe)
    others = "is mixed by weights; rows of other sources have a column `environment`"
    for tag, environment in recipe.environments.items():
        where = f"environments.{tag}"
        if "validation" not in parts:
            yield from unused(
                environment, where, ["validation_weight"], f"only `data.validation.path: boards` {others}"
            )
        if not parts:
            yield from unused(environment, where, ["weight"], f"only `path: boards` {others}")
        elif "train" not in parts and environment.validation_weight is not None:
            reason = f"there are only boards to validate on, and `{where}.validation_weight` says how many"
            yield from unused(environment, where, ["weight"], reason)
    for part in parts:
        if not any(recipe.mixing_weights(part).values()):
            key = "weight" if part == "train" else "validation_weight"
            yield f"`environments`: all weights of `data.{part}.path: boards` are 0; give one of them a `{key}`"


def boards_and_games(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    parts = parts_on_boards(recipe)
    for part in parts:
        for tag, environment in recipe.tagged_environments.items():
            if environment.name in NEED_ROWS and recipe.mixing_weights(part)[tag]:
                yield (
                    f"`data.{part}.path: boards` is for games, and `{environment.name}` needs rows with a prompt: "
                    "name a file, a hub data set or a generated task"
                )
    if "train" in parts:
        reason = "the prompts of a game are its environment's: `environment.options.prompts`"
        yield from unused(recipe.data, "data", ["system", "template", "prompt_key", "answer_key"], reason)


def parts_on_boards(recipe: Recipe) -> list[Part]:
    sources: dict[Part, Source | None] = {"train": recipe.data.train, "validation": recipe.data.validation}
    return [part for part, source in sources.items() if source is not None and source.path == "boards"]


def turns_and_timeouts(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    environments = recipe.tagged_environments
    if all(environment.name == "question" for environment in environments.values()):
        reason = "a question has one turn"
        if recipe.rollout.max_turns > 1:
            yield f"`rollout.max_turns: {recipe.rollout.max_turns}` has no effect: {reason}"
        yield from unused(recipe.rollout, "rollout", ["max_turn_tokens", "max_observation_tokens"], reason)
    for tag, environment in environments.items():
        where = f"environments.{tag}" if tag else "environment"
        if environment.name in OWN_REWARDS:
            reason = f"{environment.name} has rewards of its own"
            yield from unused(environment.reward, f"{where}.reward", FUNCTION_KEYS, reason)
            yield from unused(environment, where, ["rewards"], reason)
        if environment.name in NOT_BLOCKING:
            reason = f"{environment.name} does not block"
            yield from unused(environment, where, ["processes"], reason)
        if environment.name in OWN_DEADLINES:
            yield from unused(environment, where, ["timeout_s"], OWN_DEADLINES[environment.name].format(where=where))
    most = recipe.rollout.max_turn_tokens
    if most is not None and most > recipe.rollout.max_response_tokens:
        yield (
            f"`rollout.max_turn_tokens: {most}` is more than `rollout.max_response_tokens: "
            f"{recipe.rollout.max_response_tokens}`, which all turns have together"
        )


def batch_sizes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    batch = recipe.batch
    number, noun = recipe.num_units, "pairs" if recipe.trains_on_pairs else "trajectories"
    if batch.updates_per_step > number:
        yield f"`batch.updates_per_step: {batch.updates_per_step}` is more than a step's {number} {noun}"
    if (bounds := algorithm.mask_mean_reward) is not None:
        if batch.samples_per_prompt == 1:
            yield "`algorithm.mask_mean_reward` has no effect: a prompt has one sample (`batch.samples_per_prompt`)"
        if bounds[0] >= bounds[1]:
            written = f"[{bounds[0]:g}, {bounds[1]:g}]"
            yield f"`algorithm.mask_mean_reward: {written}` has no mean in it: the lower bound comes first"
    if batch.samples_per_prompt == 1 and algorithm.dynamic_sampling:
        yield (
            "`batch.samples_per_prompt: 1` with dynamic sampling, which drops groups whose rewards are all equal: "
            "every group would be dropped"
        )


def loss_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    written, loss = recipe.algorithm, algorithm.loss
    if recipe.batch.updates_per_step * recipe.batch.ppo_epochs == 1 and algorithm.old_logprobs == "recompute":
        reason = "a step has one update, and with `algorithm.old_logprobs: recompute` the ratios of the first are 1"
        if written.old_logprobs or recipe.schedule.max_staleness:  # not only because of how the trainers compute
            yield from unused(written, "algorithm", ["max_mean_ratio"], reason)
    forced = loss.declaration.aggregation
    if forced is not None and (written.aggregation.model_extra or written.aggregation.name not in (None, forced)):
        of = written.aggregation.name or "its options"
        yield f"`algorithm.aggregation: {of}` has no effect: the loss {loss.name} is always {forced}"


FOR_ROLLOUTS = {
    "algorithm": (
        *("advantage", "correction", "shaping", "kl", "dynamic_sampling", "old_logprobs", "max_mean_ratio"),
        *("reward_clip", "whiten", "whiten_by", "advantage_clip", "llds_coefficient", "lone_sample", "mask_truncated"),
        "mask_mean_reward",
    ),
    "batch": ("samples_per_prompt",),
    "schedule": ("max_staleness", "pipelined"),
    "rollout": ("temperature", "top_p", "top_k", "min_p"),
    "data": ("images_key",),
    "logging": ("tracked_samples",),
}
"""Keys that have no effect where rows are trained on. (Sampling in validation has keys of its own.)"""
PAIR_KEYS = ("chosen_key", "rejected_key")


def supervised_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    """What has no effect where the answers of rows are trained on (`algorithm.name: sft`, `dpo`, ...), and the other
    way."""
    loss, name = algorithm.loss, recipe.algorithm.name
    if loss.declaration.trains_on_rows != recipe.trains_on_rows:
        reason = f"`algorithm.name: {name}` trains on rollouts, and the loss {loss.name} is of the rows' own answers"
        if recipe.trains_on_rows:
            reason = f"`algorithm.name: {name}` trains on rows, which the loss {loss.name} does not declare to be for"
            reason += " (`trains_on_rows=True`)"
        yield f"`algorithm.loss: {loss.name}`: {reason}"
    elif loss.declaration.trains_on_pairs != recipe.trains_on_pairs:
        of_pairs = f"the loss {loss.name} is {'' if loss.declaration.trains_on_pairs else 'not '}of pairs of them"
        yield f"`algorithm.loss: {loss.name}`: `algorithm.name: {name}` trains on answers of rows, and {of_pairs}"
    if not recipe.trains_on_rows:
        yield from unused(
            recipe.data, "data", ["completion_key"], "only `algorithm.name: sft` trains on answers of rows"
        )
        yield from unused(recipe.data, "data", PAIR_KEYS, "only `algorithm.name: dpo`, ipo and simpo train on pairs")
        if algorithm.advantage.name == "none":
            yield f"`algorithm.advantage: none` is for `algorithm.name: sft`: with {name}, rewards would not count"
        return
    if recipe.trains_on_pairs:
        pair = "a row is a pair of answers, in `data.chosen_key` and `data.rejected_key`"
        yield from unused(recipe.data, "data", ["completion_key"], pair)
    else:
        yield from unused(recipe.data, "data", PAIR_KEYS, f"{name} trains on one answer of each row")
    for section, keys in FOR_ROLLOUTS.items():
        yield from unused(
            getattr(recipe, section), section, keys, f"{name} trains on rows, and nothing is rolled out for it"
        )
    if recipe.batch.ppo_epochs > 1:
        yield "`batch.ppo_epochs`: rows are gone over again in another order, as often as `schedule.epochs` says"
    for part in parts_on_boards(recipe):
        yield f"`data.{part}.path: boards`: boards have no answers to train on"
    if not recipe.validates_by_generation:
        reason = "nothing is generated"
        yield from unused(recipe.rollout, "rollout", set(Rollout.model_fields) - set(FOR_ROLLOUTS["rollout"]), reason)
        yield from unused(recipe.cluster, "cluster", ["transfer"], reason)
        yield from unused(recipe.logging, "logging", ["samples"], reason)
        if recipe.data.validation is None:
            for key in sorted({"environment", "environments"} & recipe.model_fields_set):
                yield f"`{key}` has no effect: there is no `data.validation` to generate answers to"
        else:
            reason = "without an `environment` whose reward scores answers, validation is the loss alone"
            generating = ["samples_per_prompt", "temperature", "top_p", "pass_threshold"]
            yield from unused(recipe.validation, "validation", generating, reason)


def advantage_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    advantage = algorithm.advantage
    if algorithm.whiten and advantage.declaration.whitened:
        yield f"`algorithm.whiten` has no effect: the advantage {advantage.name} is whitened by itself"
    if algorithm.whiten_by == "rewards" and not (algorithm.whiten or advantage.declaration.whitened):
        yield f"`algorithm.whiten_by` has no effect: nothing is whitened with the advantage {advantage.name}"
    elif algorithm.whiten_by == "rewards" and all(one.sources is None for one in recipe.environment.rewards.values()):
        yield "`algorithm.whiten_by: rewards` has no effect: no `environment.rewards` are for some `sources` alone"
    if not advantage.declaration.needs.groups and not recipe.trains_on_rows:
        reason = f"the advantage {advantage.name} does not compare the samples of a prompt"
        yield from unused(recipe.algorithm, "algorithm", ["lone_sample"], reason)
    if not algorithm.needs_critic:
        reason = f"the advantage {advantage.name} needs no critic"
        yield from unused(recipe.critic, "critic", ["path", "value_clip", "warmup_steps"], reason)
        yield from unused(recipe.critic.optimizer, "critic.optimizer", Optimizer.model_fields, reason)


def kl_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if algorithm.needs_teacher:
        endpoint = recipe.reference.endpoint
        if recipe.reference.path is None and endpoint is None:
            yield (
                f"the advantage {algorithm.advantage.name} needs a teacher: `reference.path` is its model, or "
                "`reference.endpoint` its server"
            )
        if recipe.reference.path is not None and endpoint is not None:
            yield "`reference.path` and `reference.endpoint` are two teachers; leave one of them out"
        if endpoint is not None and recipe.rollout.temperature != 1:
            yield (
                f"`rollout.temperature: {recipe.rollout.temperature:g}`: a server gives the teacher's log-probs at "
                "temperature 1, so the model must sample at 1 too, or the teacher be a model of this run"
            )
        if algorithm.kl is not None:
            yield "`algorithm.kl`: the reference is the teacher already, whose KL is the advantage; leave it out"
    elif algorithm.needs_reference and recipe.reference.endpoint is not None:
        yield "`reference.endpoint` is for a teacher (`algorithm: distill`); another reference is a model of this run"
    if algorithm.kl is None:
        reason = "there is no KL in this recipe; `algorithm.kl.where` (loss or reward) puts it there"
        yield from unused(recipe.algorithm.kl, "algorithm.kl", ["estimator", "coefficient", "controller"], reason)
        if not algorithm.needs_reference:
            if recipe.trains_on_rows:
                reason = f"the loss {algorithm.loss.name} compares with no reference"
            yield from unused(recipe.reference, "reference", ["path", "endpoint"], reason)


def correction_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    name = algorithm.correction.name
    if name == "none" or algorithm.old_logprobs == "recompute":
        return
    why = "it weighs the trainer's log-probs against the engine's, and these are the engine's own"
    if recipe.algorithm.correction.name is not None:
        yield (
            f"`algorithm.correction.name: {name}` has no effect with `algorithm.old_logprobs: engine`: {why}; "
            "set `algorithm.old_logprobs: recompute`"
        )
    else:
        stale, engine = recipe.schedule.max_staleness, recipe.rollout.engine.name
        bringer = f"`schedule.max_staleness: {stale}`" if stale else f"`rollout.engine: {engine}`"
        yield (
            f"`algorithm.old_logprobs: engine` leaves the correction without effect that "
            f"{bringer} brings with it ({name}): {why}; leave out "
            "`algorithm.old_logprobs`, or set `algorithm.correction.name: none`"
        )


def lora_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    lora, tensor = recipe.model.lora, recipe.train.parallel.tensor
    if lora is not None and lora.dropout and tensor > 1:
        yield (
            f"`model.lora.dropout: {lora.dropout:g}`: with `train.parallel.tensor: {tensor}` the ranks of a layer "
            "would drop different inputs; leave it at 0"
        )


def quantization_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if recipe.model.quantization is None:
        return
    if recipe.model.lora is None:
        yield (
            "`model.quantization`: weights in 8 or 4 bits are not trained, only adapters beside them; set "
            "`model.lora.rank`, or leave it out"
        )
    if not recipe.rollout.engine.in_process and recipe.needs_engine:
        yield (
            f"`model.quantization`: `rollout.engine: {recipe.rollout.engine.name}` in a process of its own would "
            "decode with other weights than those that are trained with; set `rollout.engine: native`"
        )
    if recipe.model.exact:
        yield "`model.quantization` rounds weights, and `model.exact` is for those that are not rounded; leave one out"


def router_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if recipe.train.router_aux_loss_coef and recipe.train.parallel.pipeline > 1:
        yield (
            "`train.router_aux_loss_coef`: the load-balancing loss is one of all layers, and with "
            f"`train.parallel.pipeline: {recipe.train.parallel.pipeline}` no rank has them all; set one of the two to "
            "its default"
        )


def engine_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    rollout, engine = recipe.rollout, recipe.rollout.engine
    others = ["memory_fraction", "arguments"]
    if engine.tensor_parallel > 1 and engine.name != "vllm":
        yield (
            f"`rollout.engine.tensor_parallel: {engine.tensor_parallel}`: with {engine.name} each device has a whole "
            "model; one that does not fit is for `rollout.engine: vllm`"
        )
    if engine.name == "native":
        yield from unused(engine, "rollout.engine", others, "only vllm and sglang have it")
        if engine.in_process:
            yield from unused(engine, "rollout.engine", ["python"], "the native engine runs in the trainers' process")
        return
    yield from unused(engine, "rollout.engine", ["own_process"], f"{engine.name} always has a process of its own")
    if engine.name == "vllm" and rollout.temperature != 1 and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        yield (
            f"`rollout.engine: {engine.name}` with `rollout.temperature: {rollout.temperature:g}` and top_p, top_k or "
            "min_p: its log-probs are either those before the temperature or those after the exclusion of tokens, and "
            "training needs them in between; leave one of the two out, or take the native engine"
        )


def shaping_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    written, limit = recipe.algorithm, recipe.rollout.max_response_tokens
    if not algorithm.dynamic_sampling:
        reason = "dynamic sampling is off; `algorithm.dynamic_sampling.enabled` turns it on"
        yield from unused(written.dynamic_sampling, "algorithm.dynamic_sampling", ["max_rounds"], reason)
    if algorithm.shaping.name == "overlong" and (buffer := algorithm.shaping.options.buffer_tokens) > limit:
        yield f"`algorithm.shaping.buffer_tokens: {buffer}` is more than `rollout.max_response_tokens: {limit}`"


def optimizer_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    optimizers = {"optimizer": recipe.optimizer}
    if algorithm.needs_critic:
        optimizers["critic.optimizer"] = recipe.critic.optimizer
    for where, optimizer in optimizers.items():
        if optimizer.warmup_ratio is not None and "warmup_steps" in optimizer.model_fields_set:
            yield f"`{where}.warmup_steps` and `{where}.warmup_ratio` are both set; keep one of them"
        if optimizer.schedule == "constant":
            reason = f"`{where}.schedule` is constant; linear and cosine end at that ratio"
            yield from unused(optimizer, where, ["min_learning_rate_ratio"], reason)


def length_of_the_run(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    schedule = recipe.schedule
    if schedule.steps is None and schedule.epochs is None:
        yield "the recipe does not say how long to train: set `schedule.steps` or `schedule.epochs`"
    if schedule.steps is not None and schedule.epochs is not None:
        yield "`schedule.steps` and `schedule.epochs` are both set; keep one of them"


def validation_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    validation = recipe.validation
    if recipe.data.validation is None:
        reason = "there is no `data.validation` to validate on"
        yield from unused(validation, "validation", type(validation).model_fields, reason)
        yield from unused(recipe.checkpoint, "checkpoint", ["best"], reason)
    elif validation.temperature == 0:
        reason = "with `validation.temperature: 0` the most likely token is taken"
        yield from unused(validation, "validation", ["top_p"], reason)


def logging_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if not TRACKERS_WITH_PROJECTS.intersection(recipe.logging.trackers):
        reason = f"none of `logging.trackers` has projects ({', '.join(sorted(TRACKERS_WITH_PROJECTS))} do)"
        yield from unused(recipe.logging, "logging", ["project"], reason)
    if set(recipe.logging.trackers) <= {"console"}:
        reason = "`logging.trackers` names no tracker but the console"
        yield from unused(recipe.logging, "logging", ["names", "tracked_samples"], reason)
    if not recipe.logging.trajectories:
        yield from unused(recipe.logging, "logging", ["keep_trajectories"], "`logging.trajectories: false` writes none")
    prometheus = recipe.logging.prometheus
    if prometheus is not None and prometheus.token_file is None and not is_loopback(prometheus.host):
        yield (
            f"`logging.prometheus.host: {prometheus.host}`: other machines could ask too; set "
            "`logging.prometheus.token_file`, or listen on 127.0.0.1"
        )


def local_runtime(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    cluster = recipe.cluster
    if cluster.runtime != "local":
        return
    used = ("runtime", "services", *(["worker_timeout_s"] if not recipe.rollout.engine.in_process else []))
    keys = [key for key in type(cluster).model_fields if key not in used]
    num_devices = cluster.nodes * cluster.devices_per_node
    if num_devices > 1:
        keys = [key for key in keys if key not in ("nodes", "devices_per_node")]
        yield (
            f"`cluster.runtime: local` is one process on one device, and `cluster.nodes` x `cluster.devices_per_node` "
            f"is {num_devices}; leave out `cluster.runtime` to run on a Ray cluster"
        )
    reason = "with `cluster.runtime: local` there is no cluster, only this process and its device"
    yield from unused(cluster, "cluster", keys, reason)
    for name, service in cluster.services.items():
        if service.devices:
            yield f"`cluster.services.{name}.devices: {service.devices}` cannot be had: {reason}"


def service_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    ports: dict[int, str] = {}
    for name, service in recipe.cluster.services.items():
        where = f"cluster.services.{name}"
        if (service.retriever is None) == (not service.command):
            yield f"`{where}` needs either `retriever`, the folder of an index, or `command`"
        if service.retriever is None:
            yield from unused(service, where, ["corpus"], "it belongs to `retriever`")
        if service.port in ports:
            yield f"`{where}.port: {service.port}` is that of `cluster.services.{ports[service.port]}` too"
        ports[service.port] = name
        if not service.health.startswith("/"):
            yield f"`{where}.health: {service.health}` is a path, and begins with /"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield f"`cluster.services`: {name!r} becomes the name of a log: use letters, digits, _ - and ."


def enough_nodes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    cluster = recipe.cluster
    if cluster.min_nodes is not None and cluster.min_nodes > cluster.nodes:
        yield f"`cluster.min_nodes: {cluster.min_nodes}` is more than `cluster.nodes: {cluster.nodes}`"


def environment_names(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    for name in recipe.cluster.environment:
        written = f"`cluster.environment: {name.partition('=')[0]}`"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{written} should be the name of a variable alone; its value is not for recipes, which are kept"
        elif name in SET_BY_RAY or name.startswith("RAY_"):
            yield f"{written} cannot be the same for all workers: Ray sets it for each of them"


# --- rules that look at who is placed where


def running_ahead(recipe: Recipe, placement: Placement) -> Findings:
    schedule = recipe.schedule
    if not placement.colocated:
        return
    if schedule.max_staleness > 0:
        yield (
            f"`schedule.max_staleness: {schedule.max_staleness}`: an engine that shares its device with the trainer "
            "cannot run ahead of it; give rollout devices of its own in `cluster.placement`, or leave "
            "`schedule.max_staleness` at 0"
        )
    if schedule.pipelined:
        yield (
            "`schedule.pipelined` has no effect: actor and rollout share their devices, which cannot generate and "
            "train at once; give rollout devices of its own in `cluster.placement`"
        )


def engines_on_nodes(recipe: Recipe, placement: Placement) -> Findings:
    size, devices = recipe.rollout.engine.tensor_parallel, placement.roles.get("rollout", ())
    written = f"`rollout.engine.tensor_parallel: {size}`"
    if len(devices) % size:
        yield f"{written} does not divide the {len(devices)} devices of the rollout"
        return
    for start in range(0, len(devices), size):
        span = devices[start : start + size]
        if len({device // recipe.cluster.devices_per_node for device in span}) > 1:
            yield f"{written}: an engine would have devices {format_devices(span)}, which are on several nodes"


def ways_of_weights(recipe: Recipe, placement: Placement) -> Findings:
    cluster = recipe.cluster
    if cluster.transfer == "auto" or not recipe.needs_engine:
        return
    written = f"`cluster.transfer: {cluster.transfer}`"
    if placement.colocated:
        if cluster.transfer != "shared":
            yield (
                f"{written} has no effect: actor and rollout share their devices and processes, so that weights do not "
                "travel; leave it at auto, or give rollout devices of its own in `cluster.placement`"
            )
    elif cluster.transfer == "shared":
        actor, rollout = (format_devices(placement.roles[role]) for role in ("actor", "rollout"))
        yield (
            f"{written} is within a process, but actor ({actor}) and rollout ({rollout}) are on different devices; "
            "leave it at auto, or place them together"
        )
    elif cluster.transfer == "ipc" and cluster.nodes > 1:
        yield (
            f"{written} goes through the memory of one node, and `cluster.nodes` is {cluster.nodes}; leave it at auto, "
            "or set it to collective or object"
        )


def mesh_sizes(recipe: Recipe, placement: Placement) -> Findings:
    """One line for each set of devices that does not fit, however many roles share it."""
    seen: set[tuple[int, ...]] = set()
    for role in MESH_ROLES:
        devices = placement.roles.get(role)
        if devices is None or devices in seen:
            continue
        seen.add(devices)
        try:
            mesh_shape(recipe.train.parallel, len(devices), role)
        except RecipeError as error:
            yield from error.problems


def sharded_reward_model(recipe: Recipe, placement: Placement) -> Findings:
    shard, devices = recipe.reward_model.shard, placement.roles.get("reward_model", ())
    if shard == 1 or not recipe.needs_reward_model:
        return
    others = [role for role, own in placement.roles.items() if role != "reward_model" and {*own} & {*devices}]
    if others:
        yield (
            f"`reward_model.shard: {shard}`: the reward model is on devices of {', '.join(others)}, which compute at "
            "other times; give it devices of its own in `cluster.placement`, or leave it out"
        )
    elif len(devices) % shard:
        yield f"`reward_model.shard: {shard}` does not divide the number of the role's devices, {len(devices)}"


def quantized_copies(recipe: Recipe, placement: Placement) -> Findings:
    with suppress(RecipeError):  # which `mesh_sizes` reports
        is_whole = mesh_shape(recipe.train.parallel, len(placement.roles["actor"])).is_whole
        if recipe.model.quantization is not None and not is_whole:
            yield (
                "`model.quantization`: codes of weights are not sharded, so every device has a whole model; set "
                "`train.parallel.replicate` to the number of devices, or leave it out"
            )


def offloaded_parts(recipe: Recipe, placement: Placement) -> Findings:
    if "activations" in recipe.train.offload and not recipe.train.gradient_checkpointing:
        yield "`train.offload: activations` needs them to be checkpointed; set `train.gradient_checkpointing: true`"
    with suppress(RecipeError):  # which `mesh_sizes` reports
        if not mesh_shape(recipe.train.parallel, len(placement.roles["actor"])).is_whole:
            if len({"parameters", "gradients"} & {*recipe.train.offload}) == 1:
                yield "`train.offload`: parameters and gradients go together; name both or neither"
            return
        for part in recipe.train.offload:
            if part in ("parameters", "gradients"):
                yield (
                    f"`train.offload: {part}` needs a sharded model, and every device of actor holds a whole one; keep "
                    "optimizer only, or shard over several devices (`train.parallel.shard`)"
                )


def unused(section: Section, where: str, keys: Iterable[str], reason: str) -> Findings:
    """One line for each of the keys that was written, other than as null."""
    for key in keys:
        if key in section.model_fields_set and getattr(section, key) is not None:
            yield f"`{where}.{key}` has no effect: {reason}"


RULES: tuple[Rule, ...] = (
    name_is_a_folder,
    data_keys,
    environments_or_one,
    rewards_or_one,
    reward_model_keys,
    weights_of_boards,
    boards_and_games,
    turns_and_timeouts,
    batch_sizes,
    loss_keys,
    supervised_keys,
    advantage_keys,
    kl_keys,
    correction_keys,
    lora_keys,
    quantization_keys,
    router_keys,
    engine_keys,
    shaping_keys,
    optimizer_keys,
    length_of_the_run,
    validation_keys,
    logging_keys,
    local_runtime,
    service_keys,
    enough_nodes,
    environment_names,
)
PLACED_RULES: tuple[PlacedRule, ...] = (
    running_ahead,
    engines_on_nodes,
    ways_of_weights,
    mesh_sizes,
    quantized_copies,
    sharded_reward_model,
    offloaded_parts,
)
