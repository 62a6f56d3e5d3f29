"""One model over several ranks: tensor, expert and context parallelism, and the collectives that they are made of.

Tensor parallelism shards linear layers after the model's own plan (`base_model_tp_plan` of transformers): pairs of them
are split along their outputs (`colwise`) and inputs (`rowwise`), so that each rank computes some of the heads or hidden
units, and one sum over the group gives the result (Megatron-LM, Shoeybi et al. 2019). Embedding, norms and head are not
split.

Expert parallelism distributes a mixture's experts. Tokens go to the ranks that have their experts, which compute what
these add to them, and the sums go back to where the tokens came from; no token is ever dropped. There are two ways to
do it. By all-to-all, a token is sent once to each rank that has any of its experts. Where that is nearly every rank
(`moves_by_all_to_all` decides), all tokens are gathered on all ranks, which needs no exchange of counts before it.

Context parallelism distributes the tokens of a tree. Each rank computes its own tokens, as many as every other; only
attention needs the others, so keys and values are gathered, and every rank's queries attend to those on their path,
exactly as in one process. Positions travel with the tokens. A token at the end of a path has more keys than one at its
beginning, so a rank gets several blocks of tokens from different places (`distribute_tree`), and with them the same
attention work as the others: of one long sequence the first and the last, the second and the last but one, and so on.

Sharded parameters become plain tensors of the smaller size; FSDP may shard them further. All ranks of a group call its
collectives in the same order, in the backward pass too: a rank that skipped one would leave the others waiting.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from corral.data.batch import IntArray, TokenTree, TreeChunk
from corral.kernels.host_to_device import on_device
from corral.model.attention import AttentionKernel, TreeAttention
from corral.model.experts import holds_experts
from corral.model.lora import LoraExperts, LoraLinear, add_adapter_outputs
from corral.recipe.errors import UserError
from corral.recipe.mesh import moves_by_all_to_all

ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The name of the collective since torch 2.13, and the one before."""
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


