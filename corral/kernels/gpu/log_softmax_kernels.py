"""What a training step needs of the logits: one pass that reads them, and one that replaces them by their gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 4096


def logsumexp_and_entropy(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Computes what `corral.kernels.log_softmax.logsumexp_and_entropy` does."""
    num_rows, vocab_size = logits.shape
    logsumexp, entropy = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK_SIZE, triton.next_power_of_2(vocab_size))
    _logsumexp_kernel[(num_rows,)](
        logits, logsumexp, entropy, logits.stride(0), 1.0 / temperature,
        VOCAB_SIZE=vocab_size, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logsumexp, entropy


def overwrite_with_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    target_starts: Tensor,
    targets: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Computes what `corral.kernels.log_softmax.overwrite_with_gradient` does."""
    num_rows, vocab_size = logits.shape
    block = min(BLOCK_SIZE, triton.next_power_of_2(vocab_size))
    _gradient_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits, logsumexp, entropy, target_starts, targets, d_logprobs, logsumexp if d_entropy is None else d_entropy,
        logits.stride(0), 1.0 / temperature,
        VOCAB_SIZE=vocab_size, BLOCK=block, HAS_ENTROPY=d_entropy is not None, num_warps=8,
    )  # fmt: skip


# A program reads one row of logits, a block at a time, with the running softmax of flash-attention: m is the maximum so
# far, l the sum of exp(x - m), acc the sum of x exp(x - m), and alpha = exp(m_old - m_new) rescales both when m grows.
# So the row is read once, and nothing of its size is written. entropy = logsumexp - acc / l.
#
# l and acc stay one element per lane until the end: a reduction across the program in every round is what a running
# softmax usually waits for, and m is the only one that is needed at once. Sums are float32 whatever the logits' dtype.
@triton.jit
def _logsumexp_kernel(
    logits_ptr, logsumexp_ptr, entropy_ptr, row_stride, inverse_temperature,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    m = float("-inf")
    l = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        mask = start + column < VOCAB_SIZE
        logit = tl.load(logits_ptr + row * row_stride + start + column, mask=mask, other=float("-inf"))
        logit = logit.to(tl.float32) * inverse_temperature
        m_new = tl.maximum(m, tl.max(logit, axis=0))
        alpha = tl.exp(m - m_new)
        p = tl.exp(logit - m_new)
        l = l * alpha + p
        acc = acc * alpha + p * tl.where(mask, logit, 0.0)  # 0 x -inf is NaN
        m = m_new
    l_row = tl.sum(l, axis=0)
    logsumexp = m + tl.log(l_row)
    tl.store(logsumexp_ptr + row, logsumexp)
    tl.store(entropy_ptr + row, logsumexp - tl.sum(acc, axis=0) / l_row)


# A program turns BLOCK logits of one row into their gradient, in place: the logits are the largest tensor of a step,
# and a second one of their size would not fit. Each element depends on nothing but itself and the row's two statistics,
# so no program reads what another has overwritten. A row has few targets (one for each sample that goes on differently
# after this token): every program walks over all of them, which needs no sorting and no atomics.
#
# The gradient is computed in float32 and rounded once, to the logits' dtype, as the matrix products after it want it.
@triton.jit
def _gradient_kernel(
    logits_ptr, logsumexp_ptr, entropy_ptr, target_starts_ptr, targets_ptr, d_logprobs_ptr, d_entropy_ptr,
    row_stride, inverse_temperature,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < VOCAB_SIZE
    ptr = logits_ptr + row * row_stride + column
    log_p = tl.load(ptr, mask=mask, other=0.0).to(tl.float32) * inverse_temperature - tl.load(logsumexp_ptr + row)
    p = tl.exp(log_p)
    # d log p(target) / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
    d_logprob_sum = 0.0
    onehot_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(tl.load(target_starts_ptr + row), tl.load(target_starts_ptr + row + 1)):
        d_logprob = tl.load(d_logprobs_ptr + k)
        d_logprob_sum += d_logprob
        onehot_sum += tl.where(column == tl.load(targets_ptr + k), d_logprob, 0.0)
    gradient = onehot_sum - p * d_logprob_sum
    if HAS_ENTROPY:
        gradient -= tl.load(d_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(ptr, (gradient * inverse_temperature).to(logits_ptr.dtype.element_ty), mask=mask)
