"""The contract of environments, as checks that each must pass before a model is trained in it: `corral env test`.

Each check runs episodes and raises `CheckFailed` with what was wrong. No call of the environment is waited for without
end: one that never returns is interrupted, whether it waits or computes.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from corral.child_process import allowed_environment
from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.envs.base import Env, EnvSet, StepResult, uses_rewards
from corral.envs.baselines import Baseline, baseline_of, random_policy_rng, reply_of
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Rollout
from corral.rewards.scorer_pool import ScorerPool, ScorerPools, make_scorer
from corral.rewards.worker_pool import encode_bytes

NUM_COMPARED = 5
"""Episodes that are run again and compared."""
OTHER_PROCESS_S = 120.0
GRACE_S = 1.0
"""Seconds after its deadline at which a call that does not even yield is interrupted."""
DEFAULT_REPLIES = ("<answer>1</answer>", "I don't know.", "")
"""Replies to an environment that has no random policy."""
# fmt: off
MALFORMED_REPLIES = (
    "", " \n\t ", "\x00", "\x1b[2J\x07\x08", "<answer></answer>", "<answer>   </answer>", "<answer>",
    "</answer>", "</answer>up<answer>", "<answer><answer></answer></answer>",
    "<answer>no such action</answer>", "<answer>left right</answer>",
    "<answer>\nnothing\n</answer>\n<answer>", "<ANSWER>nothing</ANSWER>",
    "<answer>{turn} {0} %s \\1 ${x}</answer>", "<answer>" * 1000, "<answer>x</answer>" * 1000,
    "<|im_end|><|im_start|>assistant", "<answer><|im_end|></answer>", '{"name": "move", "arguments": {"to": ',
    "<search></search><tool_call></tool_call><information></information>", "None", "-1", "1e999", "nan", "٣",
    "Ｌｅｆｔ", "\u202eleft\u202c", "a\u0301" * 50, "👩‍👩‍👧‍👦🀄️", "\ud800", "\ufeff<answer>\u200b</answer>",
    "x" * 200_000, "\n" * 10_000,
)
# fmt: on
"""Replies that a model may come up with and nobody thinks of."""
NUM_RANDOM_REPLIES = 40
PIECES = ("<answer>", "</answer>", "<think>", "</think>", "<", ">", "/", "\\", "(", "[", "{", "}", "*", "\n", " ")

Answer = TypeVar("Answer")
Transcript = list[Any]
"""An episode: the first messages, then replies and results, as JSON has them."""


class CheckFailed(Exception):
    """What is wrong with the environment."""


@dataclass(frozen=True)
class EnvReport:
    first_messages: list[Message]
    passed: list[str]
    failed: list[str]
    steps_per_s: float
    baseline: Baseline
    notes: Sequence[str] = ()


def check_environment(environment: Environment, rows: Sequence[Row], max_turns: int, seed: int) -> EnvReport:
    """All checks, then the baselines over all rows."""
    with open_trial(environment, rows, max_turns, seed) as trial:
        passed, failed = [], []
        for check in (
            check_same_seed,
            check_other_process,
            check_malformed_replies,
            check_close,
            check_all_rows,
            check_optimal_policy,
        ):
            try:
                passed.append(asyncio.run(check(trial)))
            except CheckFailed as error:
                failed.append(str(error))
        if failed:
            return EnvReport([], passed, failed, 0.0, Baseline())
        first = asyncio.run(trial.run_episode(rows[0], seed))[0]["messages"]
        baseline = asyncio.run(baseline_of(trial.make, rows, max_turns, seed, environment.timeout_s))
        notes = asyncio.run(find_seeded_game(trial))
        return EnvReport(first, passed, failed, asyncio.run(measure_steps_per_s(trial)), baseline, notes)


@dataclass(frozen=True)
class EnvTrial:
    """An environment that is being checked."""

    environment: Environment
    make: Callable[[], Env]
    rows: Sequence[Row]
    max_turns: int
    seed: int

    def new(self) -> Env:
        try:
            return self.make()
        except UserError:
            raise
        except Exception as error:
            raise CheckFailed(f"it can't be made: {error_line(error)}") from error

    async def call(self, label: str, call: Awaitable[Answer], env: Env) -> Answer:
        """The answer of a call, in time; whatever it raises is a CheckFailed."""

        async def labeled() -> Answer:
            try:
                return await call
            except (Exception, SystemExit) as error:
                raise CheckFailed(f"{label}: {error_line(error)}") from error

        if env.bounds_itself:
            return await labeled()
        timeout_s = self.environment.timeout_s
        with interrupt_after(timeout_s + GRACE_S):
            try:
                return await asyncio.wait_for(labeled(), timeout_s)
            except TimeoutError as error:
                raise CheckFailed(f"{label}: no answer within {timeout_s:g} s") from error

    async def step(self, env: Env, reply: str) -> StepResult:
        return checked_result(await self.call(f"step({reply!r:.60})", env.step(reply), env))

    async def random_reply(self, env: Env, rng: random.Random) -> str:
        if not env.has_policy("random_reply"):
            return rng.choice(DEFAULT_REPLIES)
        reply = await self.call("random_reply", reply_of(env.random_reply(rng)), env)
        if not isinstance(reply, str):
            raise CheckFailed(f"random_reply returned {reply!r:.100}, which is not text")
        return reply

    @contextlib.asynccontextmanager
    async def begun(self, row: Row, seed: int) -> AsyncIterator[tuple[Env, list[Message]]]:
        """An environment after its reset, and its first messages."""
        env = self.new()
        try:
            yield env, checked_messages(await self.call("reset", env.reset(row, seed), env), "reset")
        finally:
            with contextlib.suppress(CheckFailed):
                await self.call("close", env.close(), env)

    async def run_episode(self, row: Row, seed: int, policy_seed: int | None = None) -> Transcript:
        """An episode with random replies."""
        rng = random_policy_rng(seed if policy_seed is None else policy_seed)
        async with self.begun(row, seed) as (env, messages):
            transcript: Transcript = [{"messages": messages}]
            for _ in range(self.max_turns):
                reply = await self.random_reply(env, rng)
                result = await self.step(env, reply)
                transcript.append({"reply": reply, **asdict(result)})
                if result.done:
                    break
        return transcript

    async def run_compared(self) -> list[Transcript]:
        """The episodes that are compared, in the types of JSON."""
        episodes = [await self.run_episode(row, self.seed + n) for n, row in enumerate(self.rows[:NUM_COMPARED])]
        plain: list[Transcript] = json.loads(json.dumps(episodes, default=encode_bytes))
        return plain


@contextlib.contextmanager
def open_trial(environment: Environment, rows: Sequence[Row], max_turns: int, seed: int) -> Iterator[EnvTrial]:
    make = functools.partial(ScorerPool, variables=environment.env)
    pools = ScorerPools({"": make_scorer(environment, make)} if uses_rewards(environment) else {})
    with (
        contextlib.closing(pools),
        contextlib.closing(EnvSet({"": environment}, pools.by_tag, Rollout(max_turns=max_turns))) as envs,
    ):
        yield EnvTrial(environment, envs.factories[""].make, rows, max_turns, seed)


# --- the checks; each returns what it has found


async def check_same_seed(trial: EnvTrial) -> str:
    compare(await trial.run_compared(), await trial.run_compared(), "run again with the same seed")
    return f"the same seed is the same episode ({min(NUM_COMPARED, len(trial.rows))} episodes)"


async def check_other_process(trial: EnvTrial) -> str:
    compare(await trial.run_compared(), run_in_other_process(trial), "run in another process with the same seed")
    return "in another process, too"


async def find_seeded_game(trial: EnvTrial) -> list[str]:
    """A note where the same replies to the same row end otherwise with another seed, as another sample has it."""
    for row in trial.rows[:NUM_COMPARED]:
        first, other = [await trial.run_episode(row, trial.seed + n, trial.seed) for n in range(2)]
        if first != other:
            return [
                "the same row and replies are another episode with another seed: that may be chance within a game, but "
                "a prompt's samples are compared with each other, so take what the game is (a board, a secret) from "
                "the row"
            ]
    return []


async def check_malformed_replies(trial: EnvTrial) -> str:
    """They may not raise, and one that the environment counts as no action may not change the state."""
    rng, num_ignored = random.Random(trial.seed), 0
    replies = list(malformed_replies(rng))
    for number, reply in enumerate(replies):
        row = trial.rows[number % len(trial.rows)]
        async with trial.begun(row, number) as (env, _):
            before = await trial.step(env, await trial.random_reply(env, rng))
            if not before.done:
                num_valid = num_valid_actions(env)
                after = await trial.step(env, reply)
                if num_valid is not None and num_valid_actions(env) == num_valid:
                    num_ignored += 1
                    if before.state != after.state:
                        raise CheckFailed(f"step({reply!r:.60}) was no valid action, and changed the state")
        if before.done:  # then it is the first reply
            async with trial.begun(row, number) as (env, _):
                await trial.step(env, reply)
    return f"{len(replies)} malformed replies raised nothing; {num_ignored} counted as no action and changed no state"


async def check_close(trial: EnvTrial) -> str:
    env = trial.new()
    await trial.call("close before reset", env.close(), env)
    env = trial.new()
    with contextlib.suppress(CheckFailed):
        await trial.call("reset", env.reset(Row([], None, "", {}), 0), env)
    await trial.call("close after a reset with an empty row", env.close(), env)
    env = trial.new()
    await trial.call("reset", env.reset(trial.rows[0], 0), env)
    await trial.call("close in the middle of an episode", env.close(), env)
    return "it can be closed at any time"


async def check_all_rows(trial: EnvTrial) -> str:
    """No episode may fail."""
    episodes = [await trial.run_episode(row, trial.seed + number) for number, row in enumerate(trial.rows)]
    num_done = sum(bool(episode[-1].get("done")) for episode in episodes)
    return f"{len(episodes)} episodes, {num_done} to their end"


async def check_optimal_policy(trial: EnvTrial) -> str:
    """It may be wrong about a board but not fail."""
    async with trial.begun(trial.rows[0], trial.seed) as (env, _):
        if not env.has_policy("best_reply"):
            return "it has no optimal policy, so no optimal baseline"
        for _ in range(trial.max_turns):
            reply = await trial.call("best_reply", reply_of(env.best_reply()), env)
            if reply is None or (await trial.step(env, reply)).done:
                break
    return "its optimal policy runs"


async def measure_steps_per_s(trial: EnvTrial) -> float:
    """Steps per second, one episode after the other, without what the checks around each call take."""
    started, num_steps = time.perf_counter(), 0
    for number, row in enumerate(trial.rows):
        env, rng = trial.make(), random.Random(number)
        await env.reset(row, number)
        for _ in range(trial.max_turns):
            num_steps += 1
            if (await env.step(await trial.random_reply(env, rng))).done:
                break
        await env.close()
    return num_steps / (time.perf_counter() - started)


# --- helpers of the checks


def malformed_replies(rng: random.Random) -> Iterator[str]:
    """Known ones, then random texts, half of them of pieces of tags."""
    yield from MALFORMED_REPLIES
    for number in range(NUM_RANDOM_REPLIES):
        length = rng.randrange(1, 60)
        if number % 2:
            yield "".join(rng.choice(PIECES) for _ in range(length))
        else:
            yield "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(length))


def num_valid_actions(env: Env) -> int | None:
    """Valid actions so far, if its summary has them."""
    summary = env.summary()
    if "valid_actions" not in summary or "turns" not in summary:
        return None
    return round(summary["valid_actions"] * summary["turns"])


def checked_result(result: Any) -> StepResult:
    if not isinstance(result, StepResult):
        raise CheckFailed(f"step returned {result!r:.100}, which is not a StepResult")
    checked_messages(result.messages, "step", may_be_empty=result.done)
    numbers = result.metrics if result.reward is None else {"the reward": result.reward, **result.metrics}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckFailed(f"step: {name} must be a finite number; it is {value!r}")
    if not isinstance(result.done, bool):
        raise CheckFailed(f"step: done must be true or false; it is {result.done!r}")
    for name in ("error", "state", "closing"):
        if not isinstance(getattr(result, name), str | None):
            raise CheckFailed(f"step: {name} must be text; it is {getattr(result, name)!r:.100}")
    return result


def checked_messages(messages: Any, where: str, may_be_empty: bool = False) -> list[Message]:
    sound = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not sound or not (messages or may_be_empty):
        raise CheckFailed(
            f"{where}: messages must be a list of {{role, content}}, and not empty; got {messages!r:.100}"
        )
    return messages  # type: ignore[no-any-return]


def compare(first: list[Transcript], second: list[Transcript], when: str) -> None:
    for one, other in zip(first, second, strict=True):
        for turn, (was, now) in enumerate(zip(one, other, strict=False)):
            if was != now:
                key = next(key for key in was if was[key] != now.get(key))
                place = "its first messages" if turn == 0 else f"`{key}` of turn {turn}"
                raise CheckFailed(f"{when}, {place} differ: {was[key]!r:.150} and then {now.get(key)!r:.150}")
        if len(one) != len(other):
            raise CheckFailed(f"{when}, an episode took {len(other) - 1} turns instead of {len(one) - 1}")


def run_in_other_process(trial: EnvTrial) -> list[Transcript]:
    """Episodes of a new process, whose hashes of text are other ones."""
    arguments = (trial.environment, list(trial.rows[:NUM_COMPARED]), trial.max_turns, trial.seed)
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            input=pickle.dumps(arguments),
            stdout=subprocess.PIPE,
            timeout=OTHER_PROCESS_S,
            env={**allowed_environment(trial.environment.env), "PYTHONHASHSEED": str(1 + trial.seed % 1000)},
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"in another process it took longer than {OTHER_PROCESS_S:g} s") from error
    if ended.returncode:
        raise CheckFailed(f"in another process it failed: {ended.stdout.decode() or 'see above'}")
    episodes: list[Transcript] = json.loads(ended.stdout)
    return episodes


def main() -> None:
    """The other process. What the environment prints goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open_trial(*pickle.load(sys.stdin.buffer)) as trial, output:
        try:
            json.dump(asyncio.run(trial.run_compared()), output)
        except CheckFailed as error:
            output.write(str(error))
            sys.exit(1)


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """TimeoutError in the midst of whatever runs, if it takes longer. Only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it did not even yield within {seconds:g} s: what blocks needs plain `def` methods")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
