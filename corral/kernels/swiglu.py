"""SwiGLU (Shazeer 2020): the gated activation of a feed-forward layer, silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 width], gates first -> [tokens, width]; the activation is rounded before it is multiplied."""
    if not gate_up.is_cuda:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    compute: Any = SiluMul.apply
    result: Tensor = compute(gate_up)
    return result


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from corral.kernels.gpu.swiglu_kernels import swiglu_forward

        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from corral.kernels.gpu.swiglu_kernels import swiglu_backward

        return swiglu_backward(gradients[0], *ctx.saved_tensors)