# --- tensor parallelism


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is split over the ranks of a tensor-parallel group."""

    dim: int
    packed: bool = False
    """Whether the parameter is two matrices in one, such as gate and up, each of which is split."""

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        halves = whole.chunk(2, self.dim) if self.packed else (whole,)
        return torch.cat([half.chunk(size, self.dim)[rank] for half in halves], self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        if not self.packed:
            return torch.cat(parts, self.dim)
        halves = zip(*(part.chunk(2, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(half, self.dim) for half in halves], self.dim)


class TensorParallel:
    """Shards the layers of a model over a group, and records what became of its parameters."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.specs: dict[nn.Parameter, ShardSpec] = {}
        self.partial: set[nn.Parameter] = set()
        """Parameters that are whole on each rank but used for its own heads only: their gradients must be summed."""
        self.entered: tuple[Tensor, Tensor] | None = None

    def shard_model(self, model: Any) -> None:
        trunk = model.get_decoder()
        check_divides(trunk.config, self.group.size())
        plan = getattr(trunk.config, "base_model_tp_plan", None)
        if not plan:
            raise UserError(f"train.parallel.tensor: transformers has no plan to shard {type(model).__name__}")
        linear = {"colwise": self._colwise, "packed_colwise": self._packed_colwise, "rowwise": self._rowwise}
        for name, module in trunk.named_modules():
            layer_name = re.sub(r"\.\d+(?=\.|$)", ".*", name)  # as the plan names the parts of all layers
            style = None if isinstance(module, nn.Embedding) else plan.get(layer_name)
            if style == "moe_tp_experts":
                self._experts(module)
            elif style == "replicated_with_grad_allreduce":
                self.partial |= set(module.parameters())
            elif style in linear and isinstance(module, nn.Linear):
                linear[style](module)
            elif style is not None:
                raise UserError(
                    f"train.parallel.tensor: {name} of {type(model).__name__} would be sharded as {style!r}, which "
                    "Corral does not do yet; leave it at 1"
                )

    def _shard(self, parameter: Tensor | None, spec: ShardSpec) -> None:
        if parameter is not None:
            assert isinstance(parameter, nn.Parameter)
            parameter.data = spec.shard(parameter.data, self.group.rank(), self.group.size()).clone()
            self.specs[parameter] = spec

    def _enter(self, tokens: Tensor) -> Tensor:
        """`copy_to_group`, once for layers with the same input (queries, keys and values; gate and up), so that the
        backward pass has one all-reduce for all of them and not one for each."""
        if self.entered is None or self.entered[0] is not tokens:
            self.entered = tokens, copy_to_group(tokens, self.group)
        return self.entered[1]

    def _colwise(self, linear: nn.Linear, packed: bool = False) -> None:
        self._shard(linear.weight, ShardSpec(0, packed))
        self._shard(linear.bias, ShardSpec(0, packed))
        if isinstance(linear, LoraLinear):
            self._shard(linear.lora_B, ShardSpec(0, packed))
            self.partial.add(linear.lora_A)

        def forward(tokens: Tensor) -> Tensor:
            entered = self._enter(tokens)
            return add_adapter_outputs(F.linear(entered, linear.weight, linear.bias), entered, [linear])

        replace_forward(linear, forward)

    def _packed_colwise(self, linear: nn.Linear) -> None:
        self._colwise(linear, packed=True)

    def _rowwise(self, linear: nn.Linear) -> None:
        self._shard(linear.weight, ShardSpec(1))
        if isinstance(linear, LoraLinear):  # B A x is a sum over the inputs, too: of each rank's B A, and its x
            self._shard(linear.lora_A, ShardSpec(1))
            self.partial.add(linear.lora_B)

        def forward(tokens: Tensor) -> Tensor:
            part = add_adapter_outputs(F.linear(tokens, linear.weight), tokens, [linear])
            result = reduce_from_group(part, self.group)
            return result if linear.bias is None else result + linear.bias

        replace_forward(linear, forward)

    def _experts(self, experts: Any) -> None:
        """Shards the hidden units of each expert.

        Experts in another form than gate and up in one tensor stay whole: every rank computes the same there."""
        plain = experts.has_gate and experts.is_concatenated and not experts.is_transposed and not experts.has_bias
        if not plain:
            return
        self._shard(experts.gate_up_proj, ShardSpec(1, packed=True))
        self._shard(experts.down_proj, ShardSpec(2))
        if isinstance(experts, LoraExperts):
            adapters = experts.adapters()
            if "gate_up_proj" in adapters:
                self._shard(adapters["gate_up_proj"][1], ShardSpec(1, packed=True))
                self.partial.add(adapters["gate_up_proj"][0])
            if "down_proj" in adapters:
                self._shard(adapters["down_proj"][0], ShardSpec(2))
                self.partial.add(adapters["down_proj"][1])
        inner, group = experts.forward, self.group

        def forward(tokens: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
            return reduce_from_group(
                inner(copy_to_group(tokens, group), experts_of_token, copy_to_group(weights, group)), group
            )

        replace_forward(experts, forward)


def check_divides(config: Any, size: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        number = getattr(config, key, None)
        if number is not None and number % size:
            raise UserError(f"train.parallel.tensor: {size} does not divide the model's {number} ({key})")


def replace_forward(module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


# --- expert parallelism

EXTRA_ROW = (0, 0, 0, 1)
"""Padding of one row, of zeros, for the first local expert: then no rank is without a gradient, and all of them take
part in its reduction."""


class ExpertParallel:
    """Distributes the experts of a model's layers over a group; one object for all layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.max_tokens = 0
        """Most tokens on any rank in the next forward pass; set by the caller, so that layers need not exchange it."""
        self.modules: list[nn.Module] = []

    def shard(self, experts: Any) -> None:
        """Keeps this rank's experts of one layer and replaces its forward method."""
        size, rank = self.group.size(), self.group.rank()
        if experts.num_experts % size:
            raise UserError(f"train.parallel.expert: {size} does not divide the model's {experts.num_experts} experts")
        num_local = experts.num_experts // size
        for parameter in experts.parameters():
            parameter.data = parameter.data.chunk(size)[rank].clone()
        experts.num_experts = num_local
        experts._is_expert_parallel = True  # makes transformers skip tokens of other ranks' experts
        inner, num_all = experts.forward, experts.num_experts * size

        def forward(tokens: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
            by_all_to_all = moves_by_all_to_all(num_all, experts_of_token.shape[1], size)
            exchange = self._by_all_to_all if by_all_to_all else self._by_gather
            return exchange(inner, num_local, tokens, experts_of_token, weights)

        experts.forward = forward
        self.modules.append(experts)

    def _by_gather(
        self,
        compute: Callable[..., Tensor],
        num_local: int,
        tokens: Tensor,
        experts_of_token: Tensor,
        weights: Tensor,
    ) -> Tensor:
        all_tokens = F.pad(self._gather(tokens), EXTRA_ROW)
        local = all_gather(self._pad(experts_of_token, -1), self.group) - self.group.rank() * num_local
        elsewhere = (local < 0) | (local >= num_local)
        local, scales = local.masked_fill(elsewhere, num_local), self._gather(weights).masked_fill(elsewhere, 0.0)
        output = compute(all_tokens, F.pad(local, EXTRA_ROW), F.pad(scales, EXTRA_ROW))
        # A copy: some models add to it in place, and FSDP's hooks do not survive that on a view.
        return reduce_scatter_to_group(output[:-1], self.group)[: len(tokens)].clone()

    def _by_all_to_all(
        self,
        compute: Callable[..., Tensor],
        num_local: int,
        tokens: Tensor,
        experts_of_token: Tensor,
        weights: Tensor,
    ) -> Tensor:
        group = self.group
        # [ranks, tokens]. A token with several experts on a rank is one row there, whose results are summed there.
        is_needed = torch.zeros(group.size(), len(tokens), dtype=torch.bool, device=tokens.device)
        is_needed.scatter_(0, (experts_of_token // num_local).T, True)
        token_of_row = is_needed.nonzero()[:, 1]  # by rank
        counts = is_needed.sum(1)
        arriving = all_to_all(counts, group, [1] * group.size(), [1] * group.size())
        sent, received = torch.stack([counts, arriving]).tolist()
        rows = F.pad(exchange_with_group(tokens[token_of_row], group, sent, received), EXTRA_ROW)
        scales = F.pad(exchange_with_group(weights[token_of_row], group, sent, received), EXTRA_ROW)
        local = all_to_all(experts_of_token[token_of_row], group, sent, received) - group.rank() * num_local
        local = F.pad(local, EXTRA_ROW)
        # Experts get rows with one expert each, without the places of those that are elsewhere.
        is_own = (local >= 0) & (local < num_local)
        slot, row = is_own.T.nonzero(as_tuple=True)
        output = compute(rows[row], local[row, slot, None], scales[row, slot, None])
        summed = sum_rows(output, row, is_own.sum(0).tolist(), len(rows))[:-1]
        return sum_rows(exchange_with_group(summed, group, received, sent), token_of_row, sent, len(tokens))

    def _gather(self, tensor: Tensor) -> Tensor:
        return gather_from_group(self._pad(tensor, 0), self.group)

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        return F.pad(tensor, (0, 0, 0, self.max_tokens - len(tensor)), value=value)


def sum_rows(rows: Tensor, targets: Tensor, splits: list[int], num_targets: int) -> Tensor:
    """[targets, width]: each is the sum, in float32, of the rows that belong to it. The rows of a split belong to
    different ones, and splits are added in their order: one `index_add` of all would be in any order on a GPU, and a
    log-prob that is computed twice would be two numbers."""
    total = rows.new_zeros(num_targets, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    for part, where in zip(rows.split(splits), targets.split(splits), strict=True):
        total.index_add_(0, where, part.to(total.dtype))
    return total.to(rows.dtype)


def shard_experts(model: nn.Module, group: dist.ProcessGroup) -> ExpertParallel:
    """Distributes the experts of all layers; raises if the model has none."""
    parallel = ExpertParallel(group)
    for module in list(model.modules()):
        if holds_experts(module):
            parallel.shard(module)
    if not parallel.modules:
        raise UserError(f"train.parallel.expert: {type(model).__name__} has no experts to shard")
    return parallel


# --- context parallelism


BLOCKS_PER_RANK = (2, 4, 8, 16)
MIN_BLOCK = 64
"""Nodes of a block, where a rank has more than two: shorter ones make attention calls that are mostly overhead."""
BALANCED = 1.02
"""Most work of a rank, as a multiple of the mean, with which no more and shorter blocks are tried."""


@dataclass(frozen=True)
class DistributedTree:
    """A padded tree, cut into blocks of equal length, of which each rank of a context group has the same number."""

    tree: TokenTree
    blocks: IntArray
    """[ranks, blocks of a rank], in ascending order."""

    @property
    def block_size(self) -> int:
        return self.tree.num_nodes // self.blocks.size

    def nodes(self, rank: int) -> IntArray:
        """The nodes that a rank computes."""
        nodes: IntArray = self.blocks[rank][:, None] * self.block_size + np.arange(self.block_size)
        return nodes.reshape(-1)

    def runs(self, rank: int) -> list[slice]:
        """The same as slices."""
        nodes = self.nodes(rank)
        runs = np.split(nodes, np.flatnonzero(np.diff(nodes) != 1) + 1)
        return [slice(int(run[0]), int(run[-1]) + 1) for run in runs]

    @property
    def work(self) -> IntArray:
        """[ranks]: pairs of a query and a key that it attends to, where no window leaves keys out."""
        return np.array([int((self.tree.positions[self.nodes(rank)] + 1).sum()) for rank in range(len(self.blocks))])

    @property
    def imbalance(self) -> float:
        """Most work of a rank, as a multiple of the mean."""
        return float(self.work.max() / self.work.mean())


def distribute_tree(tree: TokenTree, num_ranks: int) -> DistributedTree:
    """Deals blocks so that ranks have equal numbers of tokens and about equal attention work: with as few blocks as
    that takes, since each is an attention call of its own."""
    best: DistributedTree | None = None
    for per_rank in BLOCKS_PER_RANK:
        if best is not None and (best.imbalance <= BALANCED or tree.num_nodes < num_ranks * per_rank * MIN_BLOCK):
            break
        padded = pad_tree(tree, num_ranks * per_rank)
        work = (padded.positions + 1).reshape(num_ranks * per_rank, -1).sum(1)
        found = DistributedTree(padded, deal_blocks(work, num_ranks))
        if best is None or found.imbalance < best.imbalance:
            best = found
    assert best is not None
    return best


def deal_blocks(work: IntArray, num_ranks: int) -> IntArray:
    """[ranks, blocks of a rank]: the block with the most work goes to the rank with the least that has a place left."""
    rank_of_block, total = np.empty(len(work), np.int64), np.zeros(num_ranks, np.int64)
    places = np.full(num_ranks, len(work) // num_ranks)
    for block in np.argsort(-work, kind="stable"):
        rank = np.flatnonzero(places)[total[places > 0].argmin()]
        rank_of_block[block] = rank
        total[rank] += work[block]
        places[rank] -= 1
    return np.argsort(rank_of_block, kind="stable").reshape(num_ranks, -1)


def pad_tree(tree: TokenTree, multiple: int) -> TokenTree:
    """The tree with a sequence of its own at its end, until `multiple` divides the number of nodes."""
    start, end = tree.num_nodes, -(-tree.num_nodes // multiple) * multiple
    if start == end:
        return tree
    return replace(
        tree,
        tokens=np.concatenate([tree.tokens, np.zeros(end - start, np.int64)]),
        positions=np.concatenate([tree.positions, np.arange(end - start)]),
        chunks=(*tree.chunks, TreeChunk(start, end, np.arange(start, end))),
    )


class ContextParallelAttention:
    """`TreeAttention` of a rank that has only its own blocks of queries, keys and values."""

    def __init__(self, distributed: DistributedTree, device: torch.device, group: dist.ProcessGroup) -> None:
        self.own, self.group = TreeAttention(distributed.tree, device, distributed.runs(group.rank())), group
        self.num_blocks = distributed.blocks.size
        self.place_of_block = on_device(np.argsort(distributed.blocks.reshape(-1)), device)
        """Where each block is among those of all ranks."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        gathered = gather_from_group(torch.cat([key, value], dim=-1), self.group, dim=2)
        in_order = gathered.unflatten(2, (self.num_blocks, -1)).index_select(2, self.place_of_block).flatten(2, 3)
        key, value = in_order.split([key.shape[-1], value.shape[-1]], dim=-1)
        return self.own.attend(layer, query, key, value, kernel)


# --- collectives that autograd differentiates: each is a collective and its adjoint, which the backward pass applies


def copy_to_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, which every rank has: Megatron-LM's f, the way into a sharded layer.

    Each rank uses it for a part of the result, so the backward pass sums the gradients over the ranks.
    """
    return _differentiable(tensor, group, identity, all_reduce)


def reduce_from_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks: Megatron-LM's g, the way out of a sharded layer.

    Every rank has the whole gradient of the sum already, so the backward pass hands it on.
    """
    return _differentiable(tensor, group, all_reduce, identity)


def gather_from_group(tensor: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The ranks' tensors, of equal shapes, concatenated. The backward pass sums the gradients of a rank's part."""
    return _differentiable(tensor.movedim(dim, 0), group, all_gather, reduce_scatter).movedim(0, dim)


def reduce_scatter_to_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along the first dimension, of the sum over ranks. The backward pass gathers the gradients."""
    return _differentiable(tensor, group, reduce_scatter, all_gather)


def exchange_with_group(tensor: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """`all_to_all`. The backward pass sends the gradients of rows back to where the rows came from."""
    forward = partial(all_to_all, sent=sent, received=received)
    return _differentiable(tensor, group, forward, partial(all_to_all, sent=received, received=sent))


def _differentiable(tensor: Tensor, group: dist.ProcessGroup, collective: Collective, adjoint: Collective) -> Tensor:
    compute: Any = _CollectiveFunction.apply
    result: Tensor = compute(tensor, group, collective, adjoint)
    return result


class _CollectiveFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: dist.ProcessGroup, collective: Collective, adjoint: Collective
    ) -> Tensor:
        ctx.group, ctx.adjoint = group, adjoint
        return collective(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(gradients[0], ctx.group), None, None, None


# --- the collectives themselves, without gradient


def identity(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors concatenated along the first dimension."""
    result = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    ALL_GATHER(result, tensor.contiguous(), group=group)
    return result


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along the first dimension, of the sum over ranks."""
    result = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    REDUCE_SCATTER(result, tensor.contiguous(), group=group)
    return result


def all_to_all(tensor: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """The rows that each rank sent to this one, by rank. `sent`: numbers of rows of the tensor that go to each rank, in
    their order. `received`: numbers of rows that come from each."""
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks, in a new tensor: autograd may still need the old one."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result
