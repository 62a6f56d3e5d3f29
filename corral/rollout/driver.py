"""The rollout driver plays environments against an engine and records what happened, token by token.

Everything is an environment; a question is one with a single step. All trajectories of a call are in flight at once.
A hung or raising environment costs its own trajectory and a bounded time, nothing else.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from corral.data.plugins import error_line, without_exit
from corral.data.rows import Row
from corral.data.trajectory import StopReason, Trajectory
from corral.envs.base import (
    Env,
    StepResult,
    bounds_itself,
    first_state,
    is_inline,
    num_last_turns,
    summary_of,
    tools_of,
)
from corral.envs.registry import EnvSet, Kind
from corral.recipe.errors import UserError
from corral.rollout.chat import Chat
from corral.rollout.engine import Completion, Engine, Finish, Memory, Sampling

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Prompt:
    prompt_id: int
    """Counted over the run; the group of its samples."""
    index: int
    """Of the row in its data set."""
    row: Row
    tokens: list[int]


@dataclass
class Driver:
    engine: Engine
    envs: EnvSet
    chat: Chat
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    """Of a trajectory: everything behind the prompt."""
    seed: int
    max_turn_tokens: int | None = None
    max_observation_tokens: int | None = None

    async def play(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        purpose: str = "train",
        on_group: Callable[[Prompt, list[Trajectory]], None] = lambda prompt, trajectories: None,
    ) -> list[Trajectory]:
        """Plays every prompt `samples_per_prompt` times; the result is in the order of prompts, then samples.

        Every environment is reset before the first token is generated, so that the engine sees all prompts at once
        and in the same order in every run; but for those of which only so many may be played at a time. `on_group`
        hears of each prompt when all of its samples are there.
        """
        groups = [
            [
                _Episode(self, prompt, sample, seed_of(self.seed, purpose, prompt.prompt_id, sample))
                for sample in range(samples_per_prompt)
            ]
            for prompt in prompts
        ]
        episodes = [episode for group in groups for episode in group]

        async def finish(group: list[_Episode]) -> list[Trajectory]:
            trajectories = await asyncio.gather(*(episode.play(sampling) for episode in group))
            on_group(group[0].prompt, trajectories)
            return trajectories

        try:
            await asyncio.gather(*(episode.reset() for episode in episodes if episode.kind.limit is None))
            finished = await asyncio.gather(*(finish(group) for group in groups))
        finally:
            unfinished = [episode for episode in episodes if episode.env is not None]
            await asyncio.gather(*(episode.close() for episode in unfinished))
        return [trajectory for group in finished for trajectory in group]


@dataclass
class _Episode:
    """One trajectory while it is being played."""

    driver: Driver
    prompt: Prompt
    sample: int
    seed: int
    env: Env | None = None
    state: str = ""
    """In which the next turn is taken."""
    tokens: list[int] = field(default_factory=list)
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """(index of its first token, what was generated); everything else was observed."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @cached_property
    def kind(self) -> Kind:
        return self.driver.envs.kind_of(self.prompt.row)

    async def reset(self) -> None:
        driver, prompt = self.driver, self.prompt
        if driver.max_observation_tokens is not None:
            self.metrics["cut_observations"] = 0.0
        opening = prompt.tokens
        try:
            self.env = self.kind.make()
            messages = await self._call(self.env.reset(prompt.row, self.seed))
            tools, self.state = tools_of(self.env), first_state(self.env)
            if messages != prompt.row.prompt or tools:
                opening = driver.chat.opening(messages, tools)
            if len(opening) > driver.max_prompt_tokens:
                raise ValueError(
                    f"{len(opening)} tokens are more than data.max_prompt_tokens: {driver.max_prompt_tokens}"
                )
        except Exception as error:
            self.error = f"reset: {describe(error, self.kind.timeout_s)}"
            opening = prompt.tokens
        self.tokens += opening

    async def play(self, sampling: Sampling) -> Trajectory:
        if self.kind.limit is None:
            return await self._play(sampling)
        async with self.kind.limit:
            await self.reset()
            return await self._play(sampling)

    async def _play(self, sampling: Sampling) -> Trajectory:
        try:
            stop = StopReason.ERROR if self.error else await self._turns(sampling)
            self._sum_up()
        finally:
            await self.close()
        return self._trajectory(stop)

    def _trajectory(self, stop: StopReason) -> Trajectory:
        tokens = np.array(self.tokens, np.int64)
        generated, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
        versions = np.full(len(tokens), -1, np.int64)
        for start, turn in self.turns:
            span = slice(start, start + len(turn.tokens))
            generated[span], logprobs[span], versions[span] = True, turn.logprobs, turn.versions
        return Trajectory(
            tokens=tokens,
            generated=generated,
            logprobs=logprobs,
            versions=versions,
            turn_rewards=self.turn_rewards,
            stop=stop,
            prompt_id=self.prompt.prompt_id,
            sample=self.sample,
            row=self.prompt.index,
            metrics=self.metrics,
            error=self.error,
            tag=self.kind.tag,
            turn_states=self.turn_states,
        )

    async def _turns(self, sampling: Sampling) -> StopReason:
        driver, start = self.driver, len(self.tokens)
        memories: list[Memory | None] = [None]  # a list, so that nobody else holds what the engine is given back
        budget, num_turns = driver.max_response_tokens, driver.max_turns + num_last_turns(self.env)
        for turn in range(num_turns):
            left = budget - (len(self.tokens) - start)
            limited = replace(sampling, max_tokens=min(left, sampling.max_tokens, driver.max_turn_tokens or left))
            completion = await driver.engine.generate(
                self.tokens, limited, self.seed + turn, memory=memories.pop(), keep=turn + 1 < num_turns
            )
            memories.append(completion.memory)
            completion = replace(completion, memory=None)
            self.turns.append((len(self.tokens), completion))
            self.tokens += completion.tokens
            answer = await self._step(completion, is_last=turn + 1 == num_turns)
            if answer is None:
                return StopReason.ERROR
            result, observation = answer
            if result.done:
                is_cut = len(self.tokens) - start >= budget
                return StopReason.ERROR if result.error else reason_of(completion.finish, is_cut)
            if turn + 1 == num_turns:
                break
            if len(self.tokens) - start + len(observation) >= budget:
                return StopReason.LENGTH
            self.tokens += observation
        return StopReason.TURNS

    async def _step(self, completion: Completion, *, is_last: bool) -> tuple[StepResult, list[int]] | None:
        """The environment's answer and the tokens that follow the turn, or None if it failed.

        The turn's reward sits on its last generated token.
        """
        assert self.env is not None
        last = len(self.tokens) - 1
        self.turn_states.append(hash_of(self.state))
        try:
            if hasattr(self.env, "count_turn"):
                num = len(completion.tokens)
                self.env.count_turn(len(self.tokens) - num, num, completion.finish is Finish.LENGTH)
            reply = await self.driver.chat.text(completion.tokens)
            result = checked(await self._call(self.env.step(reply)))
            ended = completion.finish is Finish.STOP_TOKEN
            observation = [] if result.done or is_last else self._observation(result, ended)
        except UserError:  # about the chat template; the next conversation would fail in the same way
            raise
        except Exception as error:
            self.error = f"step: {describe(error, self.kind.timeout_s)}"
            self.turn_rewards.append((last, self.kind.on_error))
            return None
        self.turn_rewards.append((last, result.reward))
        self.error = self.error or result.error
        self.state = "\n".join(m["content"] for m in result.messages) if result.state is None else result.state
        for name, value in result.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        return result, observation

    def _observation(self, result: StepResult, ended: bool) -> list[int]:
        assert self.env is not None
        chat, messages, limit = self.driver.chat, result.messages, self.driver.max_observation_tokens
        if limit is not None:
            messages = chat.cut(messages, limit, result.closing)
            if messages != result.messages:
                self.metrics["cut_observations"] += 1
                if hasattr(self.env, "was_shown"):
                    self.env.was_shown(messages)
        if is_inline(self.env) and not ended:
            return chat.inline(messages)
        return chat.continuation(messages, ended)

    def _sum_up(self) -> None:
        try:
            self.metrics |= finite(summary_of(self.env))
        except Exception as error:
            self.error = self.error or f"summary: {describe(error, self.kind.timeout_s)}"

    async def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            try:
                await self._call(env.close())
            except Exception as error:
                self.error = self.error or f"close: {describe(error, self.kind.timeout_s)}"

    async def _call(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """The environment's answer, or TimeoutError. A late one is not waited for: it may ignore its cancellation.

        A task of its own: who quits a debugger in it (KeyboardInterrupt) ends the event loop at once, and not when this
        episode is closed, while others go on.
        """
        task = asyncio.ensure_future(without_exit(call))
        if bounds_itself(self.env):
            return await task
        try:
            await asyncio.wait({task}, timeout=self.kind.timeout_s)
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()


def reason_of(finish: Finish, is_cut: bool) -> StopReason:
    """Of an environment that is done. `is_cut`: no token more could have been generated."""
    if finish is Finish.STOP_TOKEN:
        return StopReason.END_OF_TURN
    if finish is Finish.STOP_STRING:
        return StopReason.STOP_STRING
    return StopReason.LENGTH if is_cut else StopReason.ENVIRONMENT


def checked(result: StepResult) -> StepResult:
    """What people's own environments return is not always what `Env` says."""
    if not isinstance(result, StepResult):
        raise TypeError(f"it returned {result!r:.100}, which is not a StepResult")
    finite({"the reward": result.reward, **result.metrics})
    return result


def finite(numbers: dict[str, float]) -> dict[str, float]:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; it is {value}")
    return numbers


def seed_of(seed: int, purpose: str, prompt_id: int, sample: int) -> int:
    """63 bits that depend on nothing but these: the same trajectory in every run, on any number of machines."""
    return hash_of(f"{seed}/{purpose}/{prompt_id}/{sample}")


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big") >> 1


def describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    return error_line(error)
