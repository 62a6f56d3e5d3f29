"""The rollout role: an engine, the driver that plays environments against it, and the reward's processes.

Prompts are submitted in any number at any time and collected as they finish, so tokens, observations and rewards of a
game stay on the worker until it is over.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from corral.data.trajectory import Trajectory
from corral.envs.registry import EnvSet
from corral.model.load import end_tokens, load_tokenizer
from corral.recipe.errors import RunError, UserError
from corral.recipe.schema import MAX_PREFILL_TOKENS, MAX_SEQUENCES, Recipe
from corral.rewards.pools import Pools
from corral.rollout.chat import Chat
from corral.rollout.driver import Driver, Prompt
from corral.rollout.engine import Sampling
from corral.rollout.native import NativeEngine
from corral.runtime.probe import engine_logprobs
from corral.runtime.transfer import Channel, CollectiveChannel, TransferHandle, layout_of, make_channel
from corral.runtime.worker import WorkerContext


@dataclass(frozen=True)
class Game:
    """A prompt and how to play it."""

    number: int
    """Given by who asks; its result comes back under it."""
    prompt: Prompt
    samples: int
    sampling: Sampling
    """Without the model's own end tokens, which are added here."""
    purpose: str
    """Part of the seed: train, validation, baseline."""


Finished = tuple[int, list[Trajectory]]


class Player:
    """Plays games. `model` is the engine's own copy, or the trainer's where that is in the same process and whole."""

    channel: Channel | None = None

    def __init__(self, site: WorkerContext, recipe: Recipe, model: Any, pools: Pools) -> None:
        self.site, self.recipe, self.pools = site, recipe, pools
        self.tokenizer = load_tokenizer(recipe.model)
        self.engine = make_engine(recipe, model, self.tokenizer)
        self.driver = make_driver(recipe, self.engine, self.tokenizer, pools)
        self.end_tokens = end_tokens(model, self.tokenizer) | frozenset(recipe.rollout.stop_token_ids)
        self.finished: list[Finished] = []
        self.failure: BaseException | None = None
        self.news = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> dict[str, Any]:
        return {"max_sequences": self.engine.max_sequences}

    # --- playing

    async def submit(self, games: Sequence[Game]) -> None:
        """Returns at once. Games that are alike but for their prompt start together."""
        alike: dict[tuple[int, Sampling, str], list[Game]] = {}
        for game in games:
            alike.setdefault((game.samples, game.sampling, game.purpose), []).append(game)
        for some in alike.values():
            task = asyncio.get_running_loop().create_task(self._play(some))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def collect(self) -> list[Finished]:
        """What has finished since; waits until there is something, or for so long that it is time for a sign of life.
        Raises what no other game could survive either."""
        before = self.engine.stats.decode_steps
        try:
            await asyncio.wait_for(self.news.wait(), self.site.timeout_s / 2)
        except TimeoutError:
            if self.engine.in_flight and self.engine.stats.decode_steps == before:
                raise RunError(
                    f"the engine has not generated anything for {self.site.timeout_s / 2:g} s "
                    "(half of `cluster.call_timeout_s`), and something waits for it"
                ) from None
        self.news.clear()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        finished, self.finished = self.finished, []
        return finished

    async def ping(self) -> None:
        """To answer is enough."""

    async def cancel(self) -> None:
        """Drops all games."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.finished.clear()
        self.news.clear()

    async def _play(self, games: Sequence[Game]) -> None:
        """Consumes games, produces finished ones; waits for the engine and the environments, which have deadlines."""
        numbers = {id(game.prompt): game.number for game in games}
        sampling = replace(games[0].sampling, stop_tokens=self.end_tokens)

        def on_group(prompt: Prompt, trajectories: list[Trajectory]) -> None:
            self.finished.append((numbers[id(prompt)], trajectories))
            self.news.set()

        try:
            await self.driver.play(
                [game.prompt for game in games], games[0].samples, sampling, games[0].purpose, on_group
            )
        except Exception as error:
            self.failure = error
            self.news.set()

    def release_cache(self) -> None:
        """Gives the cache's memory to who computes next on this device; the next game takes it again. Not while games
        are being played, whose histories are in it."""
        if not self.tasks:
            self.engine.pause()

    # --- new weights

    async def join_channel(self, kind: str, meeting: str, rank: int, size: int) -> None:
        """Through which weights will come from the trainers; `rank` among its ends, of which the sender is 0."""
        if self.channel is not None:
            self.channel.close()
        channel = make_channel(kind, self.site.address, self.site.device)
        if isinstance(channel, CollectiveChannel):
            await asyncio.to_thread(channel.join, meeting, rank, size)
        self.channel = channel

    async def receive_weights(self, parcel: TransferHandle, version: int) -> float:
        """From a trainer in another process. Returns the seconds for which decoding paused."""
        assert self.channel is not None
        layout = layout_of(self.engine.model)
        return await self.engine.update(self.channel.receive(parcel, layout), version)

    def share_weights(self, version: int) -> float:
        """From the trainer in this process: nothing to do but note the version, unless its tensors are sharded."""
        trainer = self.site.hosted["actor"].trainer
        self.engine.load(() if self.engine.model is trainer.model else trainer.weights(), version)
        return 0.0

    def set_version(self, version: int) -> None:
        self.engine.load((), version)

    async def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens behind the first, as the engine's weights have them."""
        return await self.engine.between_steps(
            lambda: engine_logprobs(self.engine.model, tokens, self.recipe.rollout.temperature)
        )

    def close(self) -> None:
        self.driver.envs.close()
        self.pools.close()
        self.engine.close()


def make_engine(recipe: Recipe, model: Any, tokenizer: Any) -> NativeEngine:
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


def make_driver(recipe: Recipe, engine: NativeEngine, tokenizer: Any, pools: Pools) -> Driver:
    rollout = recipe.rollout
    return Driver(
        engine=engine,
        envs=EnvSet(recipe.tagged_environments, pools.by_tag, rollout),
        chat=Chat(tokenizer, recipe.data.chat),
        max_turns=rollout.max_turns,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_turn_tokens=rollout.max_turn_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
        seed=recipe.seed,
    )
