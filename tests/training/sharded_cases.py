"""What the tests of sharded training run on each of their processes, and what one process makes of the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from team import DEVICE, MEASURED
from tiny import tiny_config
from torch import Tensor
from trajectories import small_batch
from transformers import AutoModelForCausalLM

from corral.data.batch import Batch, Pack
from corral.model.attention import register
from corral.model.lora import add_adapters
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import GradientCheckpointing, Lora, Optimizer
from corral.training import optimizer as optimizer_module
from corral.training.native_trainer import NativePolicyTrainer
from corral.training.optimizer import MasterWeight
from corral.training.process_mesh import ProcessMesh
from corral.training.replicas import Replicas
from corral.training.sharding import ShardingLayout

PACK = 45
"""Distinct tokens in a micro-batch: two or three for the largest share."""


def shapes(size: int, with_experts: bool) -> list[MeshShape]:
    """All ways to cut this many processes into dimensions."""
    sizes = [n for n in range(1, size + 1) if size % n == 0]
    found = [MeshShape(*dims) for dims in product(sizes, repeat=6) if np.prod(dims) == size]
    return [shape for shape in found if with_experts or shape.expert == 1]


@cache
def mesh_of(shape: MeshShape | None) -> ProcessMesh | None:
    """Built once in each process: its groups have threads, which stay."""
    if shape is None:
        return None
    replicas = Replicas.of_rank(shape, dist.get_rank(), DEVICE, "127.0.0.1", 60.0) if shape.replicate > 1 else None
    if replicas is not None:
        _, position = shape.place_in_copies(dist.get_rank())
        replicas.connect(dist.PrefixStore(f"{shape}/{position}", dist.distributed_c10d._get_default_store()))
    return ProcessMesh.build(shape, DEVICE, replicas=replicas)


@contextmanager
def mesh_with_gradients(shape: MeshShape, dtype: str) -> Iterator[ProcessMesh]:
    """A mesh over which gradients are summed in this type."""
    mesh = mesh_of(shape)
    assert mesh is not None
    mesh.gradient_dtype = getattr(torch, dtype)
    yield mesh
    mesh.gradient_dtype = torch.float32


def build_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Heads, hidden units, experts and layers can be cut into 2, 3 and 4. `llama/sdpa`: on the general path;
    `llama+lora`: with adapters; `qwen3_moe*6`: with so many of 12 experts for each token; `llama:8`: with so many
    layers and not 4."""
    register()
    family, _, num_layers = family.partition(":")
    family, _, experts_per_token = family.partition("*")
    family, _, lora = family.partition("+")
    family, _, attention = family.partition("/")
    config = tiny_config(family)
    config.update({"hidden_size": 48, "head_dim": 4, "num_attention_heads": 24, "num_key_value_heads": 12})
    config.update({"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 12, "num_local_experts": 12})
    layers = ["full_attention"] * int(num_layers or 4)
    config.update({"num_hidden_layers": len(layers), "layer_types": layers})
    if experts_per_token:
        config.num_experts_per_tok = int(experts_per_token)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention or "corral").eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:  # which start at 0 and 1
            torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
        parameter.data = parameter.data.to(dtype)  # but not the frequencies of positions, as when it is loaded
    if lora:
        add_adapters(model, Lora(rank=6))
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def policy_of(
    model: Any,
    mesh: ProcessMesh | None = None,
    gradient_checkpointing: GradientCheckpointing = False,
    offload: Sequence[str] = (),
    state_dtype: Literal["float32", "bfloat16"] = "float32",
) -> NativePolicyTrainer:
    recipe = Optimizer(learning_rate=1e-2, epsilon=1e-2, max_gradient_norm=1.0, state_dtype=state_dtype)
    return NativePolicyTrainer(
        model.to(DEVICE) if mesh is None else model,
        temperature=0.9,
        logits_chunk=16,
        optimizer=recipe,
        total_updates=10,
        gradient_checkpointing=gradient_checkpointing,
        mesh=mesh,
        offload=offload,
    )


def data_rank(mesh: ProcessMesh) -> int:
    return mesh.shape.data_rank(mesh.rank)


def own_packs(batch: Batch, mesh: ProcessMesh | None) -> list[Pack | None]:
    """Uneven: the first share has most, the third of four or more two trajectories, the fourth none at all, and all
    others one."""
    if mesh is None:
        return list(batch.pack(PACK))
    others = mesh.shape.num_data - 1
    rows = [range(len(batch) - others), *([len(batch) - others + i] for i in range(others))][data_rank(mesh)]
    if data_rank(mesh) == 3:
        rows = []
    elif data_rank(mesh) == 2 and others >= 3:
        rows = [len(batch) - others + 1, len(batch) - others + 2]
    packs: list[Pack | None] = list(batch.pack(PACK, rows)) if len(rows) else []
    return packs + [None] * (mesh.max(len(packs)) - len(packs))


def backward(policy: NativePolicyTrainer, packs: Sequence[Pack | None]) -> float:
    """Returns this rank's shares of the loss, on all stages of a pipeline but the last 0."""
    micro_batches = []
    for pack in packs:
        flat = pack.flat if pack is not None else []
        batch = small_batch()
        weights = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(5))[flat].to(DEVICE)

        def loss(logprobs: Tensor, entropy: Tensor, weights: Tensor = weights) -> Tensor:
            return (weights * logprobs).sum() + 0.1 * (weights * entropy).sum()

        micro_batches.append((pack, loss))
    return policy.forward_backward(micro_batches)


