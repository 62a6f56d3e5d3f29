"""Rules across keys: what a recipe may not say. (What is allowed but doubtful is in `recipe_warnings.py`.)

A key that was written but would have no effect is a problem: the user believes in something that will not happen. What
counts as written is what pydantic saw in the file or the overrides; presets and defaults never offend.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from corral.recipe.errors import RecipeError
from corral.recipe.mesh import mesh_shape
from corral.recipe.placement import MESH_ROLES, Placement, format_devices, resolve_placement
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.recipe_warnings import recipe_warnings
from corral.recipe.schema import Optimizer, Part, Recipe, Section, Source

Findings = Iterator[str]
Rule = Callable[[Recipe, ResolvedAlgorithm], Findings]
PlacedRule = Callable[[Recipe, Placement], Findings]

NOT_IN_FOLDERS = 'leave out / \\ : * ? " < > | and a dot at the beginning'
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NEED_ROWS = ("question", "search", "tools", "reasoning_gym")
"""Environments that are nothing without a row's prompt."""
OWN_REWARDS = ("frozen_lake", "sokoban", "gymnasium", "reasoning_gym")
NOT_BLOCKING = ("question", "frozen_lake", "sokoban", "search", "tools", "agent")
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
    yield from source_keys(data.train, "data.train")
    if data.validation is not None:
        yield from source_keys(data.validation, "data.validation")
    if data.template is not None and "{prompt}" not in data.template:
        yield "`data.template` has no `{prompt}` in it, so every question would be the same"
    if not data.chat:
        reason = "with `data.chat: false` there is no chat to render"
        yield from unused(data, "data", ["system"], reason)
        yield from unused(recipe.model, "model", ["chat_template", "chat_template_arguments"], reason)


def source_keys(source: Source, where: str) -> Findings:
    """What `corral.data.sources` will do with the source, and which keys it reads then."""
    path = source.path if isinstance(source.path, str) else ""
    kind, found, _ = path.partition(":")
    if kind == "hf" and found:
        yield from unused(source, where, ["options", "size", "seed"], "a hub data set is not generated")
        return
    yield from unused(source, where, ["split", "subset"], "only hub data sets (`hf:...`) have those")
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
            yield from unused(
                environment.reward, f"{where}.reward", ["name", "options", "timeout_s", "workers"], reason
            )
        if environment.name in NOT_BLOCKING:
            reason = f"{environment.name} does not block"
            yield from unused(environment, where, ["processes"], reason)
        if environment.name == "question":
            reason = f"a question only waits for its reward, which has `{where}.reward.timeout_s`"
            yield from unused(environment, where, ["timeout_s"], reason)
    most = recipe.rollout.max_turn_tokens
    if most is not None and most > recipe.rollout.max_response_tokens:
        yield (
            f"`rollout.max_turn_tokens: {most}` is more than `rollout.max_response_tokens: "
            f"{recipe.rollout.max_response_tokens}`, which all turns have together"
        )


def batch_sizes(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    batch = recipe.batch
    trajectories = batch.prompts_per_step * batch.samples_per_prompt
    if batch.updates_per_step > trajectories:
        yield f"`batch.updates_per_step: {batch.updates_per_step}` is more than a step's {trajectories} trajectories"
    if batch.max_tokens_per_micro_batch < max_trajectory_tokens(recipe):
        yield (
            f"`batch.max_tokens_per_micro_batch: {batch.max_tokens_per_micro_batch}` cannot hold a whole trajectory: "
            f"`data.max_prompt_tokens` + `rollout.max_response_tokens` = {max_trajectory_tokens(recipe)}"
        )
    if batch.samples_per_prompt == 1 and algorithm.advantage.declaration.needs.groups:
        yield (
            f"`batch.samples_per_prompt: 1` with the advantage {algorithm.advantage.name}, which compares the samples "
            "of a prompt: all advantages would be zero"
        )
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


def advantage_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    advantage = algorithm.advantage
    if algorithm.whiten and advantage.declaration.whitened:
        yield f"`algorithm.whiten` has no effect: the advantage {advantage.name} is whitened by itself"
    if not algorithm.needs_critic:
        reason = f"the advantage {advantage.name} needs no critic"
        yield from unused(recipe.critic, "critic", ["path", "value_clip", "warmup_steps"], reason)
        yield from unused(recipe.critic.optimizer, "critic.optimizer", Optimizer.model_fields, reason)


def kl_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if algorithm.kl is None:
        reason = "there is no KL in this recipe; `algorithm.kl.where` (loss or reward) puts it there"
        yield from unused(recipe.algorithm.kl, "algorithm.kl", ["estimator", "coefficient", "controller"], reason)
        yield from unused(recipe.reference, "reference", ["path"], reason)


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
    elif validation.temperature == 0:
        reason = "with `validation.temperature: 0` the most likely token is taken"
        yield from unused(validation, "validation", ["top_p"], reason)


def logging_keys(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    if not TRACKERS_WITH_PROJECTS.intersection(recipe.logging.trackers):
        reason = f"none of `logging.trackers` has projects ({', '.join(sorted(TRACKERS_WITH_PROJECTS))} do)"
        yield from unused(recipe.logging, "logging", ["project"], reason)


def local_runtime(recipe: Recipe, algorithm: ResolvedAlgorithm) -> Findings:
    cluster = recipe.cluster
    if cluster.runtime != "local":
        return
    keys = [key for key in type(cluster).model_fields if key not in ("runtime", "services")]
    num_devices = cluster.nodes * cluster.devices_per_node
    if num_devices > 1:
        keys = [key for key in keys if key not in ("nodes", "devices_per_node")]
        yield (
            f"`cluster.runtime: local` is one process on one device, and `cluster.nodes` x `cluster.devices_per_node` "
            f"is {num_devices}; leave out `cluster.runtime` to run on a Ray cluster"
        )
    reason = "with `cluster.runtime: local` there is no cluster, only this process and its device"
    yield from unused(cluster, "cluster", keys, reason)


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
    size, devices = recipe.rollout.engine.tensor_parallel, placement.roles["rollout"]
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
    if cluster.transfer == "auto":
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


def offloaded_parts(recipe: Recipe, placement: Placement) -> Findings:
    with suppress(RecipeError):  # which `mesh_sizes` reports
        if not mesh_shape(recipe.train.parallel, len(placement.roles["actor"])).is_whole:
            return
        for part in recipe.train.offload:
            if part != "optimizer":
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
    weights_of_boards,
    boards_and_games,
    turns_and_timeouts,
    batch_sizes,
    loss_keys,
    advantage_keys,
    kl_keys,
    correction_keys,
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
PLACED_RULES: tuple[PlacedRule, ...] = (running_ahead, engines_on_nodes, ways_of_weights, mesh_sizes, offloaded_parts)
