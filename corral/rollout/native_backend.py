"""The native engine as it runs in a process of its own."""

import asyncio

from corral.model.families import check_length
from corral.model.model_loading import default_device, load_model, load_tokenizer
from corral.recipe.schema import Model
from corral.rollout.engine import Sampling
from corral.rollout.engine_process import EngineSettings, Generated, WeightBucket
from corral.rollout.native_engine import NativeEngine, copy_weights


class NativeBackend:
    is_dead = False

    def __init__(self, settings: EngineSettings) -> None:
        spec = Model(
            path=settings.model,
            dtype=settings.dtype,  # type: ignore[arg-type]
            trust_remote_code=settings.trust_remote_code,
            config_overrides=dict(settings.config_overrides),
            exact=settings.exact,
            implementation=settings.implementation,  # type: ignore[arg-type]
        )
        model = load_model(spec, default_device()).requires_grad_(False)
        check_length(model.config, settings.max_length)
        self.engine = NativeEngine(
            model,
            load_tokenizer(spec),
            max_sequences=settings.max_sequences,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_length=settings.max_length,
        )
        self.engine.check(settings.model)

    @property
    def num_steps(self) -> int:
        return self.engine.num_decode_steps

    async def generate(self, tokens: list[int], sampling: Sampling, seed: int) -> Generated:
        completion = await self.engine.generate(tokens, sampling, seed)
        return Generated(completion.tokens, completion.logprobs, completion.versions, interrupted=False)

    async def compute_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        return await self.engine.compute_logprobs(tokens, temperature)

    async def begin_update(self) -> None:
        """Requests in flight are kept: the engine continues them with the new weights."""
        self.engine.has_weights.clear()
        await asyncio.get_running_loop().run_in_executor(self.engine.thread, lambda: None)  # the step in progress

    async def load(self, bucket: WeightBucket) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.engine.thread, copy_weights, self.engine.model, bucket.open())

    async def finish_update(self, version: int) -> None:
        await self.engine.update((), version)

    async def set_version(self, version: int) -> None:
        await self.engine.update((), version)

    async def release_memory(self) -> None:
        await asyncio.to_thread(self.engine.release_cache)
