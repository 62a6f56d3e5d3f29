"""The rollout driver runs environments against an engine and records what happened, token by token.

Everything is an environment; a question is one with a single step. All trajectories of a call are in flight at once.
A hung or raising environment costs its own trajectory and a bounded time, nothing else.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from corral.data.batch import StopReason, Trajectory
from corral.data.images import images_by_id
from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.data.sources import PreparedPrompt
from corral.envs.base import Env, EnvFactory, EnvSet, StepResult, within, without_exit
from corral.recipe.errors import UserError
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.engine import Completion, Engine, FinishReason, PrefixHandle, Sampling

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Prompt:
    prompt_id: int
    """Counted over the run; identifies the group of its samples."""
    index: int
    """Index of the row in its data set."""
    row: Row
    tokens: list[int]
    images: dict[int, bytes] = field(default_factory=dict)
    """The images whose ids are among the tokens."""

    @classmethod
    def of(cls, prepared: PreparedPrompt, prompt_id: int, index: int) -> "Prompt":
        return cls(prompt_id, index, prepared.row, prepared.tokens, images_by_id(prepared.row.prompt))


@dataclass
class RolloutDriver:
    engine: Engine
    envs: EnvSet
    chat: ChatRenderer
    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    """Limit of everything behind the prompt: generated tokens and observations."""
    seed: int
    max_turn_tokens: int | None = None
    max_observation_tokens: int | None = None

    async def roll_out(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        purpose: str = "train",
        on_group: Callable[[Prompt, list[Trajectory]], None] = lambda prompt, trajectories: None,
    ) -> list[Trajectory]:
        """Trajectories of every prompt, `samples_per_prompt` of each, in the order of prompts, then samples.

        Every environment is reset before the first token is generated, so that the engine sees all prompts at once
        and in the same order in every run; but for environments of which only so many may run at a time. `on_group`
        is called for each prompt when all of its samples are finished.
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
            trajectories = await asyncio.gather(*(episode.run(sampling) for episode in group))
            on_group(group[0].prompt, trajectories)
            return trajectories

        try:
            await asyncio.gather(*(episode.reset() for episode in episodes if episode.factory.limit is None))
            finished = await asyncio.gather(*(finish(group) for group in groups))
        finally:
            unfinished = [episode for episode in episodes if episode.env is not None]
            await asyncio.gather(*(episode.close() for episode in unfinished))
        return [trajectory for group in finished for trajectory in group]


