"""Simulated workers that take as long as a profile says and compute nothing: only loop, runtime and Ray are left.

`simulated:build_role` has the signature of `corral.runtime.worker:build_role`. Workers find the profile in the recipe,
as the options of its environment, which nothing else reads.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corral.data.batch import Batch, FloatArray, IntArray, StopReason, Trajectory
from corral.recipe.schema import MAX_SEQUENCES, Recipe
from corral.rollout.driver import Prompt, seed_of
from corral.runtime.model_workers import LossStats, UpdateTerms
from corral.runtime.rollout_worker import FinishedRequest, RolloutRequest
from corral.runtime.worker import Role, WorkerContext
from corral.training.optimizer import UpdateResult

BUILDER = "simulated:build_role"
FIRST_LETTER, LAST_LETTER = 60, 85
"""Token ids that stand for letters in the tiny tokenizer."""


@dataclass(frozen=True)
class Profile:
    """Durations on one device, in seconds. Tokens are those of trajectories, prompts included."""

    prompt_tokens: int
    median_tokens: float
    """Median length of a response. Lengths are log-normal, cut at `rollout.max_response_tokens`."""
    sigma: float
    """Sigma of the log-normal distribution; 0.6 makes one response in twenty 2.7 times as long as the median."""
    prefill_s: float
    """Prefill of a sample."""
    token_s: float
    """Time from one token of a sequence to the next, however many sequences are decoded beside it."""
    logprob_token_s: float
    train_token_s: float
    call_s: float
    """Overhead of each call that computes log-probs or gradients, whatever its size."""
    step_s: float
    """Optimizer step."""
    transfer_s: float
    """Transfer of new weights; nothing is decoded meanwhile."""

    def faster(self, times: float) -> "Profile":
        fields = asdict(self)
        return Profile(**{name: value / times if name.endswith("_s") else value for name, value in fields.items()})

    def lengths(self, recipe: Recipe, prompt_ids: Sequence[int]) -> IntArray:
        """[prompts, samples], tokens of the responses: a function of the recipe's seed, the same in every process."""
        samples, most = recipe.batch.samples_per_prompt, recipe.rollout.max_response_tokens
        rngs = [
            [np.random.default_rng(seed_of(recipe.seed, "length", prompt_id, sample)) for sample in range(samples)]
            for prompt_id in prompt_ids
        ]
        normal = np.array([[rng.standard_normal() for rng in group] for group in rngs])
        return np.clip(self.median_tokens * np.exp(self.sigma * normal), 1, most).astype(np.int64)

    def sample_s(self, length: int) -> float:
        return self.prefill_s + self.token_s * length

    def logprobs_s(self, tokens: int) -> float:
        return self.call_s + self.logprob_token_s * tokens

    def train_s(self, tokens: int) -> float:
        return self.call_s + self.train_token_s * tokens


def profile_of(recipe: Recipe) -> Profile:
    return Profile(**recipe.environment.options)


