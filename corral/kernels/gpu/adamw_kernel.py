"""AdamW (Loshchilov and Hutter 2019) in one pass: gradient, moments and master weight are read once, and the model's
own copy of the weight is written with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


# The same as in `corral/kernels/stochastic_rounding.py`, which says why.
@triton.jit
def _round_to_bfloat16(value, weight, num_updates):
    bits = value.to(tl.int32, bitcast=True)
    mixed = bits ^ (weight.to(tl.int32, bitcast=True) * 0x2545F491 + num_updates.to(tl.int32) * 0x3C6EF372)
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * 0x7FEB352D
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * 0x046CA68B
    mixed = mixed ^ ((mixed >> 16) & 0xFFFF)
    rounded = (bits + (mixed & 0xFFFF)) & -65536
    return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)


# A program updates BLOCK consecutive elements of one parameter. The update is bound by memory: 14 bytes are read and 14
# written for each bfloat16 parameter, so what counts is that nothing is read twice. torch's fused AdamW would need a
# pass of its own for clipping, one for the cast of the gradient, and one for the copy in the model's dtype.
#
# `factor_ptr` (clipping and loss scale in one number) lies on the device: the host need not wait for the gradient's
# norm before it launches. NaN means that the norm was not finite: then no program writes anything, and the step is
# skipped without the host having known.
#
# All arithmetic is float32. With master weights in bfloat16 an update of 1e-6 would be rounded away. beta^t is computed
# as exp(t log beta), for `num_updates` lies on the device too.
@triton.jit
def _adamw_kernel(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, copy_ptr, num_updates_ptr, factor_ptr,
    size, learning_rate, weight_decay, beta_1, beta_2, log_beta_1, log_beta_2, eps,
    HAS_COPY: tl.constexpr, HAS_ROUNDED_STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr)
    if factor == factor:  # not NaN
        num_updates = tl.load(num_updates_ptr)
        correction_1 = 1.0 - tl.exp(num_updates * log_beta_1)
        correction_2 = tl.sqrt(1.0 - tl.exp(num_updates * log_beta_2))
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = index < size
        grad = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32) * factor
        master = tl.load(master_ptr + index, mask=mask, other=0.0)
        exp_avg = tl.load(exp_avg_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg = exp_avg + (grad - exp_avg) * (1.0 - beta_1)
        exp_avg_sq = beta_2 * exp_avg_sq + (1.0 - beta_2) * grad * grad
        master = master * (1.0 - learning_rate * weight_decay)
        master = master - (learning_rate / correction_1) * exp_avg / (tl.sqrt(exp_avg_sq) / correction_2 + eps)
        tl.store(master_ptr + index, master, mask=mask)
        if HAS_ROUNDED_STATES:
            exp_avg = _round_to_bfloat16(exp_avg, master, num_updates)
            exp_avg_sq = _round_to_bfloat16(exp_avg_sq, master, num_updates)
        tl.store(exp_avg_ptr + index, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + index, exp_avg_sq, mask=mask)
        if HAS_COPY:
            tl.store(copy_ptr + index, master, mask=mask)


def adamw_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    num_updates: Tensor,
    factor: Tensor,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    log_betas: tuple[float, float],
    eps: float,
) -> None:
    """Updates `master` and both moments in place, and writes the new master, rounded, to `copy`. Moments that are
    bfloat16 are rounded stochastically.

    `num_updates` is the number of updates of this parameter, this one included; `factor` multiplies the gradient, and
    NaN stands for no update at all. Both are one number on the device.
    """
    size = master.numel()
    _adamw_kernel[(triton.cdiv(size, BLOCK_SIZE),)](
        master, grad, exp_avg, exp_avg_sq, master if copy is None else copy, num_updates, factor,
        size, learning_rate, weight_decay, *betas, *log_betas, eps,
        HAS_COPY=copy is not None, HAS_ROUNDED_STATES=exp_avg.dtype == torch.bfloat16, BLOCK=BLOCK_SIZE, num_warps=4,
    )  # fmt: skip
