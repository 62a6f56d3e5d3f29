"""The recipe of a rehearsal: any recipe with a small model, few rows and short answers, to see that it runs before it
costs anything.

What is kept is how it works: environment, rewards, algorithm, epochs and updates, and, unless all of it is to be in one
process, nodes, devices, roles, meshes and how weights travel. What is replaced is listed.
"""

import importlib.util
import json
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from corral.data.sources import load_part
from corral.host_memory import available_memory
from corral.hub import BLANK_VISION, config_text
from corral.model.builtin_models import builtin_folder, write_whole_folder
from corral.model.families import VISION_TYPES
from corral.model.narrow import save_narrow_model
from corral.recipe.errors import UserError, first_line
from corral.recipe.placement import format_devices, resolve_placement
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import HERE, Recipe
from corral.recipe.shape import base_model, model_folder

SHORT_PROMPT, LONG_PROMPT = 256, 1536
"""Tokens, which are bytes, of the prompt of a question and of one that explains a game's rules."""
NUM_ROWS = 32
MAX_SEQUENCES = 16
SERVICE = "retriever"
PROCESS_BYTES = 350 << 20
"""Memory of a worker on a CPU, or of an engine's process, beside what they share."""
ENTROPY_COEFFICIENT = 0.001
MASKS = ("mask_truncated", "mask_mean_reward")
NUM_PASSAGES = 20
PATIENCE = {"start_timeout_s": 1800.0, "node_timeout_s": 300.0, "worker_timeout_s": 1800.0}
"""For a machine that has many processes on few cores."""


@dataclass
class Rehearsal:
    """A recipe that was cut down, and what it takes to run it."""

    full: Recipe
    recipe: Recipe
    """The small one."""
    folder: Path
    """In which the small models are."""
    mesh: dict[str, int] = field(default_factory=dict)
    """What the small model must be divisible for."""
    replaced: list[str] = field(default_factory=list)
    """What is another thing than in the recipe."""


def cut(recipe: Recipe, folder: Path, address: str | None = None) -> Rehearsal:
    """Returns the small recipe, in which everything but sizes is checked already. `folder`: for what it needs.
    `address`: `cluster.address` of it; None: all of it is in one process."""
    one_process = address is None
    values = recipe.model_dump(mode="json", exclude_unset=True)
    is_question = all(one.name == "question" for one in recipe.tagged_environments.values())
    rehearsal = Rehearsal(recipe, recipe, folder)
    has_own_rows = can_read_rows(recipe, rehearsal)
    values |= {
        "name": f"{recipe.name}-rehearsal",
        "model": small_model(recipe, rehearsal),
        "data": small_data(recipe, SHORT_PROMPT if is_question else LONG_PROMPT, has_own_rows),
        "rollout": small_rollout(recipe, is_question),
        "schedule": {"steps": 1},
        "checkpoint": {"resume": "never"} if one_process else {"every": 1},
        "logging": {"runs": recipe.logging.runs},
        "cluster": {"runtime": "local"},
    }
    values["batch"] = small_batch(recipe, values)
    if not recipe.needs_engine:
        del values["rollout"]
    values["train"] = {"gradient_checkpointing": recipe.train.gradient_checkpointing}
    if recipe.data.validation is not None:
        values["validation"] = {"before_training": not one_process, "max_prompts": 2}
    for section, key in (("critic", "path"), ("critic", "warmup_steps")):
        values.get(section, {}).pop(key, None)
    if values.get("reference"):
        values["reference"] = {"path": values["model"]["path"]}  # also instead of a teacher's endpoint
    if recipe.reward_model.path is not None:
        values["reward_model"] = {"path": str(folder / "reward_model"), "shard": recipe.reward_model.shard}
    if not recipe.trains_on_rows:
        values["algorithm"] = small_algorithm(recipe, values.get("algorithm", {}), rehearsal)
    if not has_own_rows:  # these are other rows than the reward and the environment are made for
        if recipe.needs_engine and not recipe.environments:
            values.setdefault("environment", {})["max_error_rate"] = None
        for environment in values.get("environments", {}).values():
            environment["max_error_rate"] = None
    if address is None:
        values.get("reward_model", {}).pop("shard", None)
    else:
        keep_cluster(recipe, values, rehearsal, address)
    if any(one.name == "search" and one.options.get("do_search", True) for one in recipe.tagged_environments.values()):
        use_own_retriever(values, folder)
        rehearsal.replaced.append("the retriever: one of the run's own, with sums to find")
    rehearsal.recipe = Recipe.model_validate(values)
    return rehearsal


