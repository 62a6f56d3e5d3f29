"""The rollout driver plays environments against an engine and records what happened, token by token.

Everything is an environment; a question is one with a single step. All trajectories of a call are in flight at once.
A hung or raising environment costs its own trajectory and a bounded time, nothing else.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from corral.data.rows import Row
from corral.data.trajectory import StopReason, Trajectory
from corral.envs.base import Env, StepResult
from corral.rollout.chat import Chat
from corral.rollout.engine import Completion, Engine, Finish, Sampling


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
        on_finished: Callable[[], None] = lambda: None,
    ) -> list[Trajectory]:
        """Plays every prompt `samples_per_prompt` times; the result is in the order of prompts, then samples.

        Every environment is reset before the first token is generated, so that the engine sees all prompts at once
        and in the same order in every run.
        """
        episodes = [
            _Episode(self, prompt, sample, seed_of(self.seed, purpose, prompt.ordinal, sample))
            for prompt in prompts
            for sample in range(samples_per_prompt)
        ]
        await asyncio.gather(*(episode.reset() for episode in episodes))

        async def finish(episode: "_Episode") -> Trajectory:
            trajectory = await episode.play(sampling)
            on_finished()
            return trajectory

        return await asyncio.gather(*(finish(episode) for episode in episodes))


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
        try:
            self.env = driver.make_env()
            messages = await asyncio.wait_for(self.env.reset(prompt.row, self.seed), self._timeout_s())
        except Exception as error:
            self.error = f"reset: {describe(error, driver.env_timeout_s)}"
            messages = prompt.row.prompt
        unchanged = messages == prompt.row.prompt
        self._observe(prompt.tokens if unchanged else driver.chat.opening(messages))

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
            result = await self._step(self.driver.chat.text(completion.tokens))
            if result is None:
                return StopReason.ERROR
            if result.done:
                return STOP_OF[completion.finish]
            if turn + 1 == self.driver.max_turns:
                break
            ended = completion.finish is Finish.STOP_TOKEN
            observation = self.driver.chat.continuation(result.messages, ended)
            if len(self.tokens) - start + len(observation) >= budget:
                return StopReason.LENGTH
            self._observe(observation)
        return StopReason.TURNS

    async def _step(self, reply: str) -> StepResult | None:
        """The environment's answer, or None if it failed. Its reward sits on the turn's last generated token."""
        assert self.env is not None
        last = len(self.tokens) - 1
        try:
            result = await asyncio.wait_for(self.env.step(reply), self._timeout_s())
        except Exception as error:
            self.error = f"step: {describe(error, self.driver.env_timeout_s)}"
            self.turn_rewards.append((last, self.driver.on_error))
            return None
        self.turn_rewards.append((last, result.reward))
        self.error = result.error
        for name, value in result.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        return result

    async def _close(self) -> None:
        if self.env is not None:
            try:
                await asyncio.wait_for(self.env.close(), self._timeout_s())
            except Exception as error:
                self.error = self.error or f"close: {describe(error, self.driver.env_timeout_s)}"

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


def seed_of(seed: int, purpose: str, ordinal: int, sample: int) -> int:
    """63 bits that depend on nothing but these: the same trajectory in every run, on any number of machines."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{ordinal}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    return f"{type(error).__name__}: {error}".splitlines()[0]
