"""The last stage of a step: the engines get the new weights, and a probe shows that they have them.

In one process with whole tensors nothing travels: the engine decodes with the trainer's own. Otherwise weights go
through a channel (`runtime/transfer_channels.py`), in buckets, and every engine computes the log-probs of one prompt
afterwards, which must be the trainer's. A tensor that did not arrive, arrived twice or in the wrong place, or belongs
to another version, shows there, whichever it is: all of them take part in every log-prob.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from corral.data.batch import Batch, FloatArray, Trajectory
from corral.recipe.errors import RunError
from corral.runtime.group import WorkerLost, gather_calls
from corral.runtime.model_workers import ActorWorker, TrainerGroup
from corral.runtime.rollout_worker import RolloutScheduler, RolloutWorker

PROBE_TOKENS = 64
"""Tokens of the probe: one forward pass of next to no time."""

PROBE_BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 1.0, torch.float16: 0.1}
"""Largest deviation of a log-prob, by the model's data type: three to five times what mere rounding does. Where engine
and trainer use the same kernels the deviation is 0. With others (the same 64 tokens of SmolLM2-135M computed one by one
instead of all at once) it was 4e-5, 0.3 and 0.02: a log-prob is a difference of logits of up to 40, which bfloat16
rounds to multiples of 0.25. One of the model's 272 tensors missing made it 1.4 and more. Weights that are one update
old show in float32 (7e-4 for a learning rate of 1e-6), and not in the others with any bound that rounding keeps."""


class WeightPublisher:
    """Sends the actor's weights to all rollout workers that are there.

    `scheduler`: knows which rollout workers there are, and whom to tell when one is lost. `kind`: shared, collective,
    object or ipc. `in_process`: whether engines are in the process of their rollout worker. `has_adapters`: whether
    only adapters are trained, and sent to such engines. `prompt`: some tokens to probe with. Whoever calls it holds the
    lock of the trainers. `senders`: ranks of the trainers that send, each a part, where the channel has several: one of
    each node, so that every node's link is used.
    """

    def __init__(
        self,
        actor: TrainerGroup[ActorWorker],
        scheduler: RolloutScheduler,
        kind: str,
        dtype: str,
        prompt: Sequence[int],
        *,
        in_process: bool = True,
        has_adapters: bool = False,
        returns_weights: bool = False,
        senders: Sequence[int] = (0,),
    ) -> None:
        self.in_process, self.has_adapters, self.returns_weights = in_process, has_adapters, returns_weights
        self.senders = list(senders) if kind == "collective" else [0]
        self.actor, self.scheduler, self.rollout, self.kind = actor, scheduler, scheduler.group, kind
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.probe = probe_batch(prompt if len(prompt) > 1 else [*prompt, *prompt])
        self.version = 0
        """Version of the trainers' weights."""
        self.channel_ranks: list[int] | None = None
        """Ranks of the rollout workers that have joined the channel; None: there is no channel that works."""
        self.is_released = False
        """Whether engines have given their weights back, and wait for new ones."""
        self.returning: set[int] = set()
        """Ranks of rollout workers that were started again with the trainer in their process. They take requests when
        they have been sent weights: in the middle of a step the trainers' are no version's."""

    async def connect(self) -> None:
        """Connects trainers and engines that are on devices of their own, before caches take what a device has: NCCL's
        memory is beside torch's. Without this call the first `publish` does it."""
        if self.kind == "collective":
            await self._join(sorted(self.scheduler.queues))

    async def publish(self, version: int) -> dict[str, float]:
        """Consumes the trainers' weights; afterwards all engines sample with them. Waits for both sides. What is being
        generated goes on with the new weights, after a pause that is a metric."""
        self.version = version
        return await self._publish()

    async def release(self, ranks: Sequence[int] | None = None) -> None:
        """Gives the memory of the engines' copies of the weights to the trainers beside them, where that is agreed on,
        until the next `publish`. All prompts are rolled out. `ranks`: of the rollout workers; None: all."""
        if self.returns_weights:
            self.is_released = True
            await self.rollout.all(RolloutWorker.release_weights, ranks=ranks)

    async def add_receiver(self, rank: int, device: int) -> None:
        """Sends the current weights to a rollout worker that is new, and to all others again: a channel has a fixed set
        of ends, so there is a new one anyway. The loss of the new one is raised."""
        self.channel_ranks = None
        await self._publish((rank, device))

    async def _publish(self, joining: tuple[int, int] | None = None) -> dict[str, float]:
        """Publishes, and again without those that are lost meanwhile. `joining`: rank and device of a new one."""
        while ranks := sorted({*self.scheduler.queues, *self.returning, *(() if joining is None else joining[:1])}):
            try:
                metrics = await self._publish_to(ranks)
            except WorkerLost as lost:
                if joining is not None and lost.device == joining[1]:
                    raise
                trainers_are_back = await self.actor.on_lost(lost)
                if not self.scheduler.on_lost(lost) and not trainers_are_back:  # a node may have had workers of both
                    raise
            else:
                self.is_released = False
                while self.returning:
                    self.scheduler.add_worker(self.returning.pop())
                return metrics
        return {}

    async def _publish_to(self, ranks: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        # One that died while it was idle is noticed here, before others wait for it in a collective.
        await self.rollout.all(RolloutWorker.ping, ranks=ranks)
        if self.kind == "shared":
            if not any(await self.rollout.all(RolloutWorker.load_local_weights, self.version)):
                return {}  # the engines' tensors are the trainers'
            pauses = [0.0]
        else:
            try:
                pauses = await self._send(list(ranks))
            except BaseException:
                self.channel_ranks = None  # it failed, or one of its ends is gone: of no use any more
                raise
        return {
            "time/transfer_s": time.perf_counter() - started,
            "time/pause_s": max(pauses),
            "transfer/probe_deviation": await self._check(ranks),
        }

    async def _send(self, ranks: list[int]) -> list[float]:
        actor, rollout = self.actor.group, self.rollout
        if ranks != self.channel_ranks:
            await self._join(ranks)
        pauses: list[float]
        if self.kind == "collective":  # both sides at the same time
            _, pauses = await gather_calls(
                actor.all(ActorWorker.send_weights),
                rollout.all(RolloutWorker.receive_weights, None, self.version, ranks=ranks),
            )
        else:
            handle = (await actor.all(ActorWorker.send_weights))[0]
            pauses = await rollout.all(RolloutWorker.receive_weights, handle, self.version, ranks=ranks)
        await actor.all(ActorWorker.release_weights, ranks=self.senders)
        return pauses

    async def _join(self, ranks: list[int]) -> None:
        num_senders, size = len(self.senders), len(ranks) + len(self.senders)
        rendezvous = await self.actor.group.one(self.senders[0], ActorWorker.open_channel, self.kind)
        ends = [(self.kind, rendezvous, end, size, num_senders) for end in range(size)]
        await gather_calls(
            self.actor.group.each(ActorWorker.join_channel, ends[:num_senders], ranks=self.senders),
            self.rollout.each(RolloutWorker.join_channel, ends[num_senders:], ranks=ranks),
        )
        self.channel_ranks = ranks

    async def _check(self, ranks: Sequence[int]) -> float:
        if self.has_adapters and self.in_process:
            await self._check_adapters(ranks)
        trainer = await self.actor.compute_column(ActorWorker.compute_logprobs, self.probe, [[0]])
        engines = await self.rollout.all(RolloutWorker.compute_logprobs, self.probe.tokens.tolist(), ranks=ranks)
        return max(
            compare_logprobs(trainer[1:], engine, self.dtype, version=self.version, name=self.rollout.names[rank])
            for rank, engine in zip(ranks, engines, strict=True)
        )

    async def _check_adapters(self, ranks: Sequence[int]) -> None:
        """Raises where an engine does not have the trainers' adapters, bit for bit. The probe alone would not see it:
        an update moves adapters by less than what bfloat16 rounds, so an engine could sample with the bare model for
        long."""
        sent = (await self.actor.group.all(ActorWorker.adapter_sums))[0]
        for rank, arrived in zip(ranks, await self.rollout.all(RolloutWorker.adapter_sums, ranks=ranks), strict=True):
            if wrong := [name for name in sent if arrived.get(name) != sent[name]]:
                raise RunError(
                    f"after the transfer of version {self.version} the engine on {self.rollout.names[rank]} has other "
                    f"adapters than the trainer: {len(wrong)} of {len(sent)} differ, the first is {wrong[0]}"
                )


def probe_batch(prompt: Sequence[int]) -> Batch:
    """Makes a batch of the beginning of a prompt, every token behind the first marked as generated."""
    return Batch.of([Trajectory.from_tokens(prompt[:PROBE_TOKENS])])


def compare_logprobs(
    trainer: Sequence[float] | FloatArray,
    engine: Sequence[float] | FloatArray,
    dtype: torch.dtype,
    *,
    version: int,
    name: str,
) -> float:
    """Returns the largest difference of two log-probs of the same token. `name`: of the engine, for the error if it is
    too large."""
    difference = np.abs(np.asarray(trainer, np.float64) - np.asarray(engine, np.float64))
    deviation, bound = float(difference.max()), PROBE_BOUNDS[dtype]
    if not deviation <= bound:  # nor when it is not a number
        raise RunError(
            f"after the transfer of version {version} the engine on {name} disagrees with the trainer by "
            f"{deviation:.2g} on the probe prompt (bound {bound:g}): its weights are not those that were sent, or the "
            "two do not compute the same model"
        )
    return deviation
