"""The rollout driver plays environments against an engine and records what happened, token by token.

Everything is an environment; a question is one with a single step. All trajectories of a call are in flight at once.
A hung or raising environment costs its own trajectory and a bounded time, nothing else.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.data.trajectory import StopReason, Trajectory
from corral.envs.base import Env, StepResult
from corral.recipe.errors import UserError
from corral.rollout.chat import Chat
from corral.rollout.engine import Completion, Engine, Finish, Sampling

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Prompt:
    ordinal: int
    """Counted over the run; the group of its samples."""
    index: int
    """Of the row in its data set."""
    row: Row
    tokens: list[int]


@dataclass
class Driver:
    engine: Engine
    make_env: Callable[[], Env]
    chat: Chat
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    """Of a trajectory: everything behind the prompt."""
    env_timeout_s: float
    on_error: float
    """Reward of a trajectory whose environment failed."""
    seed: int

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
        and in the same order in every run. `on_group` hears of each prompt when all of its samples are there.
        """
        groups = [
            [
                _Episode(self, prompt, sample, seed_of(self.seed, purpose, prompt.ordinal, sample))
                for sample in range(samples_per_prompt)
            ]
            for prompt in prompts
        ]
        await asyncio.gather(*(episode.reset() for group in groups for episode in group))

        async def finish(group: list[_Episode]) -> list[Trajectory]:
            trajectories = await asyncio.gather(*(episode.play(sampling) for episode in group))
            on_group(group[0].prompt, trajectories)
            return trajectories

        finished = await asyncio.gather(*(finish(group) for group in groups))
        return [trajectory for group in finished for trajectory in group]


@dataclass
class _Episode:
    """One trajectory while it is being played."""

    driver: Driver
    prompt: Prompt
    sample: int
    seed: int
    env: Env | None = None
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    async def reset(self) -> None:
        driver, prompt = self.driver, self.prompt
        opening = prompt.tokens
        try:
            self.env = driver.make_env()
            messages = await self._call(self.env.reset(prompt.row, self.seed))
            if messages != prompt.row.prompt:
                opening = driver.chat.opening(messages)
            if len(opening) > driver.max_prompt_tokens:
                raise ValueError(
                    f"{len(opening)} tokens are more than data.max_prompt_tokens: {driver.max_prompt_tokens}"
                )
        except Exception as error:
            self.error = f"reset: {describe(error, driver.env_timeout_s)}"
            opening = prompt.tokens
        self._observe(opening)

    async def play(self, sampling: Sampling) -> Trajectory:
        try:
            stop = StopReason.ERROR if self.error else await self._turns(sampling)
        finally:
            await self._close()
        return Trajectory(
            tokens=np.array(self.tokens, np.int64),
            generated=np.array(self.generated, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int64),
            turn_rewards=self.turn_rewards,
            stop=stop,
            ordinal=self.prompt.ordinal,
            sample=self.sample,
            row=self.prompt.index,
            metrics=self.metrics,
            error=self.error,
        )

    async def _turns(self, sampling: Sampling) -> StopReason:
        budget = self.driver.max_response_tokens
        start = len(self.tokens)
        for turn in range(self.driver.max_turns):
            left = budget - (len(self.tokens) - start)
            limited = replace(sampling, max_tokens=min(left, sampling.max_tokens))
            completion = await self.driver.engine.generate(self.tokens, limited, self.seed + turn)
            self._generate(completion)
            answer = await self._step(completion)
            if answer is None:
                return StopReason.ERROR
            result, observation = answer
            if result.done:
                return StopReason.ERROR if result.error else STOP_OF[completion.finish]
            if turn + 1 == self.driver.max_turns:
                break
            if len(self.tokens) - start + len(observation) >= budget:
                return StopReason.LENGTH
            self._observe(observation)
        return StopReason.TURNS

    async def _step(self, completion: Completion) -> tuple[StepResult, list[int]] | None:
        """The environment's answer and the tokens that follow the turn, or None if it failed.

        The turn's reward sits on its last generated token.
        """
        assert self.env is not None
        chat, last = self.driver.chat, len(self.tokens) - 1
        try:
            result = checked(await self._call(self.env.step(chat.text(completion.tokens))))
            ended = completion.finish is Finish.STOP_TOKEN
            observation = [] if result.done else chat.continuation(result.messages, ended)
        except UserError:  # about the chat template; the next conversation would fail in the same way
            raise
        except Exception as error:
            self.error = f"step: {describe(error, self.driver.env_timeout_s)}"
            self.turn_rewards.append((last, self.driver.on_error))
            return None
        self.turn_rewards.append((last, result.reward))
        self.error = self.error or result.error
        for name, value in result.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        return result, observation

    async def _close(self) -> None:
        if self.env is not None:
            try:
                await self._call(self.env.close())
            except Exception as error:
                self.error = self.error or f"close: {describe(error, self.driver.env_timeout_s)}"

    async def _call(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """The environment's answer, or TimeoutError. A late one is not waited for: it may ignore its cancellation."""
        task = asyncio.ensure_future(without_exit(call))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s())
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()

    def _timeout_s(self) -> float | None:
        return None if getattr(self.env, "bounds_itself", False) else self.driver.env_timeout_s

    def _observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.generated += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def _generate(self, completion: Completion) -> None:
        self.tokens += completion.tokens
        self.generated += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions


STOP_OF = {
    Finish.STOP_TOKEN: StopReason.END_OF_TURN,
    Finish.STOP_STRING: StopReason.STOP_STRING,
    Finish.LENGTH: StopReason.LENGTH,
}


async def without_exit(call: Coroutine[Any, Any, Answer]) -> Answer:
    """An environment that calls `sys.exit` has failed; the run has not."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error


def checked(result: StepResult) -> StepResult:
    """What people's own environments return is not always what `Env` says."""
    if not isinstance(result, StepResult):
        raise TypeError(f"it returned {result!r:.100}, which is not a StepResult")
    for name, value in {"the reward": result.reward, **result.metrics}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; it is {value}")
    return result


def seed_of(seed: int, purpose: str, ordinal: int, sample: int) -> int:
    """63 bits that depend on nothing but these: the same trajectory in every run, on any number of machines."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{ordinal}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    return error_line(error)
