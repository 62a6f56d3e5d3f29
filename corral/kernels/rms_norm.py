"""RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual addition before it."""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., width].

    Computed in float32; the weight is applied after rounding to x's dtype, as transformers does.
    """
    if not x.is_cuda:
        return plain_rms_norm(x, weight, eps)
    compute: Any = AddRMSNorm.apply
    normed: Tensor = compute(x, None, weight, eps)[0]
    return normed


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> (RMSNorm of x + residual, x + residual). Without a residual the sum is x itself.

    Go on with the sum that is returned, not with x: then both gradients of x are added up in the backward kernel.
    """
    if not x.is_cuda:
        summed = x if residual is None else x + residual
        return plain_rms_norm(summed, weight, eps), summed
    compute: Any = AddRMSNorm.apply
    result: tuple[Tensor, Tensor] = compute(x, residual, weight, eps)
    return result


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_f32 = x.to(torch.float32)
    normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from corral.kernels.gpu.rms_norm_kernels import norm_forward

        normed, summed, rstd = norm_forward(x, residual, weight, eps)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)
        return normed, x.view_as(x) if residual is None else summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from corral.kernels.gpu.rms_norm_kernels import norm_backward

        summed, weight, rstd = ctx.saved_tensors
        d_normed, d_summed = gradients
        if d_normed is None:
            return d_summed, d_summed if ctx.has_residual else None, None, None
        d_x, d_weight = norm_backward(d_normed, d_summed, summed, weight, rstd)
        return d_x, d_x if ctx.has_residual else None, d_weight, None
