"""The core of the general path: any causal model of transformers, decoded by its own forward pass and cache.

Requests whose sequences are equally long form a batch: it needs no padding and no mask, which not every model takes.
A batch decodes in lockstep until its last request has finished; those that finish earlier leave it. A model whose cache
does not give what its forward pass gives is computed from its first token at every step.
"""

import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.kernels.sampling import Truncation, sample_tokens
from corral.model.general_forward import model_inputs
from corral.rollout.engine_core import EngineStats, GenerationRequest


@dataclass(eq=False)
class LockstepBatch:
    """Requests that have as many tokens as each other, prompt and completion together."""

    requests: list[GenerationRequest]
    cache: Any
    """transformers' cache of all but the last token, or None where the model is computed without one."""
    shift: Any = None
    """[requests, 1], for prompts with images: by how much the position of a token behind them differs from its index,
    because an image takes as many positions as it is high or wide."""

    def keep(self, rows: list[int], device: torch.device) -> None:
        """Drops the other rows."""
        self.requests = [self.requests[row] for row in rows]
        if self.cache is not None and rows:
            picked = torch.tensor(rows, device=device)
            self.cache.reorder_cache(picked)
            self.shift = None if self.shift is None else self.shift[picked]


class GeneralCore:
    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int, max_prefill_tokens: int, max_length: int
    ) -> None:
        self.model, self.tokenizer, self.max_sequences = model, tokenizer, max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.device = next(model.parameters()).device
        self.cache_name = cache_name(model)
        limit_time_steps(model)
        self.uses_cache = cache_is_right(model)
        self.version = 0
        self.stats = EngineStats()
        self.batches: list[LockstepBatch] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.batches)

    def step(self, waiting: list[GenerationRequest]) -> list[GenerationRequest]:
        """Samples one token for every request that runs or can start."""
        finished: list[GenerationRequest] = []
        running, started = self.batches, self._admit(waiting)
        self.stats.num_decode_steps += bool(running)
        for batch in running:
            finished += self._sample(batch, self._decode(batch))
        for batch in started:
            finished += self._sample(batch, self._prefill(batch))
        self.batches = [batch for batch in [*running, *started] if batch.requests]
        return finished

    def use_version(self, version: int) -> None:
        self.version = version

    def abort_all(self) -> None:
        self.batches = []

    def release_cache(self) -> None:
        """Nothing to do: a batch's cache goes with the batch."""

    def acquire_cache(self) -> None:
        """Nothing to do."""

    def _admit(self, waiting: list[GenerationRequest]) -> list[LockstepBatch]:
        """Takes waiting requests in order while there is room; those with prompts of one length form a batch."""
        num_free = self.max_sequences - sum(len(batch.requests) for batch in self.batches)
        batches: dict[int, LockstepBatch] = {}
        num_taken = num_tokens = 0
        for request in waiting[:num_free]:
            num_tokens += len(request.prompt)
            if num_taken and num_tokens > self.max_prefill_tokens:
                break
            batches.setdefault(len(request.prompt), LockstepBatch([], None)).requests.append(request)
            request.prefix = None
            num_taken += 1
        del waiting[:num_taken]  # in place: the event loop's thread may append meanwhile
        self.stats.num_prompt_tokens += sum(len(r.prompt) for batch in batches.values() for r in batch.requests)
        return list(batches.values())

    def _prefill(self, batch: LockstepBatch) -> Tensor:
        """Logits [requests, vocabulary] of the first tokens. A prompt with several samples is computed once."""
        prompts = np.stack([request.prompt for request in batch.requests])
        distinct, row_of_request = np.unique(prompts, axis=0, return_inverse=True)
        rows = torch.from_numpy(row_of_request.reshape(-1)).to(self.device)
        self.stats.num_computed_tokens += distinct.size
        logits, batch.cache = self._forward(batch, distinct)
        if batch.cache is not None:
            batch.cache.reorder_cache(rows)
            if (distinct < 0).any():
                batch.shift = self.model.base_model.rope_deltas[rows]
        return logits[rows]

    def _decode(self, batch: LockstepBatch) -> Tensor:
        """Logits [requests, vocabulary] of the tokens after those sampled last."""
        if batch.cache is None:
            tokens = np.stack([[*request.prompt, *request.tokens] for request in batch.requests])
        else:
            tokens = np.array([[request.tokens[-1]] for request in batch.requests])
        self.stats.num_computed_tokens += tokens.size
        logits, batch.cache = self._forward(batch, tokens)
        return logits

    def _forward(self, batch: LockstepBatch, tokens: np.ndarray[Any, Any]) -> tuple[Tensor, Any]:
        """Logits [rows, vocabulary] after the last of the tokens [rows, tokens], and the cache with them."""
        images = {id: data for request in batch.requests for id, data in request.images.items()}
        inputs = model_inputs(self.model, torch.from_numpy(tokens).to(self.device), images)
        if not self.uses_cache:
            return self.model(**inputs, use_cache=False).logits[:, -1], None
        if batch.cache is not None and hasattr(self.model, "vision"):
            # Given here, because the model would take the positions of the batch that it prefilled last.
            index = torch.full((len(tokens), 1), batch.cache.get_seq_length(), device=self.device)
            inputs["position_ids"] = (index if batch.shift is None else index + batch.shift).expand(3, -1, -1)
        output = self.model(**inputs, **{self.cache_name: batch.cache}, use_cache=True)
        return output.logits[:, -1], output[self.cache_name]

    def _sample(self, batch: LockstepBatch, logits: Tensor) -> list[GenerationRequest]:
        """Samples a token for every request of the batch, and returns those that finish."""
        requests = list(batch.requests)
        sampling = [request.sampling for request in requests]
        truncation = None
        if any(s.truncates for s in sampling):
            columns = ([s.top_k for s in sampling], [s.top_p for s in sampling], [s.min_p for s in sampling])
            truncation = Truncation(*(self._tensor(column) for column in columns))
        tokens, logprobs = sample_tokens(
            logits,
            rows=torch.arange(len(requests), device=self.device),
            temperatures=self._tensor([float(s.temperature) for s in sampling]),
            seeds=self._tensor([request.seed for request in requests]),
            counters=self._tensor([len(request.tokens) for request in requests]),
            truncation=truncation,
        )
        self.stats.num_generated_tokens += len(requests)
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.extend([token], [logprob], self.version, self.tokenizer)
        running = [row for row, request in enumerate(requests) if request.finish_reason is None]
        if len(running) < len(requests):
            batch.keep(running, self.device)
        return [request for request in requests if request.finish_reason is not None]

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


