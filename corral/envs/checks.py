"""Tries an environment out before a model is trained in it: `corral env test`.

Each check plays games and raises `CheckFailed` with what was wrong. No call of the environment is waited for without
end: one that never returns is interrupted, whether it waits or computes.
"""

import asyncio
import contextlib
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.envs.agents import Floor, answered, floor_of, has_player
from corral.envs.base import Env, StepResult, bounds_itself, summary_of
from corral.envs.odd_replies import odd_replies
from corral.envs.registry import EnvSet, uses_rewards
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Rollout
from corral.rewards.pool import ScorerPool

NUM_COMPARED = 5
"""Games that are played again."""
OTHER_PROCESS_S = 120.0
GRACE_S = 1.0
"""After which a call that does not even yield is interrupted."""
NOISE = ("<answer>1</answer>", "I don't know.", "")
"""What is said to an environment that has no random player."""

Answer = TypeVar("Answer")
Transcript = list[Any]
"""Of a game: the first messages, then replies and results, as JSON has them."""


class CheckFailed(Exception):
    """What is wrong with the environment."""


@dataclass(frozen=True)
class Trial:
    """An environment that is being tried out."""

    environment: Environment
    make: Callable[[], Env]
    rows: Sequence[Row]
    max_turns: int
    seed: int

    async def call(self, what: str, call: Awaitable[Answer], env: Any) -> Answer:
        timeout_s = self.environment.timeout_s
        if bounds_itself(env):
            return await self._named(what, call)
        with interrupting(timeout_s + GRACE_S):
            try:
                return await asyncio.wait_for(self._named(what, call), timeout_s)
            except TimeoutError as error:
                raise CheckFailed(f"{what}: no answer within {timeout_s:g} s") from error

    async def _named(self, what: str, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except (Exception, SystemExit) as error:
            raise CheckFailed(f"{what}: {error_line(error)}") from error

    def new(self) -> Any:
        try:
            return self.make()
        except UserError:
            raise
        except Exception as error:
            raise CheckFailed(f"it can't be made: {error_line(error)}") from error

    async def began(self, row: Row, seed: int) -> Any:
        env = self.new()
        await self.call("reset", env.reset(row, seed), env)
        return env

    async def play(self, row: Row, seed: int) -> Transcript:
        """A game with random replies."""
        env = self.new()
        rng = random.Random(f"player {seed}")
        try:
            messages = checked_messages(await self.call("reset", env.reset(row, seed), env), "reset")
            said: Transcript = [{"messages": messages}]
            for _ in range(self.max_turns):
                reply = await self.reply(env, rng)
                result = checked(await self.call(f"step({reply!r:.60})", env.step(reply), env))
                said.append({"reply": reply, **vars(result)})
                if result.done:
                    break
        finally:
            with contextlib.suppress(CheckFailed):
                await self.call("close", env.close(), env)
        return said

    async def reply(self, env: Any, rng: random.Random) -> str:
        if not has_player(env, "random_reply"):
            return rng.choice(NOISE)
        reply = await self.call("random_reply", ask(env, "random_reply", rng), env)
        if not isinstance(reply, str):
            raise CheckFailed(f"random_reply returned {reply!r:.100}, which is not text")
        return reply


@dataclass(frozen=True)
class Report:
    first_messages: list[Message]
    passed: list[str]
    failed: list[str]
    steps_per_s: float
    floor: Floor


def try_out(environment: Environment, rows: Sequence[Row], max_turns: int, seed: int) -> Report:
    """All checks, then the floor and the ceiling over all rows."""
    with opened(environment, rows, max_turns, seed) as trial:
        passed, failed = [], []
        for check in (same_again, same_in_another_process, odd_replies_are_harmless, closes, plays, plays_best):
            try:
                passed.append(asyncio.run(check(trial)))
            except CheckFailed as error:
                failed.append(str(error))
        if failed:
            return Report([], passed, failed, 0.0, Floor())
        first = asyncio.run(trial.play(rows[0], seed))[0]["messages"]
        floor = asyncio.run(floor_of(trial.make, rows, max_turns, seed, environment.timeout_s))
        return Report(first, passed, failed, asyncio.run(measure_pace(trial)), floor)


@contextlib.contextmanager
def opened(environment: Environment, rows: Sequence[Row], max_turns: int, seed: int) -> Iterator[Trial]:
    pools = {"": ScorerPool(environment.reward)} if uses_rewards(environment) else {}
    try:
        envs = EnvSet({"": environment}, pools, Rollout(max_turns=max_turns))
        try:
            yield Trial(environment, envs.kinds[""].make, rows, max_turns, seed)
        finally:
            envs.close()
    finally:
        for pool in pools.values():
            pool.close()


async def play_all(trial: Trial) -> list[Transcript]:
    return [await trial.play(row, trial.seed + number) for number, row in enumerate(trial.rows)]


async def play_some(trial: Trial) -> list[Transcript]:
    games = [await trial.play(row, trial.seed + number) for number, row in enumerate(trial.rows[:NUM_COMPARED])]
    plain: list[Transcript] = json.loads(json.dumps(games))
    return plain


async def ask(env: Any, player: str, *arguments: Any) -> Any:
    return await answered(getattr(env, player)(*arguments))


async def plays_best(trial: Trial) -> str:
    """With the solver, if there is one, which may be wrong about a board but not fail."""
    env = await trial.began(trial.rows[0], trial.seed)
    try:
        if not has_player(env, "best_reply"):
            return "it has no solver, so no ceiling"
        for _ in range(trial.max_turns):
            reply = await trial.call("best_reply", ask(env, "best_reply"), env)
            if reply is None or checked(await trial.call(f"step({reply!r:.60})", env.step(reply), env)).done:
                break
    finally:
        with contextlib.suppress(CheckFailed):
            await trial.call("close", env.close(), env)
    return "its solver plays"


async def measure_pace(trial: Trial) -> float:
    """Steps per second, one game after the other, without what the checks around each call take."""
    started, num_steps = time.perf_counter(), 0
    for number, row in enumerate(trial.rows):
        env: Any = trial.make()
        rng = random.Random(number)
        await env.reset(row, number)
        for _ in range(trial.max_turns):
            num_steps += 1
            if (await env.step(await trial.reply(env, rng))).done:
                break
        await env.close()
    return num_steps / (time.perf_counter() - started)


async def same_again(trial: Trial) -> str:
    compare(await play_some(trial), await play_some(trial), "played again with the same seed")
    return f"the same seed is the same game ({min(NUM_COMPARED, len(trial.rows))} games)"


async def same_in_another_process(trial: Trial) -> str:
    compare(await play_some(trial), play_elsewhere(trial), "played in another process with the same seed")
    return "in another process, too"


async def odd_replies_are_harmless(trial: Trial) -> str:
    """They may not raise, and one that the environment says had no action may not change the state."""
    rng, num_ignored = random.Random(trial.seed), 0
    replies = list(odd_replies(rng))
    for number, odd in enumerate(replies):
        row = trial.rows[number % len(trial.rows)]
        env = await trial.began(row, number)
        try:
            before = checked(await trial.call("step", env.step(await trial.reply(env, rng)), env))
            if before.done:  # then it is said first
                await trial.call("close", env.close(), env)
                env = await trial.began(row, number)
            num_valid = count_valid(env)
            after = checked(await trial.call(f"step({odd!r:.60})", env.step(odd), env))
            if not before.done and num_valid is not None and count_valid(env) == num_valid:
                num_ignored += 1
                if before.state != after.state:
                    raise CheckFailed(f"step({odd!r:.60}) was no valid action, and changed the state")
        finally:
            with contextlib.suppress(CheckFailed):
                await trial.call("close", env.close(), env)
    return f"{len(replies)} odd replies raised nothing; {num_ignored} were told to have no action and changed no state"


def count_valid(env: Any) -> int | None:
    """Valid actions so far, where its summary tells."""
    summary = summary_of(env)
    if "valid_actions" not in summary or "turns" not in summary:
        return None
    num_valid: float = summary["valid_actions"] * summary["turns"]
    return round(num_valid)


async def closes(trial: Trial) -> str:
    """Whatever happened before."""
    env = trial.new()
    await trial.call("close before reset", env.close(), env)
    env = trial.new()
    with contextlib.suppress(CheckFailed):
        await trial.call("reset", env.reset(Row([], None, "", {}), 0), env)
    await trial.call("close after a reset with an empty row", env.close(), env)
    env = await trial.began(trial.rows[0], 0)
    await trial.call("close in the middle of a game", env.close(), env)
    return "it can be closed at any time"


async def plays(trial: Trial) -> str:
    """As many games as asked for, none of which may fail."""
    games = await play_all(trial)
    num_done = sum(bool(game[-1].get("done")) for game in games)
    return f"{len(games)} games played, {num_done} to their end"


def checked(result: Any) -> StepResult:
    if not isinstance(result, StepResult):
        raise CheckFailed(f"step returned {result!r:.100}, which is not a StepResult")
    checked_messages(result.messages, "step", may_be_empty=result.done)
    for name, value in {"the reward": result.reward, **result.metrics}.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckFailed(f"step: {name} must be a finite number; it is {value!r}")
    if not isinstance(result.done, bool):
        raise CheckFailed(f"step: done must be true or false; it is {result.done!r}")
    for name in ("error", "state", "closing"):
        if not isinstance(getattr(result, name), str | None):
            raise CheckFailed(f"step: {name} must be text; it is {getattr(result, name)!r:.100}")
    return result


def checked_messages(messages: Any, where: str, may_be_empty: bool = False) -> Any:
    sound = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not sound or not (messages or may_be_empty):
        raise CheckFailed(
            f"{where}: messages must be a list of {{role, content}}, and not empty; got {messages!r:.100}"
        )
    return messages


def compare(first: list[Transcript], second: list[Transcript], when: str) -> None:
    for one, other in zip(first, second, strict=True):
        for turn, (said, said_then) in enumerate(zip(one, other, strict=False)):
            if said != said_then:
                key = next(key for key in said if said[key] != said_then.get(key))
                place = "its first messages" if turn == 0 else f"`{key}` of turn {turn}"
                raise CheckFailed(f"{when}, {place} differ: {said[key]!r:.150} and then {said_then.get(key)!r:.150}")
        if len(one) != len(other):
            raise CheckFailed(f"{when}, a game took {len(other) - 1} turns instead of {len(one) - 1}")


def play_elsewhere(trial: Trial) -> list[Transcript]:
    """In a new process, whose hashes of text are other ones."""
    wanted = (trial.environment, list(trial.rows[:NUM_COMPARED]), trial.max_turns, trial.seed)
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from corral.envs.checks import main; main()"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            input=pickle.dumps(wanted),
            stdout=subprocess.PIPE,
            timeout=OTHER_PROCESS_S,
            env={**os.environ, "PYTHONHASHSEED": str(1 + trial.seed % 1000)},
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"in another process it took longer than {OTHER_PROCESS_S:g} s") from error
    if ended.returncode:
        raise CheckFailed(f"in another process it failed: {ended.stdout.decode() or 'see above'}")
    games: list[Transcript] = json.loads(ended.stdout)
    return games


def main() -> None:
    """The other process. What the environment prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with opened(*pickle.load(sys.stdin.buffer)) as trial, answer:
        try:
            json.dump(asyncio.run(play_some(trial)), answer)
        except CheckFailed as error:
            answer.write(str(error))
            sys.exit(1)


@contextlib.contextmanager
def interrupting(after_s: float) -> Iterator[None]:
    """TimeoutError in the midst of whatever runs, if it takes longer. Only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it did not even yield within {after_s:g} s: what blocks needs plain `def` methods")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
