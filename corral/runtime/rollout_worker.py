"""The rollout role: an engine, and the driver that runs environments against it.

Requests are submitted in any number at any time and collected as they finish, so tokens, observations and rewards of a
trajectory stay on the worker until it is over.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from corral.data.batch import Trajectory
from corral.envs.base import EnvSet
from corral.model.model_loading import end_tokens, load_tokenizer
from corral.recipe.errors import RunError, UserError
from corral.recipe.schema import MAX_PREFILL_TOKENS, MAX_SEQUENCES, Recipe
from corral.rewards.scorer_pool import ScorerPools
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Engine, Sampling
from corral.rollout.native_engine import NativeEngine
from corral.runtime.transfer_buckets import TransferHandle
from corral.runtime.transfer_channels import Channel, make_channel
from corral.runtime.worker import Role, WorkerContext


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt and how to roll it out."""

    id: int
    """Number under which the trajectories come back."""
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    """Settings without the model's own end tokens, which are added here."""
    purpose: str
    """What it is for (train, validation, baseline), which is part of the seed."""


FinishedRequest = tuple[int, list[Trajectory]]
"""A request's id and its trajectories."""


class RolloutWorker(Role):
    """Rolls out requests. `model`: the engine's own copy, or the trainer's where that is in this process and whole."""

    channel: Channel | None = None

    def __init__(self, context: WorkerContext, recipe: Recipe, model: Any, pools: ScorerPools) -> None:
        self.context, self.recipe = context, recipe
        tokenizer = load_tokenizer(recipe.model)
        self.engine = make_engine(recipe, model, tokenizer)
        self.driver = make_driver(recipe, self.engine, tokenizer, pools)
        self.end_tokens = end_tokens(model, tokenizer) | frozenset(recipe.rollout.stop_token_ids)
        self.shares_weights = "actor" in context.roles and context.roles["actor"].trainer.whole_model is model
        self.finished: list[FinishedRequest] = []
        self.failure: BaseException | None = None
        self.has_news = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> dict[str, Any]:
        return {"max_sequences": self.engine.max_sequences}

    # --- rollouts

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Starts requests and returns at once. Those that are alike but for their prompt start together."""
        alike: dict[tuple[int, Sampling, str], list[RolloutRequest]] = {}
        for request in requests:
            alike.setdefault((request.num_samples, request.sampling, request.purpose), []).append(request)
        for some in alike.values():
            task = asyncio.get_running_loop().create_task(self._roll_out(some))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def collect(self) -> list[FinishedRequest]:
        """Returns what has finished since the last call. Waits for the next one to finish, or for half of the call's
        deadline: an empty answer shows that the worker lives. Raises what no other request could survive either, and
        an engine that has made no progress meanwhile."""
        before = self.engine.num_decode_steps
        try:
            await asyncio.wait_for(self.has_news.wait(), self.context.timeout_s / 2)
        except TimeoutError:
            if self.engine.num_in_flight and self.engine.num_decode_steps == before:
                raise RunError(
                    f"the engine has not generated anything for {self.context.timeout_s / 2:g} s "
                    "(half of `cluster.call_timeout_s`), and something waits for it"
                ) from None
        self.has_news.clear()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        finished, self.finished = self.finished, []
        return finished

    async def ping(self) -> None:
        """Answers, which is enough."""

    async def cancel(self) -> None:
        """Drops all requests."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.finished.clear()
        self.has_news.clear()

    async def _roll_out(self, requests: Sequence[RolloutRequest]) -> None:
        """Consumes requests, produces finished ones; waits for the engine and environments, which have deadlines."""
        ids = {id(request.prompt): request.id for request in requests}
        first = requests[0]

        def on_group(prompt: Prompt, trajectories: list[Trajectory]) -> None:
            self.finished.append((ids[id(prompt)], trajectories))
            self.has_news.set()

        try:
            await self.driver.roll_out(
                [request.prompt for request in requests],
                first.num_samples,
                replace(first.sampling, stop_tokens=self.end_tokens),
                first.purpose,
                on_group,
            )
        except Exception as error:
            self.failure = error
            self.has_news.set()

    def release_cache(self) -> None:
        """Gives the cache's memory to who computes next on this device; the next request takes it again. Does nothing
        while trajectories are in progress, whose keys and values are in it."""
        if not self.tasks:
            self.engine.release_cache()

    # --- new weights

    async def join_channel(self, kind: str, rendezvous: str, rank: int, size: int) -> None:
        """Joins the channel through which weights come from the trainers, as end `rank`; the sender is 0."""
        if self.channel is not None:
            self.channel.close()
        self.channel = make_channel(kind, self.context.address, self.context.device)
        await asyncio.to_thread(self.channel.join, rendezvous, rank, size)

    async def receive_weights(self, handle: TransferHandle, version: int) -> float:
        """Receives weights from a trainer in another process. Returns the seconds for which decoding paused."""
        assert self.channel is not None
        return await self.engine.update(self.channel.receive(handle, self.engine.weight_layout), version)

    def load_local_weights(self, version: int) -> float:
        """Takes the weights of the trainer in this process. Where its tensors are the engine's own there is nothing to
        do but note the version; sharded ones are put together and copied. Returns the pause, which is none."""
        self.engine.load(() if self.shares_weights else self.context.roles["actor"].trainer.weights(), version)
        return 0.0

    def set_version(self, version: int) -> None:
        """Notes that the weights are of this version."""
        self.engine.load((), version)

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Returns log-probs of all tokens behind the first, under the weights that the engine decodes with."""
        return await self.engine.compute_logprobs(tokens, self.recipe.rollout.temperature)

    def close(self) -> None:
        self.driver.envs.close()
        self.engine.close()


def make_engine(recipe: Recipe, model: Any, tokenizer: Any) -> Engine:
    rollout = recipe.rollout
    limit = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    positions = model.config.get_text_config().max_position_embeddings
    if limit > positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {limit}, but the model has {positions} positions"
        )
    return NativeEngine(
        model,
        tokenizer,
        max_sequences=rollout.max_sequences or MAX_SEQUENCES[model.device.type],
        max_prefill_tokens=rollout.max_prefill_tokens or MAX_PREFILL_TOKENS[model.device.type],
        max_length=limit,
    )


def make_driver(recipe: Recipe, engine: Engine, tokenizer: Any, pools: ScorerPools) -> RolloutDriver:
    rollout = recipe.rollout
    return RolloutDriver(
        engine=engine,
        envs=EnvSet(recipe.tagged_environments, pools.by_tag, rollout),
        chat=ChatRenderer(tokenizer, recipe.data.chat),
        max_turns=rollout.max_turns,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_turn_tokens=rollout.max_turn_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
        seed=recipe.seed,
    )
