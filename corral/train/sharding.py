"""A model made ready for its mesh: experts dealt, layers cut, and what is left of each parameter sharded (FSDP2).

Ranks that share one copy of the model hold a part of every parameter. A layer's parts are gathered before it computes
and dropped after it; gradients are summed in float32 to where the parts are. Losses are divided by counts of the whole
update already, so gradients are added up and never averaged.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from corral.model.expert_parallel import ExpertExchange, deal_experts
from corral.model.tensor_parallel import TensorParallel
from corral.recipe.errors import UserError
from corral.train.layout import Layout, Spread
from corral.train.mesh import Mesh

Result = TypeVar("Result")


class Sharded:
    """A model and what a mesh made of it. On a mesh of whole copies the model stays as it is."""

    def __init__(
        self,
        model: nn.Module,
        causal: Any,
        mesh: Mesh,
        *,
        trained: bool,
        offload: bool,
        in_float32: Sequence[nn.Module],
    ) -> None:
        """`causal`: the transformers model in it. `in_float32`: modules of it that do not compute in its dtype.
        `offload`: parameters and gradients are in the host's memory while they are not computed with."""
        self.mesh = mesh
        self.exchange: ExpertExchange | None = None
        shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        if not mesh.is_sharded:
            model.to(mesh.device)
            self.layout = Layout(mesh, {name: Spread(*shape) for name, shape in shapes.items()})
            return
        if "expert" in mesh.groups:
            self.exchange = deal_experts(causal, mesh.groups["expert"])
        cut = None
        if "tensor" in mesh.groups:
            cut = TensorParallel(mesh.groups["tensor"])
            cut.cut_model(causal)
        dealt = {parameter for module in self.experts for parameter in module.parameters()}
        self.layout = Layout(mesh, {})
        for name, p in model.named_parameters():
            by_tensor = None if cut is None else cut.cuts.get(p)
            is_partial = cut is not None and p in cut.partial
            self.layout.spreads[name] = Spread(*shapes[name], by_tensor, is_partial, by_expert=p in dealt)
        self.root: Any = Call(model)
        layers = [module for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
        dtype = causal.dtype
        for module in [*self.experts, *layers, *in_float32, self.root]:
            if trained:  # then the shards are the optimizer's float32 masters
                for parameter in module.parameters():
                    if parameter.dtype != torch.float32:
                        parameter.data = parameter.data.float()
            self._shard(module, torch.float32 if module in in_float32 else dtype, offload)

    @property
    def experts(self) -> list[nn.Module]:
        return [] if self.exchange is None else self.exchange.modules

    def _shard(self, module: Any, dtype: torch.dtype, offload: bool) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        is_cuda = self.mesh.device.type == "cuda"
        fully_shard(
            module,
            mesh=self.mesh.by_expert if module in self.experts else self.mesh.dense,
            reshard_after_forward=module is not self.root,
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=is_cuda) if offload else OffloadPolicy(),
        )
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def __call__(self, compute: Callable[[], Result]) -> Result:
        """What `compute` returns; the parameters are there when it needs them."""
        if not self.mesh.is_sharded:
            return compute()
        result: Result = self.root(compute)
        if not torch.is_grad_enabled():
            self.root.reshard()  # no backward pass is going to do it
        return result


class Call(nn.Module):
    """What FSDP sees as the model, since embedding and head are used outside of the model's own forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


def check_offload(mesh: Mesh, offload: Sequence[str]) -> None:
    both = {"parameters", "gradients"}
    wanted = both & set(offload)
    if wanted and not mesh.is_sharded:
        raise UserError(
            f"train.offload: {', '.join(sorted(wanted))}: only what is sharded is gathered when it is needed, and "
            "nothing is sharded here; set `train.parallel.shard` above 1, or offload the optimizer only"
        )
    if wanted and wanted != both:
        raise UserError(f"train.offload: {wanted.pop()}: parameters and gradients go together; name both or neither")
