"""Checks of what a recipe needs: devices, memory and disk, its chat template and prompts, its reward function."""

import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from corral.cluster.doctor.findings import Finding, NodeRef
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.data.supervised import prepare_prompts
from corral.envs.base import EnvSet, uses_rewards
from corral.model.families import checked_plan
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.memory import human_bytes, num_trained_parameters
from corral.recipe.placement import format_devices
from corral.recipe.plan import Plan
from corral.recipe.schema import Environment, Recipe, Reward, Rollout
from corral.rewards.scorer_pool import ScorerPool

TIGHT = 0.9
SMALLER = (
    "`corral plan` says what takes it; less with `train.parallel`, `train.offload`, `train.gradient_checkpointing` "
    "or a smaller `batch.max_tokens_per_micro_batch`"
)
NUM_ROWS = 4
BUDGET_S = 30.0  # for all trial calls of a reward; and a step may spend as much before it is a warning
WRONG = "I do not know, but I guess "  # repeated, a reply that is as long as a reply can be
CHARACTERS_PER_TOKEN = 4


def read_recipe(path: Path, overrides: Sequence[str], has_gpus: bool) -> tuple[Plan | None, list[Finding]]:
    """The recipe's plan, unless something is wrong with it. `has_gpus`: `model.dtype: auto` depends on it."""
    try:
        recipe = load_recipe(path, overrides)
        plan = checked_plan(recipe, device="cuda" if has_gpus else "cpu")
    except RecipeError as error:
        return None, [Finding("error", "recipe", problem) for problem in error.problems]
    except UserError as error:
        return None, [Finding("error", "recipe", str(error))]
    warnings = [Finding("warning", "recipe", warning) for warning in plan.warnings]
    return plan, warnings or [Finding("ok", "recipe", f"{path}: nothing to object to")]


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of the checkpoints that are kept and of one being written: weights, and the optimizer's float32 state."""
    if plan.shape is None:
        return 0
    models = 2 if plan.algorithm.needs_critic else 1
    state = 8 if plan.weight_bytes >= 4 else 12
    num_parameters = num_trained_parameters(plan.recipe, plan.shape)
    return num_parameters * (plan.weight_bytes + state) * models * (num_kept(plan) + 1)


def num_kept(plan: Plan) -> int:
    """Number of checkpoints that are kept at the same time, of those that are saved by step."""
    settings = plan.recipe.checkpoint
    if settings.keep != "all":
        return settings.keep
    return (plan.num_steps or 0) // settings.every + 1 if settings.every else 1


@dataclass(frozen=True)
class NodeCapacity:
    devices: int  # that Ray hands out: GPUs, or worker slots
    gpu_bytes: tuple[int, ...]  # of each GPU; none on a node without
    memory: int


def check_devices(recipe: Recipe, capacities: Mapping[NodeRef, NodeCapacity]) -> Iterator[Finding]:
    """`capacities`: of the nodes of a cluster."""
    cluster = recipe.cluster
    wanted = f"`cluster` has {cluster.nodes} x {cluster.devices_per_node} devices"
    if sum(own.devices >= cluster.devices_per_node for own in capacities.values()) >= cluster.nodes:
        yield Finding("ok", "devices", f"{wanted}, and there are enough")
        return
    present = ", ".join(f"{own.devices} on {node.host}" for node, own in capacities.items())
    fix = "wait for the missing nodes (`corral check`), or change `cluster.nodes` and `cluster.devices_per_node`"
    yield Finding("error", "devices", f"{wanted}, and there are {present}", fix)


