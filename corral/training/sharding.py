"""A model made ready for its mesh: experts distributed, layers cut, and what is left of each parameter sharded (FSDP2).

Ranks that hold one copy of the model together hold a part of every parameter. A layer's parts are gathered before it
computes and dropped after it; gradients are summed to where the parts are, in float32 unless the recipe has another
type (`train.gradient_dtype`). Losses are divided by counts of
the whole update already, so gradients are added up and never averaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from corral.model.experts import holds_experts
from corral.model.model_loading import STORED_WEIGHTS, detach_weights
from corral.model.model_parallel import (
    ExpertParallel,
    ShardSpec,
    TensorParallel,
    all_gather,
    shard_experts,
)
from corral.model.pipeline_stage import PipelineStage
from corral.recipe.errors import UserError
from corral.training.process_mesh import ProcessMesh

Result = TypeVar("Result")


class ShardedModel:
    """A model, sharded in place over a mesh. On a mesh of whole copies the model stays as it is."""

    def __init__(
        self,
        model: nn.Module,
        causal: Any,
        mesh: ProcessMesh,
        *,
        trained: bool,
        offload: bool,
        in_float32: Sequence[nn.Module],
    ) -> None:
        """`causal`: the transformers model in `model`. `in_float32`: modules that do not compute in its dtype.
        `offload`: parameters and gradients are in the host's memory while they are not computed with."""
        self.mesh = mesh
        self.exchange: ExpertParallel | None = None
        self.stage: PipelineStage | None = None
        whole = {name: ParameterSharding(p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        self.layout = ShardingLayout(mesh, whole)
        if not mesh.is_sharded:
            model.to(mesh.device)
            return
        # Sharded while it has no memory; then each rank copies its own parts out of the whole weights, which may be
        # files mapped into memory (`load_to_shard`): nothing else of them is read.
        weights = detach_weights(model) | getattr(causal, STORED_WEIGHTS, {})
        has_experts = any(map(holds_experts, causal.modules()))
        if "pipeline" in mesh.groups:
            self.stage = PipelineStage(model, causal, mesh.rank_in("pipeline"), mesh.size_of("pipeline"))
            for name, stages in self.stage.holders.items():
                whole[name] = replace(whole[name], stages=stages)
        stored = {name: weights[parameter] for name, parameter in model.named_parameters()}
        # A stage of a mixture may have no experts: some begin with dense layers.
        if "expert" in mesh.groups and (any(map(holds_experts, causal.modules())) or not has_experts):
            self.exchange = shard_experts(causal, mesh.groups["expert"])
        cut = None
        if "tensor" in mesh.groups:
            cut = TensorParallel(mesh.groups["tensor"])
            cut.shard_model(causal)
        of_experts = {parameter for module in self.experts for parameter in module.parameters()}
        for name, p in model.named_parameters():
            by_tensor = None if cut is None else cut.specs.get(p)
            is_partial = cut is not None and p in cut.partial
            whole[name] = replace(whole[name], cut=by_tensor, is_partial=is_partial, by_expert=p in of_experts)
        self.root: Any = FsdpRoot(model)
        layers = [module for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
        dtype = causal.dtype
        if dtype != torch.float32:  # routers of some mixtures
            in_float32 = [*in_float32, *modules_in_float32(causal)]
        # Inner modules first: FSDP leaves to an outer module what no inner one has taken.
        for module in filter(has_parameters, [*self.experts, *in_float32, *layers, self.root]):
            if trained:  # then the shards are the optimizer's masters, and FSDP casts what it gathers to the dtype
                for parameter in module.parameters():
                    if parameter.requires_grad and parameter.dtype != torch.float32:
                        parameter.data = parameter.data.float()
            self._shard(module, torch.float32 if module in in_float32 else dtype, offload)
        self._fill(stored, torch.device("cpu") if offload else mesh.device)
        if hasattr(causal, STORED_WEIGHTS):
            delattr(causal, STORED_WEIGHTS)

    @property
    def experts(self) -> list[nn.Module]:
        return [] if self.exchange is None else self.exchange.modules

    def _shard(self, module: Any, dtype: torch.dtype, offload: bool) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        is_cuda = self.mesh.device.type == "cuda"
        fully_shard(
            module,
            mesh=self.mesh.by_expert if module in self.experts else self.mesh.dense,
            # What the root itself holds (embedding, head) is needed again at once, by the backward pass.
            reshard_after_forward=module is not self.root,
            mp_policy=MixedPrecisionPolicy(dtype, self.mesh.gradient_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=is_cuda) if offload else OffloadPolicy(),
        )
        # FSDP would average gradients over ranks; losses are divided by counts of the whole update already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def _fill(self, stored: dict[str, Tensor], device: torch.device) -> None:
        """Gives the shards memory on the device, and in it this rank's parts of the whole weights. Buffers, which are
        small and not sharded, follow to where the model computes."""

        def place(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=device)
            # A parameter that two modules have comes twice, the second time with memory.
            return tensor if isinstance(tensor, nn.Parameter) else tensor.to(self.mesh.device)

        self.root._apply(place)
        for name, parameter in self.root.model.named_parameters():
            part = self.layout.shard(name, stored.pop(name)).to(self.layout[name].dtype)
            local_tensor(parameter).copy_(part)

    def __call__(self, compute: Callable[[], Result]) -> Result:
        """What `compute` returns; parameters are gathered when it needs them."""
        if not self.mesh.is_sharded:
            return compute()
        result: Result = self.root(compute)
        if not torch.is_grad_enabled():
            self.root.reshard()  # no backward pass is going to do it
        return result


def has_parameters(module: nn.Module) -> bool:
    """Not so the layers of other pipeline stages."""
    return isinstance(module, FsdpRoot) or any(True for _ in module.parameters())


def modules_in_float32(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with parameters of their own, all of whose parameters are, also those of modules inside;
    before those that are trained are made so."""
    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        has_own = any(True for _ in module.parameters(recurse=False))
        are = (parameter.dtype == torch.float32 for parameter in module.parameters())
        if has_own and module not in inner and all(are):
            found.append(module)
            inner |= set(module.modules())
    return found


class FsdpRoot(nn.Module):
    """What FSDP sees as the model. Its forward is any function, since embedding and head are used outside of the
    model's own forward, and FSDP gathers parameters when a forward of its root begins."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


def check_offload(mesh: ProcessMesh, offload: Sequence[str]) -> None:
    both = {"parameters", "gradients"}
    wanted = both & set(offload)
    if wanted and not mesh.is_sharded:
        raise UserError(
            f"train.offload: {', '.join(sorted(wanted))}: only what is sharded is gathered when it is needed, and "
            "nothing is sharded here; set `train.parallel.shard` above 1, or offload the optimizer only"
        )
    if wanted and wanted != both:
        raise UserError(f"train.offload: {wanted.pop()}: parameters and gradients go together; name both or neither")


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter is sharded over a mesh."""

    shape: torch.Size
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """The data type in which the model computes, and in which it is saved."""
    is_trained: bool
    cut: ShardSpec | None = None
    """How it is cut over the tensor group; None: each of its ranks has all of it."""
    is_partial: bool = False
    """Whether it is not cut, but each rank of the tensor group computes a part of its gradient."""
    by_expert: bool = False
    """Whether its first dimension is distributed over the expert group."""
    stages: tuple[int, ...] = (0,)
    """Stages of the pipeline that hold it: one, or for an embedding that is also the head the first and the last."""


@dataclass(frozen=True)
class OwnRows:
    """What one rank writes of a tensor that several hold."""

    rows: Tensor
    first_byte: int
    """Offset of the rows in the whole tensor."""


class ShardingLayout:
    """Which part of each parameter this rank holds, and how a whole one is put together."""

    def __init__(self, mesh: ProcessMesh, parameters: dict[str, ParameterSharding]) -> None:
        self.mesh, self.parameters = mesh, parameters

    def __getitem__(self, name: str) -> ParameterSharding:
        return self.parameters[name]

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which the model computes."""
        return next(iter(self.parameters.values())).dtype

    @property
    def kinds(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """(dtype, shape) of each whole parameter."""
        return {name: (sharding.dtype, sharding.shape) for name, sharding in self.parameters.items()}

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained."""
        return [name for name, sharding in self.parameters.items() if sharding.is_trained]

    def gather(self, name: str, local: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole of a tensor of this dtype of which every rank passes its part, or None if its pipeline stage has
        none. Where nothing is sharded, the very tensor."""
        sharding, mesh = self.parameters[name], self.mesh
        if not mesh.is_sharded:
            assert local is not None, "without a mesh there are no stages"
            return local
        part = None if local is None else self._gather_in_stage(sharding, local)
        return self.from_stage(name, part, sharding.shape, dtype)

    def from_stage(self, name: str, tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of the first stage that holds the parameter, on all stages."""
        if "pipeline" not in self.mesh.groups:
            assert tensor is not None, "without a pipeline every rank has a part of everything"
            return tensor
        holder = self.parameters[name].stages[0]
        if self.mesh.rank_in("pipeline") == holder and tensor is not None:
            tensor = tensor.to(self.mesh.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        dist.broadcast(tensor, group=self.mesh.groups["pipeline"], group_src=holder)
        return tensor

    def _gather_in_stage(self, sharding: "ParameterSharding", local: Tensor) -> Tensor:
        mesh = self.mesh
        part = self._gather_shards(sharding, local.to(mesh.device))
        if sharding.cut is not None:
            parts = all_gather(part[None], mesh.groups["tensor"])
            part = sharding.cut.join(list(parts))
        if sharding.by_expert:
            part = all_gather(part, mesh.groups["expert"])
        return part

    def gather_weight(self, name: str, parameter: nn.Parameter | None) -> Tensor:
        """The whole parameter, in the model's dtype. None: another pipeline stage has it."""
        dtype = self.parameters[name].dtype
        return self.gather(name, None if parameter is None else local_tensor(parameter).to(dtype), dtype)

    def to_write(self, name: str, local: Tensor | None, dtype: torch.dtype) -> Tensor | OwnRows:
        """What this rank writes of a tensor into a file, where all ranks write: rows, each on one rank alone. A rank
        has its rows already, but for matrices that are cut, which the ranks of their stage put together. No stage waits
        for another one: what is cut in a layer is known to the stage that has it, and to no other."""
        sharding, mesh = self.parameters[name], self.mesh
        if not mesh.is_sharded:
            return self.gather(name, local, dtype)
        if local is None or mesh.rank_in("pipeline") != sharding.stages[0]:
            return OwnRows(torch.empty(0, dtype=dtype), 0)
        if sharding.cut is not None:
            rows, start = self._gather_in_stage(sharding, local), 0
            rank, size = mesh.rank % mesh.shape.stage_size, mesh.shape.stage_size
        else:
            group, num_rows, start = self._shard_group(sharding), sharding.shape[0], 0
            if sharding.by_expert:
                num_rows //= mesh.size_of("expert")
                start = mesh.rank_in("expert") * num_rows
            rows, start = local, start + group.rank() * -(-num_rows // group.size())
            rank, size = (0, 1) if mesh.replicas is None else (mesh.replicas.copy, mesh.replicas.num_copies)
            if mesh.rank_in("tensor") > 0:  # the first one has the same
                rows = rows[:0]
        step = -(-len(rows) // size)  # of `size` ranks that have these rows each writes a part
        first = min(len(rows), rank * step)
        return OwnRows(rows[first : first + step], (start + first) * sharding.shape[1:].numel() * dtype.itemsize)

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        sharding, mesh = self.parameters[name], self.mesh
        if not mesh.is_sharded:
            return whole
        part, group = self._block(sharding, whole), self._shard_group(sharding)
        rows = -(-len(part) // group.size())
        return part[group.rank() * rows : (group.rank() + 1) * rows]

    def _block(self, sharding: ParameterSharding, whole: Tensor) -> Tensor:
        """What the ranks of a shard group hold together."""
        if sharding.by_expert:
            whole = whole.chunk(self.mesh.size_of("expert"))[self.mesh.rank_in("expert")]
        if sharding.cut is not None:
            whole = sharding.cut.shard(whole, self.mesh.rank_in("tensor"), self.mesh.size_of("tensor"))
        return whole

    def _gather_shards(self, sharding: ParameterSharding, local: Tensor) -> Tensor:
        """FSDP shards the first dimension into parts of equal length, of which the last ones may be shorter or empty:
        they are padded for the collective."""
        group = self._shard_group(sharding)
        block = self._block(sharding, torch.empty(sharding.shape, device="meta"))
        rows = -(-len(block) // group.size())
        padded = F.pad(local, [0, 0] * (local.dim() - 1) + [0, rows - len(local)])
        return all_gather(padded, group)[: len(block)]

    def _shard_group(self, sharding: ParameterSharding) -> dist.ProcessGroup:
        return self.mesh.groups["expert_sharded" if sharding.by_expert else "sharded"]


def local_tensor(parameter: nn.Parameter | Tensor) -> Tensor:
    """What this rank holds of a parameter, sharded or not; the memory is the parameter's own."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():  # without it, `to_local` would be recorded for autograd, which takes five times as long
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