def rows(num_rows: int, prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """Distinct prompts of `prompt_tokens` characters, which are tokens of the tiny tokenizer."""
    for row in range(num_rows):
        yield {"prompt": f"{row:08d}".ljust(prompt_tokens, "?"), "answer": ""}


class NoRewards(Role):
    async def try_out(self, rows: Any) -> dict[str, str]:
        return {}


def build_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    match role:
        case "rewards":
            return NoRewards()
        case "rollout":
            return SimulatedRolloutWorker(recipe)
    return SimulatedTrainer(recipe)


class SimulatedRolloutWorker(Role):
    """An engine with `rollout.max_sequences` slots; samples beyond that wait for a free one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.profile = recipe, profile_of(recipe)
        self.max_sequences = recipe.rollout.max_sequences or MAX_SEQUENCES["cpu"]
        self.slots = asyncio.Semaphore(self.max_sequences)
        self.finished: list[FinishedRequest] = []
        self.failure: Exception | None = None
        self.has_news = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.versions = [0]
        self.since = [0.0]
        """Time at which each version arrived."""
        self.paused_s = 0.0

    def facts(self) -> dict[str, Any]:
        return {"max_sequences": self.max_sequences}

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._roll_out(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def collect(self, requests: Sequence[RolloutRequest]) -> list[FinishedRequest]:
        await self.submit(requests)
        await self.has_news.wait()
        self.has_news.clear()
        if self.failure is not None:
            raise self.failure
        finished, self.finished = self.finished, []
        return finished

    async def ping(self) -> None:
        """Answering is enough."""

    async def cancel(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        self.finished.clear()
        self.has_news.clear()

    async def _roll_out(self, request: RolloutRequest) -> None:
        try:
            (lengths,) = self.profile.lengths(self.recipe, [request.prompt.prompt_id])
            samples = (
                self._sample(request.prompt, sample, int(lengths[sample])) for sample in range(request.num_samples)
            )
            trajectories = await asyncio.gather(*samples)
            self.finished.append((request.id, trajectories))
        except Exception as error:
            self.failure = error
        self.has_news.set()

    async def _sample(self, prompt: Prompt, sample: int, length: int) -> Trajectory:
        async with self.slots:
            started = time.monotonic()
            left, paused = self.profile.sample_s(length), self.paused_s
            while left > 0:
                await asyncio.sleep(left)
                left, paused = self.paused_s - paused, self.paused_s
            sampled_at = np.linspace(started, time.monotonic(), length)
        versions = np.array(self.versions)[np.searchsorted(self.since, sampled_at, side="right") - 1]
        rng = np.random.default_rng(seed_of(self.recipe.seed, "tokens", prompt.prompt_id, sample))
        return random_trajectory(prompt, sample, rng, versions)

    # --- new weights

    async def join_channel(self, *ends: Any) -> None:
        """There is no channel."""

    async def receive_weights(self, handle: Any, version: int) -> float:
        self.paused_s += self.profile.transfer_s
        await asyncio.sleep(self.profile.transfer_s)
        self.set_version(version)
        return self.profile.transfer_s

    def load_local_weights(self, version: int) -> float:
        self.set_version(version)
        return 0.0

    def set_version(self, version: int) -> None:
        self.versions.append(version)
        self.since.append(time.monotonic())

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)


def random_trajectory(prompt: Prompt, sample: int, rng: np.random.Generator, versions: IntArray) -> Trajectory:
    """One whose response has as many tokens as `versions`; its reward is different from all others."""
    length, start = len(versions), len(prompt.tokens)
    empty = np.zeros(start, np.float32)
    return Trajectory(
        tokens=np.concatenate([np.array(prompt.tokens, np.int64), rng.integers(FIRST_LETTER, LAST_LETTER, length)]),
        generated=np.arange(start + length) >= start,
        logprobs=np.concatenate([empty, -rng.random(length, np.float32)]),
        versions=np.concatenate([np.full(start, -1), versions]),
        turn_rewards=[(start + length - 1, float(rng.random()))],
        stop=StopReason.END_OF_TURN,
        prompt_id=prompt.prompt_id,
        sample=sample,
        row=prompt.index,
    )


class SimulatedTrainer(Role):
    """Actor or reference; one thing after the other, as on a device. Its log-probs are those of the engine."""

    def __init__(self, recipe: Recipe) -> None:
        self.profile = profile_of(recipe)
        self.device = asyncio.Lock()

    def facts(self) -> dict[str, Any]:
        return {"dtype": "float32", "address": "simulated"}

    async def compute_logprobs(self, shares: Sequence[Batch | None]) -> list[FloatArray]:
        for share in shares:
            await self._compute(self.profile.logprobs_s(num_tokens(share)))
        return [np.zeros(0, np.float32) if share is None else share.logprobs for share in shares]

    async def accumulate(self, share: Batch | None, terms: UpdateTerms) -> LossStats:
        await self._compute(self.profile.train_s(num_tokens(share)))
        return LossStats(num_tokens=0 if share is None else share.num_generated)

    async def step(self, scale: float) -> UpdateResult:
        await self._compute(self.profile.step_s)
        return UpdateResult(gradient_norm=1.0, learning_rate=1e-6, skipped=False)

    async def zero_grad(self) -> None:
        """There are none."""

    async def open_channel(self, kind: str) -> str:
        return ""

    async def join_channel(self, *ends: Any) -> None:
        """There is no channel."""

    async def send_weights(self) -> None:
        await self._compute(self.profile.transfer_s)

    async def release_weights(self) -> None:
        """None were kept."""

    async def save(self, folder: Path, writers: Sequence[int]) -> None:
        """There is nothing to save."""

    async def finish_save(self) -> None:
        """There is nothing to write."""

    async def hash_files(self, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {}

    async def can_see(self, file: Path) -> bool:
        return True

    async def _compute(self, seconds: float) -> None:
        async with self.device:
            await asyncio.sleep(seconds)


def num_tokens(share: Batch | None) -> int:
    return 0 if share is None else len(share.tokens)
