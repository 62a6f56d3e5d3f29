"""The last stage of a step: the engines get the new weights, and a probe shows that they have them.

In one process with whole tensors nothing travels: the engine decodes with the trainer's own. Otherwise weights go
through a channel (`runtime/transfer`), in buckets, and every engine is asked for the log-probs of one prompt
afterwards, which must be the trainer's.
"""

import time
from collections.abc import Collection, Sequence

import torch

from corral.loop.trainer_group import TrainerGroup
from corral.runtime.group import Group, together
from corral.runtime.probe import compare, probe_batch


class WeightPublisher:
    """`kind`: shared, collective, object or ipc. `prompt`: some tokens to probe with."""

    def __init__(self, actor: TrainerGroup, rollout: Group, kind: str, dtype: str, prompt: Sequence[int]) -> None:
        self.actor, self.rollout, self.kind = actor, rollout, kind
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.probe = probe_batch([prompt if len(prompt) > 1 else [*prompt, *prompt]])
        self.joined: tuple[int, ...] | None = None
        """Ranks of the rollout that the channel reaches."""

    @property
    def copies(self) -> bool:
        """Whether engines have tensors of their own."""
        return self.kind != "shared" or not self.actor.mesh.is_whole

    async def publish(self, version: int, ranks: Collection[int]) -> dict[str, float]:
        """Consumes the trainers' weights; afterwards the engines of `ranks` draw with them. Waits for both sides. What
        is being generated goes on with the new weights, after a pause that is a metric."""
        started = time.perf_counter()
        await self.rollout.all("ping", ranks=sorted(ranks))  # one that died idle is heard of before others wait for it
        if self.kind == "shared":
            pauses = await self.rollout.all("share_weights", version)
        else:
            try:
                pauses = await self._send(version, tuple(sorted(ranks)))
            except BaseException:
                self.reopen()
                raise
        if not self.copies:
            return {}
        return {
            "time/transfer_s": time.perf_counter() - started,
            "time/pause_s": max(pauses),
            "transfer/probe_deviation": await self._check(version, sorted(ranks)),
        }

    def reopen(self) -> None:
        """The channel is of no use any more: it failed, or one of its ends is another process now."""
        self.joined = None

    async def _send(self, version: int, ranks: tuple[int, ...]) -> list[float]:
        pauses: list[float]
        if ranks != self.joined:
            await self._open(ranks)
        actor = self.actor.group
        if self.kind == "collective":
            _, pauses = await together(
                actor.all("send_weights"), self.rollout.all("receive_weights", None, version, ranks=ranks)
            )
        else:
            parcel = (await actor.all("send_weights"))[0]
            pauses = await self.rollout.all("receive_weights", parcel, version, ranks=ranks)
        await actor.one(0, "release_weights")
        return pauses

    async def _open(self, ranks: tuple[int, ...]) -> None:
        actor, size = self.actor.group, len(ranks) + 1
        meeting = await actor.one(0, "open_channel", self.kind)
        receivers = [(self.kind, meeting, end, size) for end in range(1, size)]
        await together(
            actor.one(0, "join_channel", meeting, size), self.rollout.each("join_channel", receivers, ranks=ranks)
        )
        self.joined = ranks

    async def _check(self, version: int, ranks: Sequence[int]) -> float:
        trainer = await self.actor.column("logprobs", self.probe, [[0]])
        tokens = self.probe.tokens.tolist()
        engines = await self.rollout.all("probe", tokens, ranks=ranks)
        return max(
            compare(trainer[1:], engine, self.dtype, version=version, name=self.rollout.names[rank])
            for rank, engine in zip(ranks, engines, strict=True)
        )