@dataclass
class Outcome:
    """All tensors are on the CPU."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first update, before they are clipped."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    norms: list[float] = field(default_factory=list)
    share: float = 0.0
    """Of the loss of the first update, this rank's."""


def outcome(policy: NativePolicyTrainer, mesh: ProcessMesh | None = None) -> Outcome:
    """Scores a pack, and makes three updates."""
    batch, result = small_batch(), Outcome()
    packs = own_packs(batch, mesh)
    result.logprobs = torch.zeros(len(batch.tokens))
    scored = packs if mesh is None else packs[:1]
    for pack, logprobs in zip(scored, policy.compute_logprobs(scored), strict=True):
        has_logprobs = pack is not None and (mesh is None or mesh.is_last_stage)
        assert len(logprobs) == (len(pack.flat) if has_logprobs else 0)
        if has_logprobs:
            result.logprobs[pack.flat] = logprobs.float().cpu()

    def keep_gradients(masters: list[MasterWeight], layout: ShardingLayout) -> Tensor:
        own = {master.name: master.gradient for master in masters}
        for name in layout.trained:
            if own.get(name, True) is not None:
                result.gradients.setdefault(name, layout.gather(name, own.get(name)).cpu().clone())
        return total_norm(masters, layout)

    total_norm = optimizer_module.total_norm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "total_norm", keep_gradients)
        for scale in (1.0, 0.5, 1.0):
            share = backward(policy, packs)
            result.share = result.share or share
            result.norms.append(policy.step(scale).gradient_norm)
    result.weights = weights_of(policy)
    return result


def weights_of(policy: NativePolicyTrainer) -> dict[str, Tensor]:
    return {name: weight.cpu().clone() for name, weight in policy.weights()}


@cache
def alone(family: str, dtype: torch.dtype = torch.float32) -> Outcome:
    return outcome(policy_of(build_model(family, dtype)))


def on_mesh(
    shape: MeshShape,
    family: str,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    offload: Sequence[str] = (),
) -> Outcome:
    mesh = mesh_of(shape)
    return outcome(policy_of(build_model(family, dtype), mesh, gradient_checkpointing, offload), mesh)


def deviation(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number in each tensor."""
    assert list(ours) == list(expected)
    largest = max(float((ours[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
    MEASURED["deviation"] = max(largest, MEASURED.get("deviation", 0.0))
    return largest
