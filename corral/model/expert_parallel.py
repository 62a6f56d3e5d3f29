"""A mixture's experts dealt over the ranks of a group.

Tokens of all ranks are gathered, each rank computes what its own experts add to them, and the sums go back to where the
tokens came from. Simple, exact for any number of tokens on each rank, and no more traffic than an all-to-all while the
group is not larger than the number of experts for a token.
"""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from corral.model.collectives import all_gather, gathered, scattered
from corral.recipe.errors import UserError


class ExpertExchange:
    """Shared by all layers of a model."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.most_tokens = 0
        """On any rank of the group, in the forward pass to come: set by the caller, so that layers need not ask."""
        self.modules: list[nn.Module] = []

    def deal(self, experts: Any) -> None:
        size, rank = self.group.size(), self.group.rank()
        if experts.num_experts % size:
            raise UserError(f"train.parallel.expert: {size} does not divide the model's {experts.num_experts} experts")
        num_local = experts.num_experts // size
        for parameter in experts.parameters():
            parameter.data = parameter.data.chunk(size)[rank].clone()
        experts.num_experts = num_local
        experts._is_expert_parallel = True  # tokens of other ranks' experts are to be skipped
        inner = experts.forward

        def forward(tokens: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
            # One row more, of zeros, for the first local expert: then no rank is ever without a gradient.
            extra = (0, 0, 0, 1)
            everyone = F.pad(self._gather(tokens), extra)
            local = all_gather(self._pad(experts_of_token, -1), self.group) - rank * num_local
            elsewhere = (local < 0) | (local >= num_local)
            local, shares = local.masked_fill(elsewhere, num_local), self._gather(weights).masked_fill(elsewhere, 0.0)
            output = inner(everyone, F.pad(local, extra), F.pad(shares, extra))
            # A copy: some models add to it in place, which FSDP's hooks do not survive on a view.
            return scattered(output[:-1], self.group)[: len(tokens)].clone()

        experts.forward = forward
        self.modules.append(experts)

    def _gather(self, tensor: Tensor) -> Tensor:
        return gathered(self._pad(tensor, 0), self.group)

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        return F.pad(tensor, (0, 0, 0, self.most_tokens - len(tensor)), value=value)


def deal_experts(model: nn.Module, group: dist.ProcessGroup) -> ExpertExchange:
    exchange = ExpertExchange(group)
    for module in list(model.modules()):
        if holds_experts(module):
            exchange.deal(module)
    if not exchange.modules:
        raise UserError(f"train.parallel.expert: {type(model).__name__} has no experts to deal")
    return exchange


def holds_experts(module: nn.Module) -> bool:
    """As transformers keeps them: all experts of a layer in one tensor for each of their matrices."""
    own = list(module.parameters(recurse=False))
    return any(p.dim() == 3 for p in own) and all(len(p) == getattr(module, "num_experts", None) for p in own)
