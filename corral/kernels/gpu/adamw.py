"""AdamW (Loshchilov and Hutter 2019) in one pass: gradient, moments and master are read once, and the model's own copy
is written with them."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _update(
    master_at, gradient_at, first_at, second_at, copy_at, updates_at, factor_at,
    size, rate, decay, beta_1, beta_2, log_beta_1, log_beta_2, eps,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_at)
    if factor == factor:  # not NaN
        updates = tl.load(updates_at)
        correction_1 = 1.0 - tl.exp(updates * log_beta_1)
        correction_2 = tl.sqrt(1.0 - tl.exp(updates * log_beta_2))
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = index < size
        gradient = tl.load(gradient_at + index, mask=mask, other=0.0).to(tl.float32) * factor
        master = tl.load(master_at + index, mask=mask, other=0.0)
        first = tl.load(first_at + index, mask=mask, other=0.0)
        second = tl.load(second_at + index, mask=mask, other=0.0)
        first = first + (gradient - first) * (1.0 - beta_1)
        second = beta_2 * second + (1.0 - beta_2) * gradient * gradient
        master = master * (1.0 - rate * decay)
        master = master - (rate / correction_1) * first / (tl.sqrt(second) / correction_2 + eps)
        tl.store(master_at + index, master, mask=mask)
        tl.store(first_at + index, first, mask=mask)
        tl.store(second_at + index, second, mask=mask)
        if HAS_COPY:
            tl.store(copy_at + index, master, mask=mask)


def update(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    updates: Tensor,
    factor: Tensor,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    log_betas: tuple[float, float],
    eps: float,
) -> None:
    """In place. `updates`: of this parameter, with this one; `factor`: of the gradient, NaN for no update at all (both
    one number, on the device). `copy`: gets the new master, rounded."""
    size = master.numel()
    _update[(triton.cdiv(size, BLOCK),)](
        master, gradient, first, second, master if copy is None else copy, updates, factor,
        size, rate, decay, *betas, *log_betas, eps,
        HAS_COPY=copy is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