def small_model(recipe: Recipe, rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns the section `model`, with a narrow model of the same architecture in place of the recipe's."""
    kept = recipe.model.model_dump(mode="json", exclude_unset=True, include={"lora", "quantization", "implementation"})
    config = read_config(recipe.model.path)
    if config is not None and config.get("model_type") in VISION_TYPES:
        path = BLANK_VISION
    else:
        path = str(rehearsal.folder / "model")
    layers = (
        f"of {config['model_type']}"
        if config
        else "of a Llama, because its config.json is neither on this machine nor to be had"
    )
    what = f"few narrow layers {layers}, with random weights and a token for each byte"
    rehearsal.replaced.append(f"the model {recipe.model.path}: {what}")
    return kept | {"path": path, "dtype": recipe.model.dtype if torch.cuda.is_available() else "float32"}


def read_config(path: str) -> dict[str, Any] | None:
    """Returns what is in a model's `config.json`, on this machine or the hub; None where it can be had from neither."""
    folder = builtin_folder(path := base_model(path)) or model_folder(path)
    with suppress(Exception):  # of the hub's client: no such model, no network, no access
        config = json.loads(config_text(path, "model.path") if folder is None else (folder / "config.json").read_text())
        return config if isinstance(config, dict) and "model_type" in config else None
    return None


def can_read_rows(recipe: Recipe, rehearsal: Rehearsal) -> bool:
    """Whether the recipe's own rows can be read; generated ones are used otherwise."""
    try:
        for part in ("train", "validation"):
            if (source := getattr(recipe.data, part)) is not None:
                load_part(recipe, part, source.first_rows(NUM_ROWS), lambda warning: None)
    except Exception as error:
        rehearsal.replaced.append(f"the rows: generated sums, because they cannot be read here ({first_line(error)})")
        return False
    return True


def small_data(recipe: Recipe, max_prompt_tokens: int, has_own_rows: bool) -> dict[str, Any]:
    limits = {"max_prompt_tokens": max_prompt_tokens, "overlong": "truncate_left"}
    if has_own_rows:
        parts = {part: source for part in ("train", "validation") if (source := getattr(recipe.data, part)) is not None}
        few = {part: source.first_rows(NUM_ROWS) for part, source in parts.items()}
        return recipe.data.model_copy(update=few).model_dump(mode="json", exclude_unset=True) | limits
    data: dict[str, Any] = {**limits}
    for part, seed in (("train", 0), ("validation", 1)):
        source = getattr(recipe.data, part)
        if source is not None:
            path = "boards" if source.path == "boards" else "arithmetic:addition"
            data[part] = {"path": path, "size": NUM_ROWS, "seed": seed}
            if path != "boards":
                data[part]["options"] = {"digits": 1} | ({"pairs": True} if recipe.trains_on_pairs else {})
                data[part]["options"] |= {"environments": [*recipe.environments]} if recipe.environments else {}
    return data | ({"chat": False} if not recipe.data.chat else {})


def small_rollout(recipe: Recipe, is_question: bool) -> dict[str, Any]:
    """Returns settings with turns so short that two of them, with their observations, take seconds."""
    written = recipe.rollout.model_dump(exclude_unset=True)
    kept = {key: written[key] for key in ("temperature", "top_p", "top_k", "min_p", "stop") if key in written}
    if is_question:
        return kept | {"max_response_tokens": 16}
    most = {"max_turns": 2, "max_turn_tokens": 16, "max_observation_tokens": 256}
    limits = {key: min(limit, written.get(key) or limit) for key, limit in most.items()}
    return kept | limits | {"max_response_tokens": 768}


def small_batch(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    batch = recipe.batch
    samples = min(batch.samples_per_prompt, 4)
    prompts = min(batch.prompts_per_step, max(4, -(-recipe.cluster.nodes * recipe.cluster.devices_per_node // samples)))
    longest = values["data"]["max_prompt_tokens"] + values["rollout"]["max_response_tokens"]
    if recipe.trains_on_rows:
        updates = min(batch.updates_per_step, prompts)
        return {"prompts_per_step": prompts, "updates_per_step": updates, "max_tokens_per_micro_batch": 2 * longest}
    return {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "updates_per_step": min(batch.updates_per_step, prompts * samples, 4),
        "ppo_epochs": min(batch.ppo_epochs, 2),
        "max_tokens_per_micro_batch": 2 * longest,
    }


def small_algorithm(recipe: Recipe, algorithm: dict[str, Any], rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns the algorithm with limits for short answers. Weights move also where answers are all cut off and have
    the same reward, as those of a model that knows nothing do."""
    algorithm.get("aggregation", {}).pop("norm", None)
    masks = [mask for mask in MASKS if algorithm.pop(mask, None)]
    if masks or resolve_algorithm(recipe).dynamic_sampling:
        algorithm["dynamic_sampling"] = {"enabled": False}
        rehearsal.replaced.append("masks and filters of samples: none, for a model that knows nothing would lose all")
    if algorithm.get("shaping", {}).get("buffer_tokens"):
        algorithm["shaping"]["buffer_tokens"] = min(algorithm["shaping"]["buffer_tokens"], 8)
    return {**algorithm, "entropy_coefficient": algorithm.get("entropy_coefficient") or ENTROPY_COEFFICIENT}


def keep_cluster(recipe: Recipe, values: dict[str, Any], rehearsal: Rehearsal, address: str) -> None:
    """Lets nodes, devices, roles, meshes, engines and transfers be those of the recipe."""
    if "cluster" not in recipe.model_fields_set:
        values["cluster"] = {}
        return
    parallel = recipe.train.parallel
    rehearsal.mesh = {name: getattr(parallel, name) for name in ("pipeline", "tensor", "expert")}
    values["train"] |= recipe.train.model_dump(mode="json", exclude_unset=True, include={"parallel", "offload"})
    # As in the plan, also where the recipe leaves it to the devices: the narrow model would have a mesh of its own.
    values["train"].setdefault("parallel", {}).update(shard=parallel.shard, replicate=parallel.replicate)
    values["train"]["threads"] = 1
    values["schedule"] |= {key: getattr(recipe.schedule, key) for key in ("max_staleness", "pipelined")}
    names = {"nodes", "devices_per_node", "transfer", "environment", "max_restarts"}
    values["cluster"] = recipe.cluster.model_dump(mode="json", include=names) | PATIENCE | {"address": address}
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    values["cluster"]["placement"] = {
        ",".join(roles): format_devices(devices) for roles, devices in placement.groups().items()
    }
    rehearsal.replaced += [f"the service {name}: it is not started" for name in recipe.cluster.services]
    room = processes_that_fit() if address == HERE else math.inf
    if (num_workers := len({device for devices in placement.roles.values() for device in devices})) > room:
        raise UserError(f"this machine has memory for {room:g} of {num_workers} workers; rehearse it on a larger one")
    if recipe.needs_engine:
        keep_engine(recipe, values, rehearsal, len(placement.roles["rollout"]), room - num_workers)


def processes_that_fit() -> float:
    free = available_memory()
    return free // PROCESS_BYTES if free else math.inf


def keep_engine(recipe: Recipe, values: dict[str, Any], rehearsal: Rehearsal, num_engines: int, room: float) -> None:
    """`room`: processes that the machine's memory has room for beside the workers."""
    engine = recipe.rollout.engine
    values["rollout"]["max_sequences"] = MAX_SEQUENCES
    if engine.in_process or num_engines > room:
        values["rollout"]["engine"] = {"name": "native"}
        if not engine.in_process:
            lack = f"this machine has no memory for {num_engines} more processes"
            rehearsal.replaced.append(f"{engine.name} in processes of its own: Corral's engine in each worker; {lack}")
        return
    if engine.name == "native" or (engine.python is None and importlib.util.find_spec(engine.name) is None):
        values["rollout"]["engine"] = {"name": "native", "own_process": True}
        if engine.name != "native":
            rehearsal.replaced.append(f"{engine.name}, which is not installed here: Corral's engine in its own process")
        return
    kept = engine.model_dump(mode="json", include={"name", "python", "arguments"})
    values["rollout"]["engine"] = kept | {"memory_fraction": 0.5 / num_engines}
    if engine.tensor_parallel > 1:
        rehearsal.replaced.append("engines over several devices: one on each, because they cannot share a GPU")


# --- something to search in


def use_own_retriever(values: dict[str, Any], folder: Path) -> None:
    """Replaces the recipe's retriever by one of the run's own, over sums."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    index = str((folder / "index").absolute())
    values["cluster"]["services"] = {SERVICE: {"retriever": index, "port": port}}
    for environment in (values.get("environment"), *values.get("environments", {}).values()):
        if environment is not None and environment.get("name") == "search":
            options = environment.get("options", {})
            environment["options"] = {key: options[key] for key in ("topk", "prompt") if key in options}
            environment["options"]["retriever"] = f"http://127.0.0.1:{port}"


# --- what the small recipe needs


def prepare(rehearsal: Rehearsal) -> None:
    """Makes the small models, and the retriever's index."""
    folder, small, full = rehearsal.folder, rehearsal.recipe, rehearsal.full
    folder.mkdir(parents=True, exist_ok=True)
    if small.model.path == str(folder / "model"):
        write_whole_folder(folder / "model", partial(save_narrow_model, read_config(full.model.path), rehearsal.mesh))
    if full.reward_model.path is not None:
        config = read_config(full.reward_model.path)
        write_whole_folder(folder / "reward_model", partial(save_narrow_model, config, {}, scores=True))
    if SERVICE in small.cluster.services:
        build_index(folder / "index")


def build_index(index: Path) -> None:
    from corral.retrieval.index import build

    corpus = index.with_suffix(".jsonl")
    passages = [{"id": str(one), "contents": f"{one} + {one}\nis {2 * one}."} for one in range(NUM_PASSAGES)]
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    build(corpus, index, "bm25")
