"""Layers cut over the ranks of a group, after the model's own plan (`base_model_tp_plan` of transformers).

Pairs of linear layers are cut along their outputs (`colwise`) and inputs (`rowwise`), so that each rank computes some
of the heads or hidden units, and one sum over the group gives the result. Embedding, norms and head are not cut.
Parameters become plain tensors of the cut size: sharding them further is somebody else's business.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from corral.model.collectives import copied, summed
from corral.recipe.errors import UserError


@dataclass(frozen=True)
class Cut:
    dim: int
    packed: bool = False
    """Two matrices in one, such as gate and up, each of which is cut."""

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        halves = whole.chunk(2, self.dim) if self.packed else (whole,)
        return torch.cat([half.chunk(size, self.dim)[rank] for half in halves], self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        if not self.packed:
            return torch.cat(parts, self.dim)
        halves = zip(*(part.chunk(2, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(half, self.dim) for half in halves], self.dim)


class TensorParallel:
    """A model's layers, cut over a group, and what that did to its parameters."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.cuts: dict[nn.Parameter, Cut] = {}
        self.partial: set[nn.Parameter] = set()
        """Not cut, but used by each rank for its own heads only: gradients are to be summed over the group."""
        self.entered: tuple[Tensor, Tensor] | None = None

    def cut_model(self, model: Any) -> None:
        trunk = model.get_decoder()
        check_divides(trunk.config, self.group.size())
        plan = getattr(trunk.config, "base_model_tp_plan", None)
        if not plan:
            raise UserError(f"train.parallel.tensor: transformers has no plan to cut {type(model).__name__}")
        linear = {"colwise": self._colwise, "packed_colwise": self._packed_colwise, "rowwise": self._rowwise}
        for name, module in trunk.named_modules():
            style = None if isinstance(module, nn.Embedding) else style_of(name, plan)
            if style == "moe_tp_experts":
                self._experts(module)
            elif style == "replicated_with_grad_allreduce":
                self.partial |= set(module.parameters())
            elif style in linear and isinstance(module, nn.Linear):
                linear[style](module)
            elif style is not None:
                raise UserError(
                    f"train.parallel.tensor: {name} of {type(model).__name__} would be cut as {style!r}, which Corral "
                    "does not do yet; leave it at 1"
                )

    def _cut(self, parameter: Tensor | None, cut: Cut) -> None:
        if parameter is not None:
            assert isinstance(parameter, nn.Parameter)
            parameter.data = cut.part(parameter.data, self.group.rank(), self.group.size()).clone()
            self.cuts[parameter] = cut

    def _enter(self, tokens: Tensor) -> Tensor:
        """`copied`, once for layers that read the same tokens: queries, keys and values, or gate and up."""
        if self.entered is None or self.entered[0] is not tokens:
            self.entered = tokens, copied(tokens, self.group)
        return self.entered[1]

    def _colwise(self, linear: nn.Linear, packed: bool = False) -> None:
        self._cut(linear.weight, Cut(0, packed))
        self._cut(linear.bias, Cut(0, packed))
        replace_forward(linear, lambda tokens: F.linear(self._enter(tokens), linear.weight, linear.bias))

    def _packed_colwise(self, linear: nn.Linear) -> None:
        self._colwise(linear, packed=True)

    def _rowwise(self, linear: nn.Linear) -> None:
        self._cut(linear.weight, Cut(1))

        def forward(tokens: Tensor) -> Tensor:
            result = summed(F.linear(tokens, linear.weight), self.group)
            return result if linear.bias is None else result + linear.bias

        replace_forward(linear, forward)

    def _experts(self, experts: Any) -> None:
        """Each expert's hidden units. Experts in another form than gate and up above each other stay whole on every
        rank: all compute the same there."""
        plain = experts.has_gate and experts.is_concatenated and not experts.is_transposed and not experts.has_bias
        if not plain:
            return
        self._cut(experts.gate_up_proj, Cut(1, packed=True))
        self._cut(experts.down_proj, Cut(2))
        inner, group = experts.forward, self.group

        def forward(tokens: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
            return summed(inner(copied(tokens, group), experts_of_token, copied(weights, group)), group)

        replace_forward(experts, forward)


def check_divides(config: Any, size: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        number = getattr(config, key, None)
        if number is not None and number % size:
            raise UserError(f"train.parallel.tensor: {size} does not divide the model's {number} ({key})")


def style_of(name: str, plan: dict[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def replace_forward(module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = forward
