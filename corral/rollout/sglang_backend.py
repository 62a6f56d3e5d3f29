"""SGLang as an engine, in a process of its own. Seen to work: 0.5.17 on a GPU.

Its log-probs are those after the temperature and before top-k, top-p and min-p, as training needs them.
"""

import asyncio
import dataclasses
import itertools
from typing import Any

import torch

from corral.recipe.errors import RunError, UserError
from corral.rollout.engine import Sampling
from corral.rollout.engine_process import EngineSettings, Generated, WeightBucket, check_arguments

OWN = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_running_requests": "rollout.max_sequences",
    "tp_size": "Corral",
    "mem_fraction_static": "rollout.engine.memory_fraction",
    "quantization": "nobody yet: it was not tried with weights that change",
    "random_seed": "seed",
    "trust_remote_code": "model.trust_remote_code",
    "incremental_streaming_output": "Corral",
    "skip_tokenizer_init": "Corral, for stop strings",
    "enable_memory_saver": "Corral",
}
"""Arguments of SGLang that are decided elsewhere, and where."""
POLL_S = 0.02
STREAM_INTERVAL = 8
"""Tokens after which a request reports: often enough to see that it goes on, seldom enough to cost nothing."""


class SglangBackend:
    is_dead = False
    """It ends this process itself when one of its own has ended."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.manager = engine, engine.tokenizer_manager
        self.num_steps = 0
        self.version = 0
        self.in_flight: set[str] = set()
        self.ids = itertools.count()
        self.released = False

    @classmethod
    async def start(cls, settings: EngineSettings) -> "SglangBackend":
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise UserError(
                f"rollout.engine: this Python has no SGLang ({error}); install it, or name the interpreter of an "
                "environment that has it: rollout.engine: {name: sglang, python: /path/to/bin/python}"
            ) from error
        check_arguments("SGLang", settings.arguments, OWN, [field.name for field in dataclasses.fields(ServerArgs)])
        if settings.config_overrides:
            raise UserError("model.config_overrides: not with `rollout.engine: sglang`")
        arguments: dict[str, Any] = {
            "model_path": settings.model,
            "dtype": settings.dtype,
            "context_length": settings.max_length,
            "max_running_requests": settings.max_sequences,
            "cuda_graph_max_bs_decode": settings.max_sequences,  # with its default larger batches have half the speed
            "sampling_backend": "pytorch",  # FlashInfer's is compiled at the first request, which needs a CUDA toolkit
            "random_seed": settings.seed % 2**31,
            "trust_remote_code": settings.trust_remote_code,
            "incremental_streaming_output": True,
            "stream_interval": STREAM_INTERVAL,
            "enable_memory_saver": True,
            "log_level": "warning",
            **settings.arguments,
        }
        if settings.memory_fraction is not None:
            arguments["mem_fraction_static"] = settings.memory_fraction
        return cls(sglang.Engine(**arguments))

    async def generate(self, tokens: list[int], sampling: Sampling, seed: int) -> Generated:
        """`seed` is not used: a token depends on the batch anyway."""
        version = self.version
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": sorted(sampling.stop_tokens) or None,
            "ignore_eos": True,  # the model's own end tokens are among those
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        pairs: list[tuple[float, int]] = []
        reason: Any = None
        async for output in await self._request(tokens, params, stream=True):
            self.num_steps += 1
            meta = output["meta_info"]
            pairs += [(logprob, token) for logprob, token, *_ in meta.get("output_token_logprobs") or ()]
            reason = meta.get("finish_reason") or reason
        interrupted = isinstance(reason, dict) and reason.get("type") == "abort"
        return Generated([t for _, t in pairs], [p for p, _ in pairs], [version] * len(pairs), interrupted)

    async def _request(self, tokens: list[int], params: dict[str, Any], **more: Any) -> Any:
        """Answers of SGLang, one after the other; meanwhile the request counts as in flight."""
        if self.released:
            await self._resume()
        name = f"corral-{next(self.ids)}"

        async def answers() -> Any:
            self.in_flight.add(name)
            try:
                async for output in await self.engine.async_generate(
                    input_ids=tokens, sampling_params=params, return_logprob=True, rid=name, **more
                ):
                    yield output
            except asyncio.CancelledError:
                self.manager.abort_request(rid=name)
                raise
            finally:
                self.in_flight.discard(name)

        return answers()

    async def compute_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Each token's log-prob, had it been sampled behind those before it, by the very code that samples."""
        params = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}

        async def logprob(position: int) -> float:
            answers = await self._request(tokens[:position], params, stream=True, token_ids_logprob=[tokens[position]])
            found = [row async for output in answers for row in output["meta_info"]["output_token_ids_logprobs"]]
            return float(found[0][0][0])

        return list(await asyncio.gather(*(logprob(position) for position in range(1, len(tokens)))))

    async def begin_update(self) -> None:
        """Ends requests in flight, which are asked for again: their keys and values would be those of old weights."""
        if self.released:
            await self._resume()
        while self.in_flight:  # again, since one that has just come may not have reached the scheduler
            self.manager.abort_request(abort_all=True)
            await asyncio.sleep(POLL_S)

    async def load(self, bucket: WeightBucket) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # A process cannot pass on memory that it has mapped itself.
        weights = [(name, tensor.clone()) for name, tensor in bucket.open()]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(weights)], flush_cache=False
        )
        succeeded, message = (await self.manager.update_weights_from_tensor(request, None))[:2]
        if not succeeded:
            raise RunError(f"SGLang did not take the weights: {message}")
        torch.cuda.synchronize()

    async def finish_update(self, version: int) -> None:
        if not (await self.manager.flush_cache()).success:
            raise RunError("SGLang did not flush its prefix cache after an update of the weights")
        self.version = version

    async def set_version(self, version: int) -> None:
        self.version = version

    async def release_memory(self) -> None:
        """The cache is dropped; the weights stay."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if not self.released:
            self.released = True
            await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]), None)

    async def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self.released = False
        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
