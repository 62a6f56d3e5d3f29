"""The experts of a mixture's layer, as transformers keeps them: one module, with one tensor [experts, ...] for each
kind of matrix (`gate_up_proj`, `down_proj`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def holds_experts(module: nn.Module) -> bool:
    """Whether the module has the experts of a layer."""
    own = list(module.parameters(recurse=False))
    return any(p.dim() == 3 for p in own) and all(len(p) == getattr(module, "num_experts", None) for p in own)


def expert_matrices(module: nn.Module) -> list[str]:
    """Names of a module's tensors of experts' matrices, without their biases; none where it holds no experts."""
    own = module.named_parameters(recurse=False)
    return [name for name, parameter in own if parameter.dim() == 3] if holds_experts(module) else []


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, outputs]: rows in the order of their experts, each multiplied with its own expert's matrix. `weight`: of
    shape [experts, outputs, inputs]. `ends`: for each expert where its rows end. Rows behind the last one are not
    computed, and what is in them is anything."""
    from transformers.integrations.moe import _grouped_mm

    result: Tensor = _grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return result


def compute_experts(
    experts: Any,
    project: Callable[[str, Tensor, Tensor], Tensor],
    tokens: Tensor,
    experts_of_token: Tensor,
    weights: Tensor,
) -> Tensor:
    """transformers' `grouped_mm_experts_forward`, with matrix products that the caller computes: `project` gets the
    name of a tensor of matrices, rows in the order of their experts, and for each expert where its rows end."""
    num_slots = experts_of_token.shape[1]
    expert_of_row, order = experts_of_token.reshape(-1).sort()
    own = torch.arange(experts.num_experts, device=tokens.device)
    ends = torch.searchsorted(expert_of_row, own, right=True, out_int32=True)
    # Of other ranks' experts; they are the last ones. Neither their results nor their gradients are computed.
    is_elsewhere = (expert_of_row >= experts.num_experts)[:, None]
    of_bias = expert_of_row.clamp(max=experts.num_experts - 1)
    # Not of every version of transformers: without them an expert has no such norm, and no rank but this one.
    is_expert_parallel = getattr(experts, "_is_expert_parallel", False)
    has_post_expert_norm = getattr(experts, "has_post_expert_norm", False)

    def linear(name: str, rows: Tensor) -> Tensor:
        result = project(name, rows, ends)
        if experts.has_bias:
            result = result + getattr(experts, f"{name}_bias")[of_bias]
        return result.masked_fill(is_elsewhere, 0.0) if is_expert_parallel else result

    rows = tokens[order // num_slots]
    if is_expert_parallel:
        rows = rows.masked_fill(is_elsewhere, 0.0)
    if experts.has_gate:
        hidden = experts._apply_gate(linear("gate_up_proj", rows))
    else:
        hidden = experts.act_fn(linear("up_proj", rows))
    results = linear("down_proj", hidden)
    if has_post_expert_norm:
        results = experts.post_expert_norm(results)
    results = results * weights.reshape(-1)[order, None]
    in_order = results[order.argsort()]  # not an index_add: on a GPU that is in any order
    return in_order.view(len(tokens), num_slots, -1).sum(1).to(tokens.dtype)
