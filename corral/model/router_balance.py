"""How evenly a mixture's router loads its experts: counted, and as a loss that makes it more even.

The loss is that of the Switch Transformer (Fedus et al. 2021) as transformers computes it (`load_balancing_loss_func`):
for each expert the fraction of tokens that it is chosen for, times its mean probability, summed and multiplied with the
number of experts. It is as many as a token has experts where all are equally loaded, and more elsewhere.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from corral.model.experts import holds_experts
from corral.model.model_parallel import all_reduce, reduce_from_group
from corral.recipe.errors import UserError


class RouterBalance:
    """Sees the routing of a model's forward passes. Made before the model is sharded. Hooks do nothing in other
    threads: an engine may decode with the same modules at the same time."""

    def __init__(self, causal: Any, with_loss: bool) -> None:
        experts: list[Any] = [module for module in causal.modules() if holds_experts(module)]
        self.num_tokens = self.num_recorded = 0
        """Tokens of the pass that is being recorded, and of the last one that was: what follows them is padding. A rank
        of a context group may have nothing else."""
        self.thread, self.is_open = 0, False
        self.counts = [torch.zeros(module.num_experts, dtype=torch.int64) for module in experts]
        """Tokens of each expert, layer by layer."""
        self.logits: list[Tensor] = []
        """[tokens, experts] of each layer in the pass that was recorded last."""
        self.experts_per_token = 0
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, layer))
        if with_loss:
            target, index = router_of(causal)
            for module in causal.modules():
                if isinstance(module, target):
                    module.register_forward_hook(partial(self._keep_logits, index))

    @property
    def is_recorded(self) -> bool:
        return self.is_open and self.thread == threading.get_ident()

    def _count(self, layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.is_recorded:
            chosen = inputs[1][: self.num_tokens]  # [tokens, experts of a token]
            self.experts_per_token = chosen.shape[1]
            counts = self.counts[layer] = self.counts[layer].to(chosen.device)
            counts.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen).reshape(-1))

    def _keep_logits(self, index: int, module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self.is_recorded:
            self.logits.append(output[index])

    @contextmanager
    def recording(self, num_tokens: int) -> Iterator[None]:
        """Records the forward pass within it; not when its activations are computed again for the backward pass."""
        self.logits, self.num_tokens, self.thread, self.is_open = [], num_tokens, threading.get_ident(), True
        try:
            yield
        finally:
            self.num_recorded, self.is_open = num_tokens, False

    def loss(self, group: dist.ProcessGroup | None) -> Tensor:
        """The loss of the pass that was recorded last, of the tokens of all ranks of a context group."""
        sums = []
        for logits in self.logits:
            probabilities = logits[: self.num_recorded].softmax(-1).float()
            chosen = probabilities.topk(self.experts_per_token, -1).indices.reshape(-1)
            ones = torch.ones_like(chosen, dtype=probabilities.dtype)
            counts = probabilities.new_zeros(probabilities.shape[1]).scatter_add(0, chosen, ones)
            sums.append(torch.stack([counts, probabilities.sum(0)]))
        counts, probability_sums = torch.stack(sums).sum(0)
        num_rows = counts.sum() / self.experts_per_token  # of all layers
        if group is not None:
            counts, num_rows = all_reduce(counts, group), all_reduce(num_rows, group)
            probability_sums = reduce_from_group(probability_sums, group)
        loss: Tensor = len(counts) * (counts / num_rows * probability_sums / num_rows).sum()
        return loss

    def take_counts(self, device: torch.device, groups: Iterable[dist.ProcessGroup]) -> list[list[int]]:
        """Tokens of each expert, layer by layer, since the last call, on all ranks of the groups: of a context, whose
        ranks have different tokens, and of a pipeline, whose ranks have different layers."""
        counts = torch.stack([layer.to(device) for layer in self.counts])
        self.counts = [torch.zeros_like(layer) for layer in counts]
        for group in groups:
            counts = all_reduce(counts, group)
        numbers: list[list[int]] = counts.tolist()
        return numbers


def router_of(causal: Any) -> tuple[type[nn.Module], int]:
    """The class of the model's routers, and which of their outputs has the logits."""
    recorder: Any = (getattr(causal.get_decoder(), "_can_record_outputs", None) or {}).get("router_logits")
    has_routers = getattr(recorder, "layer_name", "") is None
    if not has_routers or not any(isinstance(module, recorder.target_class) for module in causal.modules()):
        raise UserError(
            f"train.router_aux_loss_coef: transformers gives no logits of a router for {type(causal).__name__}; set it "
            "to 0"
        )
    return recorder.target_class, recorder.index
