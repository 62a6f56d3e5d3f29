"""silu(gate) * up, forward and backward, each in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(width, BLOCK_SIZE))
    _swiglu_forward_kernel[grid](gate_up, output, width, BLOCK=BLOCK_SIZE, num_warps=4)
    return output


def swiglu_backward(d_output: Tensor, gate_up: Tensor) -> Tensor:
    gate_up, d_output = gate_up.contiguous(), d_output.contiguous()
    num_tokens, width = d_output.shape
    d_gate_up = torch.empty_like(gate_up)
    grid = (num_tokens, triton.cdiv(width, BLOCK_SIZE))
    _swiglu_backward_kernel[grid](d_output, gate_up, d_gate_up, width, BLOCK=BLOCK_SIZE, num_warps=4)
    return d_gate_up


# A program computes BLOCK hidden units of one token. Gate and up lie behind each other in one row of 2 x width, as the
# merged projection leaves them, so nothing has to be split or copied before. Pure memory traffic: 4 warps and 1024
# elements keep enough loads in flight, and narrower models only mask more.
#
# Numerics: the activation is computed in float32 and rounded to the model's dtype before it is multiplied, as
# F.silu(gate) * up does. One rounding less would be more exact, and not what transformers computes.
@triton.jit
def _swiglu_forward_kernel(gate_up_ptr, output_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < width
    gate = tl.load(gate_up_ptr + token * 2 * width + unit, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * width + width + unit, mask=mask, other=0.0)
    gate_f32 = gate.to(tl.float32)
    activated = (gate_f32 * tl.sigmoid(gate_f32)).to(gate.dtype)
    output = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(output_ptr + token * width + unit, output, mask=mask)


# The same tile. sigmoid(gate) is computed again from the saved input: to save it would cost as much memory as the
# output. The gradients are rounded once, at the end.
@triton.jit
def _swiglu_backward_kernel(d_output_ptr, gate_up_ptr, d_gate_up_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < width
    d_output = tl.load(d_output_ptr + token * width + unit, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + token * 2 * width + unit, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * width + width + unit, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d_output * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d_output * gate * sigmoid
    dtype = d_gate_up_ptr.dtype.element_ty
    tl.store(d_gate_up_ptr + token * 2 * width + unit, d_gate.to(dtype), mask=mask)
    tl.store(d_gate_up_ptr + token * 2 * width + width + unit, d_up.to(dtype), mask=mask)
