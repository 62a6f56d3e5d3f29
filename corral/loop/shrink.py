"""`--shrink`: any recipe as one step of a model of a million parameters, to see that it runs before it costs anything.

What is kept is how it works: environment, reward, algorithm, which roles have devices of their own, epochs and updates.
What is not: model, data, sizes, how models are spread over devices, and where runs are kept.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.recipe.placement import format_devices, resolve_placement
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Logging, Recipe

SHORT_PROMPT, LONG_PROMPT = 256, 1536
"""Tokens, which are bytes, of the prompt of a question and of one that explains a game's rules."""
NUM_ROWS = 32
SERVICE = "retriever"
NUM_PASSAGES = 20


def shrink(recipe: Recipe, nodes: int = 1) -> Recipe:
    """Returns the small recipe: on one node in one process, on several with as many devices as there are sets of
    roles."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    is_question = all(one.name == "question" for one in recipe.tagged_environments.values())
    values |= {
        "name": f"{recipe.name}-shrunk",
        "model": {"path": "blank-1m", "dtype": "float32"},
        "data": small_data(recipe, SHORT_PROMPT if is_question else LONG_PROMPT),
        "rollout": small_rollout(recipe, is_question),
        "schedule": {"steps": 1},
        "checkpoint": {"resume": "never"},
        "logging": {},
        "cluster": {"runtime": "local"},
    }
    values["batch"] = small_batch(recipe, values)
    if not recipe.needs_engine:
        del values["rollout"]
    values["train"] = {"gradient_checkpointing": recipe.train.gradient_checkpointing}
    if recipe.data.validation is not None:
        values["validation"] = {"before_training": False, "max_prompts": 2}
    for section, key in (("critic", "path"), ("critic", "warmup_steps"), ("reward_model", "shard")):
        values.get(section, {}).pop(key, None)
    if values.get("reference"):
        values["reference"] = {"path": "blank-1m"}  # also instead of a teacher's endpoint: it has other tokens
    shrink_algorithm(values.get("algorithm", {}))
    # These are other rows than the reward and the environment are made for.
    if recipe.needs_engine and not recipe.environments:
        values.setdefault("environment", {})["max_error_rate"] = None
    for environment in values.get("environments", {}).values():
        environment["max_error_rate"] = None
    if nodes > 1:
        values["cluster"] = small_cluster(recipe, nodes)
        if "placement" in values["cluster"]:
            values["schedule"] |= {key: getattr(recipe.schedule, key) for key in ("max_staleness", "pipelined")}
    if any(one.name == "search" and one.options.get("do_search", True) for one in recipe.tagged_environments.values()):
        use_own_retriever(values)
    return Recipe.model_validate(values)


def small_data(recipe: Recipe, max_prompt_tokens: int) -> dict[str, Any]:
    data: dict[str, Any] = {"max_prompt_tokens": max_prompt_tokens, "overlong": "truncate_left"}
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
    prompts, samples = min(batch.prompts_per_step, 4), min(batch.samples_per_prompt, 4)
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


def shrink_algorithm(algorithm: dict[str, Any]) -> None:
    algorithm.get("aggregation", {}).pop("norm", None)
    if "max_rounds" in algorithm.get("dynamic_sampling", {}):
        algorithm["dynamic_sampling"]["max_rounds"] = 1
    if algorithm.get("shaping", {}).get("buffer_tokens"):
        algorithm["shaping"]["buffer_tokens"] = min(algorithm["shaping"]["buffer_tokens"], 8)


def small_cluster(recipe: Recipe, nodes: int) -> dict[str, Any]:
    """Returns a cluster with one device for each set of roles; the first set gets what is left over."""
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    groups = list(placement.groups())
    devices_per_node = -(-len(groups) // nodes)
    cluster: dict[str, Any] = {"nodes": nodes, "devices_per_node": devices_per_node}
    if len(groups) > 1:
        first = nodes * devices_per_node - len(groups) + 1
        spans = [range(first), *(range(first + place, first + place + 1) for place in range(len(groups) - 1))]
        named = zip(groups, spans, strict=True)
        cluster["placement"] = {",".join(roles): format_devices(span) for roles, span in named}
    return cluster


# --- something to search in


def use_own_retriever(values: dict[str, Any]) -> None:
    """Replaces the recipe's retriever by one of the run's own, over sums."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    index = Path(Logging().runs) / f"{values['name']}-index"
    values["cluster"]["services"] = {SERVICE: {"retriever": str(index.absolute()), "port": port}}
    for environment in (values.get("environment"), *values.get("environments", {}).values()):
        if environment is not None and environment.get("name") == "search":
            options = environment.get("options", {})
            environment["options"] = {key: options[key] for key in ("topk", "prompt") if key in options}
            environment["options"]["retriever"] = f"http://127.0.0.1:{port}"


def prepare_index(shrunk: Recipe) -> None:
    """Builds the retriever's index, where the recipe needs one and it is not there yet."""
    from corral.retrieval.index import MANIFEST, build

    service = shrunk.cluster.services.get(SERVICE)
    if service is None or service.retriever is None or (Path(service.retriever) / MANIFEST).is_file():
        return
    index = Path(service.retriever)
    index.parent.mkdir(parents=True, exist_ok=True)
    corpus = index.with_suffix(".jsonl")
    passages = [{"id": str(one), "contents": f"{one} + {one}\nis {2 * one}."} for one in range(NUM_PASSAGES)]
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    build(corpus, index, "bm25")