def cache_name(model: Any) -> str:
    """How the model calls its cache, as an argument and in its output: those without attention have another word."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


def limit_time_steps(model: Any) -> None:
    """Layers of Mamba 2 clamp their time steps (`time_step_limit`) where they compute a sequence, and in transformers
    not where they decode a token (Zamba 2 and Nemotron-H always have such a limit). So it is applied to what these are
    made of, the last columns of the first projection."""
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        # With multipliers of the projection (Falcon-H1) its columns are not what is limited.
        if limit is None or tuple(limit) == (0.0, math.inf) or hasattr(module, "mup_vector"):
            continue
        before_softplus = torch.tensor(limit).expm1().log()

        def clamp(_: Any, args: Any, projected: Tensor, mixer: Any = module, limit: Tensor = before_softplus) -> Tensor:
            if projected.shape[1] > 1:
                return projected
            least, most = limit.to(projected.device)[:, None] - mixer.dt_bias.float()
            rest, steps = projected.split([projected.shape[-1] - len(least), len(least)], -1)
            return torch.cat([rest, steps.float().clamp(least, most).to(rest.dtype)], -1)

        module.in_proj.register_forward_hook(clamp)


@torch.inference_mode()
def cache_is_right(model: Any) -> bool:
    """Whether decoding with the model's cache, in a batch whose rows change places, gives what its forward pass gives.
    Some models have no such cache, or one that cannot be divided by rows."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (3, 6), generator=generator).to(device)
    expected = model(input_ids=tokens, use_cache=False).logits[:, 3:].float().log_softmax(-1)
    name = cache_name(model)
    try:
        output = model(input_ids=tokens[:, :4], use_cache=True)
        cache, rows = output[name], torch.arange(3, device=device)
        found = [output.logits[:, -1]]
        for position, order in ((4, [2, 0, 1]), (5, [1, 2])):
            picked = torch.tensor(order, device=device)
            cache.reorder_cache(picked)
            rows = rows[picked]
            output = model(input_ids=tokens[rows, position, None], **{name: cache}, use_cache=True)
            cache = output[name]
            found.append(output.logits[:, -1])
    except Exception:
        # Whatever goes wrong in a model's own code means that its cache is not used; the forward pass above has worked.
        return False
    checked = (expected[:, 0], expected[[2, 0, 1], 1], expected[[0, 1], 2])
    # Float32 rounds to about 1e-5; what differs more adds up over a long completion. Half precision rounds to tenths.
    tolerance = 2e-4 if model.dtype == torch.float32 else 0.3
    return all(
        bool(((one.float().log_softmax(-1) - other).abs().max() < tolerance).item())
        for one, other in zip(found, checked, strict=True)
    )