def check_fit(plan: Plan, capacities: Mapping[NodeRef, NodeCapacity]) -> Iterator[Finding]:
    """Checks whether the plan's memory fits the devices. `capacities`: in the order of the nodes' ranks."""
    nodes, per_node = list(capacities), plan.recipe.cluster.devices_per_node
    main_memory = dict.fromkeys(nodes, 0)  # bytes needed on nodes without GPUs
    found: list[Finding] = []
    for group in plan.memory:
        most = max(group.totals.values())
        for device in group.devices:
            if device // per_node >= len(nodes):
                continue  # reported by `check_devices`
            node, index = nodes[device // per_node], device % per_node
            sizes = capacities[node].gpu_bytes
            if not sizes:
                main_memory[node] += most
            elif index < len(sizes):
                user = f"device {device} ({'+'.join(group.roles)})"
                found += compare_memory(most, sizes[index], user, node, f"GPU {index}")
    for node, most in main_memory.items():
        found += compare_memory(most, capacities[node].memory, "the workers of the node together", node)
    yield from found
    if plan.memory and not found:
        largest = max(plan.memory, key=lambda group: max(group.totals.values()))
        size = human_bytes(max(largest.totals.values()))
        what = f"a device needs {size} at most, estimated (device {format_devices(largest.devices)}); that is there"
        yield Finding("ok", "memory fit", what)


def compare_memory(needs: int, present: int, user: str, node: NodeRef, device: str | None = None) -> Iterator[Finding]:
    if needs > TIGHT * present:
        level: Literal["error", "warning"] = "error" if needs > present else "warning"
        what = f"{user} will need {human_bytes(needs)}, estimated, of {human_bytes(present)}"
        yield Finding(level, "memory fit", what, SMALLER, (node,), device)


def check_chat(tokenizer: Any, recipe: Recipe) -> Iterator[Finding]:
    """Checks whether the chat template takes a conversation and only extends it (see `rollout/chat_rendering.py`)."""
    from corral.rollout.chat_rendering import DROPS_THOUGHTS, FIX, THOUGHTS, TURNS, ChatRenderer, find_breaks

    if not recipe.data.chat:
        return
    if not tokenizer.chat_template:
        what = "the model's tokenizer has no chat template"
        yield Finding("error", "chat template", what, "set `data.chat: false`, or give `model.chat_template`")
        return
    system = [Message(role="system", content=recipe.data.system)] if recipe.data.system else []
    several = recipe.rollout.max_turns > 1
    try:
        found = next(find_breaks(tokenizer, [*system, *TURNS]), None)
        thought = found or next(find_breaks(tokenizer, [*system, *THOUGHTS]), None)
    except Exception as error:  # templates raise their own
        what = f"the chat template refuses a plain conversation: {error_line(error)}"
        yield Finding("error" if several else "note", "chat template", what, FIX)
        return
    if several:
        try:  # as the rollout does it
            ChatRenderer(tokenizer, recipe.data.chat).continuation(
                [Message(role="user", content="And now?")], ended=True
            )
        except UserError as error:
            yield Finding("error", "chat template", str(error), FIX)
    if found is None and thought is None:
        yield Finding("ok", "chat template", "a conversation is only ever extended")
        return
    what = f"{found}" if found else f"{DROPS_THOUGHTS} ({thought}); Corral keeps what was generated"
    yield Finding("warning" if several else "note", "chat template", what, FIX if several else "")


def check_prompts(tokenizer: Any, recipe: Recipe, rows: Sequence[Row]) -> Iterator[Finding]:
    """`rows`: the first ones of the data."""
    data = recipe.data
    try:
        prompts, counts = prepare_prompts(tokenizer, rows, data, with_answers=recipe.trains_on_rows)
    except UserError as error:
        yield Finding("error", "prompts", f"of the first {len(rows)} rows: {error}")
        return
    left_out = counts.num_filtered + counts.num_truncated
    if left_out:
        what = f"{left_out} of the first {len(rows)} prompts have more than {data.max_prompt_tokens} tokens"
        yield Finding("warning", "prompts", what, "raise `data.max_prompt_tokens`, unless that is meant")
    else:
        longest = max(len(one.tokens) for prompt in prompts for one in (prompt, prompt.rejected) if one is not None)
        what = f"the longest of the first {len(rows)} prompts has {longest} tokens, of {data.max_prompt_tokens}"
        yield Finding("ok", "prompts", what)


# --- the reward function, called as a run calls it, in processes with deadlines


@dataclass(frozen=True)
class RewardCall:
    seconds: float
    reward: float | None
    error: str | None
    is_answer: bool  # the reply was the row's own answer


@dataclass(frozen=True)
class RewardTrial:
    calls: tuple[RewardCall, ...] = ()
    calls_at_once: int = 1  # in one process
    error: str = ""  # it could not be loaded


def try_reward(environment: Environment, rows: Sequence[Row], max_tokens: int) -> RewardTrial:
    """Scores each row's own answer, and a long reply that is wrong."""
    pool = None
    try:
        if not uses_rewards(environment):
            EnvSet({"": environment}, {}, Rollout()).close()
            return RewardTrial()
        pool = ScorerPool(environment.reward, environment.env)
        EnvSet({"": environment}, {"": pool}, Rollout()).close()
        pool.check()
        return RewardTrial(asyncio.run(score_all(pool, rows, max_tokens)), pool.calls_at_once)
    except UserError as error:
        return RewardTrial(error=str(error))
    finally:
        if pool is not None:
            pool.close()


async def score_all(pool: ScorerPool, rows: Sequence[Row], max_tokens: int) -> tuple[RewardCall, ...]:
    deadline, calls = time.monotonic() + BUDGET_S, []
    num_characters = max_tokens * CHARACTERS_PER_TOKEN
    long = (WRONG * (num_characters // len(WRONG) + 1))[:num_characters]
    for row in rows:
        for reply in (str(row.answer), long):
            if time.monotonic() < deadline:
                began = time.monotonic()
                score = await pool.score(reply, row)
                if score.response is not None:
                    [score] = await pool.score_group([score], row)
                calls.append(RewardCall(time.monotonic() - began, score.reward, score.error, reply is not long))
    return tuple(calls)


def check_reward(trial: RewardTrial, plan: Plan, reward: Reward | None = None) -> Iterator[Finding]:
    """`reward`: which one; None: the recipe's only one."""
    reward = reward or plan.recipe.environment.reward
    name = f"`{reward.name}`"
    if trial.error:
        fix = "`environment.reward` and `environment.name` must load on every node"
        yield Finding("error", "reward", trial.error, fix)
    if not trial.calls:
        return
    failed = [call for call in trial.calls if call.error]
    if failed:
        what = f"{name} failed in {len(failed)} of {len(trial.calls)} calls: {failed[0].error}"
        level: Literal["error", "warning"] = "error" if len(failed) == len(trial.calls) else "warning"
        yield Finding(level, "reward", what, "make it take such replies")
    usual, most = statistics.mean(call.seconds for call in trial.calls), max(call.seconds for call in trial.calls)
    if most > reward.timeout_s / 2 and not failed:
        what = f"{name} took {format_duration(most)} for one call, and is killed after {reward.timeout_s:g} s"
        yield Finding("warning", "reward", what, "raise `environment.reward.timeout_s`, or make it faster")
    workers = reward.workers * len(plan.placement.roles["rollout"])
    num_calls = plan.recipe.num_trajectories
    step_s = usual * math.ceil(num_calls / (workers * trial.calls_at_once))
    per_step = f"{num_calls} calls a step in {workers} process{'es' * (workers > 1)}"
    what = f"{name} takes {format_duration(usual)} a call; {per_step}: {format_duration(step_s)}"
    if step_s > BUDGET_S:
        yield Finding("warning", "reward", what, "raise `environment.reward.workers`, or make it faster")
    elif not failed:
        yield Finding("ok", "reward", what)
    rewarded = [(call.is_answer, call.reward) for call in trial.calls if not call.error and call.reward is not None]
    right, wrong = ([reward for is_answer, reward in rewarded if is_answer is which] for which in (True, False))
    if right and wrong and max(right) <= min(wrong):
        what = f"{name} gives the rows' own answers no more ({max(right):g}) than a wrong reply ({min(wrong):g})"
        yield Finding("note", "reward", what, "fine if it does not compare with the answer, or wants a form around it")


def format_duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
