"""The gated activation of a feed-forward layer, silu(gate) * up (Shazeer 2020, SwiGLU)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 units], gates first -> [tokens, units]; the activation is rounded before it is multiplied."""
    if not gate_up.is_cuda:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    compute: Any = SiluMul.apply
    result: Tensor = compute(gate_up)
    return result


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from corral.kernels.gpu.gate import gate_forward

        ctx.save_for_backward(gate_up)
        return gate_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from corral.kernels.gpu.gate import gate_backward

        return gate_backward(gradients[0], *ctx.saved_tensors)
