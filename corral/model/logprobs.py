"""Log-probabilities and entropy from hidden states, a chunk of rows at a time.

The logits of a batch, `[tokens, vocabulary]` in float32, are often the largest tensor of a training step: 16,384 tokens
x 151,936 words are 10 GB. They never exist here: the forward pass keeps one chunk at a time, and the backward pass
computes each chunk again, but for the last one, which is still there (where one chunk is all, nothing is computed
twice).

On a CPU, and where they are soft-capped, logits are float32. Else on a GPU they are in the model's own dtype, as the
matrix product leaves them; the kernels read them once, compute in float32, and overwrite them by their gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from corral.kernels.log_softmax import logsumexp_and_entropy, overwrite_with_gradient

CAPPED_CHUNK = 1024
"""Most rows of soft-capped logits at a time on a GPU: they take eight times the memory of others, in float32 with what
is computed of them."""


@dataclass(frozen=True)
class OutputHead:
    """The last linear layer of a model, and what its family does with the logits."""

    module: Any
    scale: float = 1.0
    """Factor of the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`)."""
    softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap) (Gemma 2's `final_logit_softcapping`)."""

    @classmethod
    def of_model(cls, model: Any) -> Self:
        config = model.config.get_text_config()
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module(hidden)
        return _transformed(logits, self.scale, self.softcap)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, *, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """-> (log-prob of target k under the distribution at row `rows[k]` [targets], entropy of each row [rows]).

        hidden [rows, width]; `rows` must be sorted; several targets may share a row (samples that part ways after it).
        """
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        arguments = (hidden, weight, bias, rows, targets)
        compute: Any
        if hidden.is_cuda and self.softcap is None:
            compute = HeadLogprobsInPlace.apply
            result: tuple[Tensor, Tensor] = compute(*arguments, temperature / self.scale, chunk)
        else:
            compute = HeadLogprobs.apply
            chunk = min(chunk, CAPPED_CHUNK) if hidden.is_cuda else chunk
            result = compute(*arguments, temperature, chunk, self.scale, self.softcap)
        return result


class HeadLogprobs(torch.autograd.Function):
    """For CPUs, and on GPUs for soft-capped logits: with plain torch and float32 logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, targets: Tensor,
        temperature: float, chunk: int, scale: float, softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        for span, wanted in _chunks(len(hidden), rows, chunk):
            logits = _logits(hidden[span], weight, bias, temperature, scale, softcap)
            logsumexp = logits.logsumexp(-1)
            local = rows[wanted] - span.start
            logprobs[wanted] = logits[local, targets[wanted]] - logsumexp[local]
            log_p = logits - logsumexp[:, None]
            entropy[span] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, entropy)
        ctx.chunk, ctx.last_log_p, ctx.of_logits = chunk, log_p, (temperature, scale, softcap)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, targets, entropy = ctx.saved_tensors
        d_logprobs, d_entropy = gradients
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        row_sums = d_entropy.new_zeros(len(hidden)).index_add_(0, rows, d_logprobs)
        with_entropy = bool(d_entropy.any())
        for span, wanted in _chunks(len(hidden), rows, ctx.chunk):
            if span.stop == len(hidden):
                log_p = ctx.last_log_p
            else:
                log_p = _logits(hidden[span], weight, bias, *ctx.of_logits).log_softmax(-1)
            p = log_p.exp()
            # d log p(target) / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            d_logits = p * -row_sums[span, None]
            if with_entropy:
                d_logits -= d_entropy[span, None] * p * (log_p + entropy[span, None])
            d_logits.index_put_((rows[wanted] - span.start, targets[wanted]), d_logprobs[wanted], accumulate=True)
            temperature, scale, softcap = ctx.of_logits
            d_logits = d_logits.mul_(scale / temperature)
            if softcap is not None:  # the derivative of softcap * tanh(x / softcap) is 1 - tanh^2
                capped = _logits(hidden[span], weight, bias, 1.0, scale, softcap)
                d_logits *= 1 - (capped / softcap) ** 2
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[span] = d_logits @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[span])
            else:
                d_weight += d_logits.T @ hidden[span]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype), *[None] * 6


class HeadLogprobsInPlace(torch.autograd.Function):
    """For GPUs: one buffer for the logits of a chunk, which becomes that of their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, targets: Tensor,
        temperature: float, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        buffer = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        statistics = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        spans = list(_chunks(len(hidden), rows, chunk))
        for span, wanted in spans:
            logits = _logits_into(buffer, hidden[span], weight, bias)
            logsumexp, entropy = logsumexp_and_entropy(logits, temperature)
            statistics[0, span], statistics[1, span] = logsumexp, entropy
            local = rows[wanted] - span.start
            logprobs[wanted] = logits[local, targets[wanted]].float() / temperature - logsumexp[local]
        ctx.save_for_backward(hidden, weight, bias, rows, targets, statistics)
        ctx.temperature, ctx.spans, ctx.buffer = temperature, spans, buffer
        ctx.set_materialize_grads(False)
        return logprobs, statistics[1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, targets, statistics = ctx.saved_tensors
        d_logprobs, d_entropy = gradients
        if d_logprobs is None:
            d_logprobs = statistics.new_zeros(len(targets))
        starts = torch.searchsorted(rows, torch.arange(len(hidden) + 1, device=rows.device))
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        buffer, ctx.buffer = ctx.buffer, None  # overwritten below: a second backward pass must not find it
        for n, (span, wanted) in enumerate(reversed(ctx.spans)):
            if n == 0 and buffer is not None:
                logits = buffer[: span.stop - span.start]
            else:
                buffer = hidden.new_empty(ctx.spans[0][0].stop, len(weight)) if buffer is None else buffer
                logits = _logits_into(buffer, hidden[span], weight, bias)
            overwrite_with_gradient(
                logits,
                statistics[0, span],
                statistics[1, span],
                starts[span.start : span.stop + 1] - wanted.start,
                targets[wanted],
                d_logprobs[wanted].contiguous(),
                None if d_entropy is None else d_entropy[span].contiguous(),
                ctx.temperature,
            )
            torch.mm(logits, weight, out=d_hidden[span])
            d_weight = _added_product(d_weight, logits.T, hidden[span], is_only=len(ctx.spans) == 1)
            if bias is not None:
                total = logits.sum(0, dtype=torch.float32)
                d_bias = total if d_bias is None else d_bias.add_(total)
        assert d_weight is not None
        return d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype), *[None] * 4


def _logits_into(buffer: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in the buffer, not yet divided by the temperature: the kernels do that in float32."""
    logits = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.T, out=logits)
    return torch.addmm(bias, hidden, weight.T, out=logits)


def _added_product(total: Tensor | None, left: Tensor, right: Tensor, is_only: bool) -> Tensor:
    """total + left @ right, summed over chunks in float32.

    Rounded to bfloat16 after each chunk, small contributions would be lost against a large sum. A single product is
    accumulated in float32 inside the matrix library, and rounded once.
    """
    if is_only:
        return left @ right
    if left.is_cuda and left.dtype != torch.float32:
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = left.float() @ right.float()
    return product if total is None else total.add_(product)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None
) -> Tensor:
    # A single row would go through a matrix-vector kernel, which sums in another order: a token's log-prob would depend
    # on what it is batched with.
    if len(hidden) == 1:
        return _logits(hidden.expand(2, -1), weight, bias, temperature, scale, softcap)[:1]
    logits = _transformed(torch.nn.functional.linear(hidden, weight, bias), scale, softcap).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _transformed(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunks(num_rows: int, rows: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """(rows of the chunk, targets that belong to them) of each chunk."""
    if num_rows <= chunk:  # no `tolist`, which would wait for the GPU
        yield slice(0, num_rows), slice(0, len(rows))
        return
    starts = torch.arange(0, num_rows + chunk, chunk, device=rows.device).clamp_(max=num_rows)
    bounds = torch.searchsorted(rows, starts).tolist()
    for i, start in enumerate(range(0, num_rows, chunk)):
        yield slice(start, min(start + chunk, num_rows)), slice(bounds[i], bounds[i + 1])