@dataclass
class _Episode:
    """One trajectory while it is being generated."""

    driver: RolloutDriver
    prompt: Prompt
    sample: int
    seed: int
    env: Env | None = None
    state: str = ""
    """The state in which the next turn is taken."""
    tokens: list[int] = field(default_factory=list)
    images: dict[int, bytes] = field(default_factory=dict)
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """(index of its first token, what was generated); everything else was observed."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @cached_property
    def factory(self) -> EnvFactory:
        return self.driver.envs.factory_for(self.prompt.row)

    async def reset(self) -> None:
        driver, prompt = self.driver, self.prompt
        if driver.max_observation_tokens is not None:
            self.metrics["cut_observations"] = 0.0
        prompt_tokens, self.images = prompt.tokens, dict(prompt.images)
        try:
            self.env = self.factory.make()
            messages = await self._call(self.env.reset(prompt.row, self.seed))
            tools, self.state = list(self.env.tools), self.env.first_state()
            if messages != prompt.row.prompt or tools:
                prompt_tokens, self.images = driver.chat.prompt_tokens(messages, tools), images_by_id(messages)
            if len(prompt_tokens) > driver.max_prompt_tokens:
                raise ValueError(
                    f"{len(prompt_tokens)} tokens are more than data.max_prompt_tokens: {driver.max_prompt_tokens}"
                )
        except Exception as error:
            self.error = f"reset: {describe_error(error, self.factory.timeout_s)}"
            prompt_tokens, self.images = prompt.tokens, dict(prompt.images)
        self.tokens += prompt_tokens

    async def run(self, sampling: Sampling) -> Trajectory:
        async with self.factory.limit or nullcontext():
            if self.factory.limit is not None:
                await self.reset()  # the others were reset before the first token was generated
            try:
                stop = StopReason.ERROR if self.error else await self._run_turns(sampling)
                self._add_summary()
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
            tag=self.factory.tag,
            turn_states=self.turn_states,
            images=self.images,
        )

    async def _run_turns(self, sampling: Sampling) -> StopReason:
        assert self.env is not None
        driver, start = self.driver, len(self.tokens)
        # Popped from a list when it is passed on: the engine frees its pages when the last reference is gone.
        prefixes: list[PrefixHandle | None] = [None]
        budget, num_turns = driver.max_response_tokens, driver.max_turns + self.env.last_turns
        for turn in range(num_turns):
            left = budget - (len(self.tokens) - start)
            limited = replace(sampling, max_tokens=min(left, sampling.max_tokens, driver.max_turn_tokens or left))
            completion = await driver.engine.generate(
                self.tokens,
                limited,
                self.seed + turn,
                prefix=prefixes.pop(),
                keep_prefix=turn + 1 < num_turns,
                images=self.images,
            )
            prefixes.append(completion.prefix)
            completion = replace(completion, prefix=None)
            self.turns.append((len(self.tokens), completion))
            self.tokens += completion.tokens
            answer = await self._step(completion, is_last=turn + 1 == num_turns)
            if answer is None:
                return StopReason.ERROR
            result, observation = answer
            if result.done:
                is_cut = len(self.tokens) - start >= budget
                return StopReason.ERROR if result.error else stop_reason(completion.finish_reason, is_cut)
            if turn + 1 == num_turns:
                break
            if len(self.tokens) - start + len(observation) >= budget:
                return StopReason.LENGTH
            self.tokens += observation
        return StopReason.TURNS

    async def _step(self, completion: Completion, *, is_last: bool) -> tuple[StepResult, list[int]] | None:
        """Passes the reply to the environment. -> (its result, tokens of the observation), or None if it failed. The
        turn's reward is recorded at its last generated token."""
        assert self.env is not None
        last = len(self.tokens) - 1
        self.turn_states.append(hash_of(self.state))
        try:
            num = len(completion.tokens)
            self.env.count_turn(len(self.tokens) - num, num, completion.finish_reason is FinishReason.LENGTH)
            reply = await self.driver.chat.decode_reply(completion.tokens)
            result = checked(await self._call(self.env.step(reply)))
            ended = completion.finish_reason is FinishReason.STOP_TOKEN
            observation = [] if result.done or is_last else self._observation(result, ended)
        except UserError:  # about the chat template; the next conversation would fail in the same way
            raise
        except Exception as error:
            self.error = f"step: {describe_error(error, self.factory.timeout_s)}"
            self.turn_rewards.append((last, self.factory.on_error))
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
            messages = chat.truncate(messages, limit, result.closing)
            if messages != result.messages:
                self.metrics["cut_observations"] += 1
                self.env.was_shown(messages)
        self.images |= images_by_id(messages)
        if self.env.inline and not ended:
            return chat.inline_continuation(messages)
        return chat.continuation(messages, ended)

    def _add_summary(self) -> None:
        try:
            self.metrics |= finite(self.env.summary() if self.env is not None else {})
        except Exception as error:
            self.error = self.error or f"summary: {describe_error(error, self.factory.timeout_s)}"

    async def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            try:
                await self._call(env.close())
            except Exception as error:
                self.error = self.error or f"close: {describe_error(error, self.factory.timeout_s)}"

    async def _call(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """What the environment returns, or TimeoutError.

        It runs in a task of its own: a KeyboardInterrupt in it (somebody quits a debugger) ends the event loop at once,
        and not when this episode is closed, while others continue.
        """
        if self.env is not None and self.env.bounds_itself:
            return await asyncio.ensure_future(without_exit(call))
        return await within(call, self.factory.timeout_s)


def stop_reason(finish: FinishReason, is_cut: bool) -> StopReason:
    """Why a trajectory ended whose environment is done. `is_cut`: not one token more could have been generated."""
    if finish is FinishReason.STOP_TOKEN:
        return StopReason.END_OF_TURN
    if finish is FinishReason.STOP_STRING:
        return StopReason.STOP_STRING
    return StopReason.LENGTH if is_cut else StopReason.ENVIRONMENT


def checked(result: StepResult) -> StepResult:
    """Raises where a user's environment returned something else than `Env` promises."""
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


def describe_error(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    return error_line(error)
