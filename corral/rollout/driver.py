"""The rollout driver runs environments against an engine and records what happened, token by token.

Everything is an environment; a question is one with a single step. All trajectories of a call are in flight at once.
A hung or raising environment costs its own trajectory and a bounded time, nothing else.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from corral.data.batch import StopReason, Trajectory
from corral.data.images import images_by_id
from corral.data.plugins import blamed_on, error_line, place_of, with_place
from corral.data.rows import Conversation, Message, Row
from corral.data.sources import PreparedPrompt
from corral.envs.base import Env, EnvFactory, EnvSet, StepResult, within, without_exit
from corral.recipe.errors import UserError
from corral.rewards.reward_function import Score
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.engine import Completion, Engine, FinishReason, PrefixHandle, Sampling

Answer = TypeVar("Answer")

PNG = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""


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
            await gather_or_cancel(episode.run(sampling) for episode in group)
            await score_group(group)
            trajectories = [episode.trajectory() for episode in group]
            on_group(group[0].prompt, trajectories)
            return trajectories

        try:
            await asyncio.gather(*(episode.reset() for episode in episodes if episode.factory.limit is None))
            finished = await gather_or_cancel(finish(group) for group in groups)
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
    is_dropped: bool = False
    score: Score | None = None
    """What the reward function returned, where it is still to compare the samples of the group."""
    stop: StopReason = StopReason.ERROR
    turn_states: list[int] = field(default_factory=list)
    frames: list[str | bytes | None] = field(default_factory=list)
    turn_times: list[tuple[float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    messages: list[Message] = field(default_factory=list)
    """The conversation as text. What continues the model's own turn is a part of that turn's message."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    awaits_model: bool = False
    """Whether the reward model is to score the conversation."""
    tool_errors: list[str] = field(default_factory=list)

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
            with blamed_on(self.factory.env_class.reset):
                check_messages(messages)
            self._add_frame()
            self.messages += messages
            own, self.state = list(self.env.tools), self.env.first_state()
            if own and prompt.row.tools:
                raise ValueError(
                    "the row has tools, and the environment has tools of its own; set `data.tools_key: null`"
                )
            self.tools = own or prompt.row.tools
            if messages != prompt.row.prompt or own:
                prompt_tokens, self.images = driver.chat.prompt_tokens(messages, self.tools), images_by_id(messages)
            if len(prompt_tokens) > driver.max_prompt_tokens:
                raise ValueError(
                    f"{len(prompt_tokens)} tokens are more than data.max_prompt_tokens: {driver.max_prompt_tokens}"
                )
        except Exception as error:
            self.error = f"reset: {self._describe(error, 'reset')}"
            prompt_tokens, self.images = prompt.tokens, dict(prompt.images)
        self.tokens += prompt_tokens

    async def run(self, sampling: Sampling) -> None:
        async with self.factory.limit or nullcontext():
            if self.factory.limit is not None:
                await self.reset()  # the others were reset before the first token was generated
            try:
                if self.error is None:
                    self.stop = await self._run_turns(sampling)
                self._add_summary()
            finally:
                await self.close()

    def trajectory(self) -> Trajectory:
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
            stop=self.stop,
            prompt_id=self.prompt.prompt_id,
            sample=self.sample,
            row=self.prompt.index,
            metrics=self.metrics,
            error=self.error,
            tool_errors=self.tool_errors,
            tag=self.factory.tag,
            turn_states=self.turn_states,
            frames=self.frames,
            turn_times=self.turn_times,
            images=self.images,
            is_dropped=self.is_dropped,
            rewards=self.rewards,
            conversation=Conversation(self.messages, self.tools) if self.awaits_model else None,
        )

    async def _run_turns(self, sampling: Sampling) -> StopReason:
        assert self.env is not None
        driver, start = self.driver, len(self.tokens)
        # Popped from a list when it is passed on: the engine frees its pages when the last reference is gone.
        prefixes: list[PrefixHandle | None] = [None]
        budget, num_turns = driver.max_response_tokens, driver.max_turns + self.env.last_turns
        for turn in range(num_turns):
            left = budget - (len(self.tokens) - start)
            began = time.perf_counter()
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
            generated = time.perf_counter()
            answer = await self._step(completion, is_last=turn + 1 == num_turns)
            self.turn_times.append((generated - began, time.perf_counter() - generated))
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
            self._add_to_conversation([Message(role="assistant", content=reply)])
            result = await self._call(self.env.step(reply))
            with blamed_on(self.factory.env_class.step):
                check_result(result)
            self._add_frame()
            ended = completion.finish_reason is FinishReason.STOP_TOKEN
            observation = [] if result.done or is_last else self._observation(result, ended)
        except UserError:  # about the chat template; the next conversation would fail in the same way
            raise
        except Exception as error:
            self.error = f"step: {self._describe(error, 'step')}"
            self._add_reward(last, self.factory.on_error)
            return None
        score = result.score
        if score is not None:
            self.rewards |= score.by_name
            self.score = self.score if score.response is None else score
            self.awaits_model = self.awaits_model or score.awaits_model
        is_known = score is None or (score.response is None and not score.awaits_model)
        self._add_reward(last, result.reward if is_known else 0.0)
        self.error = self.error or result.error
        self.tool_errors += result.tool_errors
        self.state = "\n".join(m["content"] for m in result.messages) if result.state is None else result.state
        self._add_metrics(result.metrics)
        return result, observation

    def _add_frame(self) -> None:
        assert self.env is not None
        frame = self.env.draw_frame()
        if not (frame is None or isinstance(frame, str) or (isinstance(frame, bytes) and frame.startswith(PNG))):
            raise TypeError(f"draw_frame returned {frame!r:.100}, which is neither text nor a PNG file")
        self.frames.append(frame)

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def add_group_score(self, score: Score) -> None:
        """Records what the comparison with the other samples of the group gave, as the last turn's reward."""
        last, _ = self.turn_rewards.pop()
        self._add_reward(last, 0.0 if score.awaits_model else score.reward)
        self._add_metrics(score.metrics)
        self.rewards |= score.by_name
        self.error = self.error or score.error
        if score.error is not None:
            self.stop = StopReason.ERROR

    def _add_reward(self, last: int, reward: float | None) -> None:
        """Records the reward of a turn at its last token; without one, the trajectory is dropped."""
        self.turn_rewards.append((last, 0.0 if reward is None else reward))
        self.is_dropped = self.is_dropped or reward is None

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
            self._add_to_conversation([Message(role="assistant", content=message["content"]) for message in messages])
            return chat.inline_continuation(messages)
        self._add_to_conversation(messages)
        return chat.continuation(messages, ended)

    def _add_to_conversation(self, messages: list[Message]) -> None:
        for message in messages:
            before = self.messages[-1] if self.messages else None
            if before is not None and before["role"] == message["role"] == "assistant":
                self.messages[-1] = {**before, "content": before["content"] + message["content"]}
            else:
                self.messages.append(message)

    def _add_summary(self) -> None:
        try:
            self.metrics |= finite(self.env.summary() if self.env is not None else {})
        except Exception as error:
            self.error = self.error or f"summary: {self._describe(error, 'summary')}"

    async def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            try:
                await self._call(env.close())
            except Exception as error:
                self.error = self.error or f"close: {self._describe(error, 'close')}"

    def _describe(self, error: Exception, method: str) -> str:
        """A method that is late leaves no traceback; the error's place is where it is defined."""
        if isinstance(error, TimeoutError) and not str(error):
            late = f"no answer within {self.factory.timeout_s:g} s"
            return with_place(late, place_of(getattr(self.factory.env_class, method)))
        return error_line(error)

    async def _call(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """What the environment returns, or TimeoutError.

        It runs in a task of its own: a KeyboardInterrupt in it (somebody quits a debugger) ends the event loop at once,
        and not when this episode is closed, while others continue.
        """
        if self.env is not None and self.env.bounds_itself:
            return await asyncio.ensure_future(without_exit(call))
        return await within(call, self.factory.timeout_s)


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """What the calls return, in their order. When one of them raises, the others are cancelled, and have ended when its
    error is raised: `asyncio.gather` would leave them running, with environments that are being closed."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def score_group(group: Sequence[_Episode]) -> None:
    """Lets a reward function that compares samples score those of a prompt, now that all of them are finished. Samples
    that failed before they were scored are not among them."""
    waiting = [(episode, episode.score) for episode in group if episode.score is not None]
    pool = group[0].factory.pool
    if waiting and pool is not None:
        scores = await pool.score_group([score for _, score in waiting], group[0].prompt.row)
        for (episode, _), score in zip(waiting, scores, strict=True):
            episode.add_group_score(score)


def stop_reason(finish: FinishReason, is_cut: bool) -> StopReason:
    """Why a trajectory ended whose environment is done. `is_cut`: not one token more could have been generated."""
    if finish is FinishReason.STOP_TOKEN:
        return StopReason.END_OF_TURN
    if finish is FinishReason.STOP_STRING:
        return StopReason.STOP_STRING
    return StopReason.LENGTH if is_cut else StopReason.ENVIRONMENT


def check_messages(messages: list[Message]) -> None:
    """Raises where a user's environment returned something else than `Env` promises."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "content" in one for one in messages):
        raise TypeError(f"it returned {messages!r:.100}, which is not a list of messages")


def check_result(result: StepResult) -> None:
    """Raises where a user's environment returned something else than `Env` promises."""
    if not isinstance(result, StepResult):
        raise TypeError(f"it returned {result!r:.100}, which is not a StepResult")
    finite(result.metrics if result.reward is None else {"the reward": result.reward, **result.metrics})


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
