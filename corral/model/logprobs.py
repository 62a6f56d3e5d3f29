"""Log-probabilities and entropy from hidden states, a chunk of rows at a time.

The logits of a batch, `[tokens, vocabulary]` in float32, are often the largest thing in a training step. They never
exist here: the forward pass keeps one chunk at a time, and the backward pass computes each chunk again (but for the
last one, which is still there).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """-> (log-prob of target k under the distribution at row `rows[k]` [targets], entropy of each row [rows]).

    hidden [rows, width]; `rows` must be sorted; several targets may share a row (samples that part ways after it).
    """
    compute: Any = _HeadLogprobs.apply
    result: tuple[Tensor, Tensor] = compute(hidden, weight, bias, rows, targets, temperature, chunk)
    return result


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, targets: Tensor,
        temperature: float, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        for span, wanted in _chunks(len(hidden), rows, chunk):
            logits = _logits(hidden[span], weight, bias, temperature)
            normaliser = logits.logsumexp(-1)
            local = rows[wanted] - span.start
            logprobs[wanted] = logits[local, targets[wanted]] - normaliser[local]
            log_p = logits - normaliser[:, None]
            entropy[span] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, entropy)
        ctx.temperature, ctx.chunk, ctx.last_log_p = temperature, chunk, log_p
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
                log_p = _logits(hidden[span], weight, bias, ctx.temperature).log_softmax(-1)
            p = log_p.exp()
            # d log p(target) / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            d_logits = p * -row_sums[span, None]
            if with_entropy:
                d_logits -= d_entropy[span, None] * p * (log_p + entropy[span, None])
            d_logits.index_put_((rows[wanted] - span.start, targets[wanted]), d_logprobs[wanted], accumulate=True)
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            d_hidden[span] = d_logits @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[span])
            else:
                d_weight += d_logits.T @ hidden[span]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype), *[None] * 4


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    if len(hidden) == 1:  # a single row goes through other kernels, which round differently
        return _logits(hidden.expand(2, -1), weight, bias, temperature)[:1]
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num_rows: int, rows: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """(rows of the chunk, targets that belong to them)"""
    starts = torch.arange(0, num_rows + chunk, chunk, device=rows.device).clamp_(max=num_rows)
    bounds = torch.searchsorted(rows, starts).tolist()
    for i, start in enumerate(range(0, num_rows, chunk)):
        yield slice(start, min(start + chunk, num_rows)), slice(bounds[i], bounds[i + 1])
