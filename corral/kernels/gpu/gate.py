"""silu(gate) * up: a program takes a block of one token's units."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def gate_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    tokens, units = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, units, dtype=gate_up.dtype, device=gate_up.device)
    _forward[(tokens, triton.cdiv(units, BLOCK))](gate_up, output, units, BLOCK=BLOCK, num_warps=4)
    return output


def gate_backward(d_output: Tensor, gate_up: Tensor) -> Tensor:
    gate_up, d_output = gate_up.contiguous(), d_output.contiguous()
    tokens, units = d_output.shape
    d_gate_up = torch.empty_like(gate_up)
    _backward[(tokens, triton.cdiv(units, BLOCK))](d_output, gate_up, d_gate_up, units, BLOCK=BLOCK, num_warps=4)
    return d_gate_up


@triton.jit
def _forward(gate_up_at, output_at, units, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < units
    gate = tl.load(gate_up_at + token * 2 * units + unit, mask=mask, other=0.0)
    up = tl.load(gate_up_at + token * 2 * units + units + unit, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(output_at + token * units + unit, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


@triton.jit
def _backward(d_output_at, gate_up_at, d_gate_up_at, units, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < units
    d_output = tl.load(d_output_at + token * units + unit, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_at + token * 2 * units + unit, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_at + token * 2 * units + units + unit, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d_output * up * share * (1.0 + gate * (1.0 - share))
    d_up = d_output * gate * share
    kind = d_gate_up_at.dtype.element_ty
    tl.store(d_gate_up_at + token * 2 * units + unit, d_gate.to(kind), mask=mask)
    tl.store(d_gate_up_at + token * 2 * units + units + unit, d_up.to(kind), mask=mask)
