"""What a training step needs of the logits: one pass that reads them, and one that replaces them by their gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[rows, vocabulary] -> (log of the sum of exponentials, entropy), float32 [rows], of logits / temperature."""
    rows, vocabulary = logits.shape
    normaliser, entropy = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _statistics[(rows,)](
        logits, normaliser, entropy, logits.stride(0), 1.0 / temperature,
        VOCABULARY=vocabulary, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return normaliser, entropy


def overwrite_with_gradient(
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    target_starts: Tensor,
    targets: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Targets of row r are `targets[target_starts[r] : target_starts[r + 1]]`."""
    rows, vocabulary = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _gradient[(rows, triton.cdiv(vocabulary, block))](
        logits, normaliser, entropy, target_starts, targets, d_logprobs, normaliser if d_entropy is None else d_entropy,
        logits.stride(0), 1.0 / temperature,
        VOCABULARY=vocabulary, BLOCK=block, HAS_ENTROPY=d_entropy is not None, num_warps=8,
    )  # fmt: skip


@triton.jit
def _statistics(
    logits_at, normaliser_at, entropy_at, row_stride, inverse_temperature,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    weighted = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        mask = start + column < VOCABULARY
        logit = tl.load(logits_at + row * row_stride + start + column, mask=mask, other=float("-inf"))
        logit = logit.to(tl.float32) * inverse_temperature
        larger = tl.maximum(largest, tl.max(logit, axis=0))
        shrink = tl.exp(largest - larger)
        p = tl.exp(logit - larger)
        total = total * shrink + p
        weighted = weighted * shrink + p * tl.where(mask, logit, 0.0)
        largest = larger
    sum_total = tl.sum(total, axis=0)
    normaliser = largest + tl.log(sum_total)
    tl.store(normaliser_at + row, normaliser)
    tl.store(entropy_at + row, normaliser - tl.sum(weighted, axis=0) / sum_total)


@triton.jit
def _gradient(
    logits_at, normaliser_at, entropy_at, target_starts_at, targets_at, d_logprobs_at, d_entropy_at,
    row_stride, inverse_temperature,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < VOCABULARY
    at = logits_at + row * row_stride + column
    log_p = tl.load(at, mask=mask, other=0.0).to(tl.float32) * inverse_temperature - tl.load(normaliser_at + row)
    p = tl.exp(log_p)
    # d log p(target) / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
    total = 0.0
    at_targets = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(tl.load(target_starts_at + row), tl.load(target_starts_at + row + 1)):
        d_logprob = tl.load(d_logprobs_at + k)
        total += d_logprob
        at_targets += tl.where(column == tl.load(targets_at + k), d_logprob, 0.0)
    gradient = at_targets - p * total
    if HAS_ENTROPY:
        gradient -= tl.load(d_entropy_at + row) * p * (log_p + tl.load(entropy_at + row))
    tl.store(at, (gradient * inverse_temperature).to(logits_at.dtype.element_ty), mask=mask)
