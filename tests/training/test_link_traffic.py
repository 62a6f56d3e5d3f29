"""What the plan says that parameters and gradients send over links is what a micro-batch sends."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sharded_cases import backward, build_model, mesh_with_gradients, own_packs, policy_of
from team import Team
from torch.utils._python_dispatch import TorchDispatchMode
from trajectories import small_batch

from corral.recipe.link_traffic import gradient_scatter, parameter_gather
from corral.recipe.mesh import MeshShape
from corral.recipe.plan import make_plan
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape

FAMILY = "llama:8"


class Received(TorchDispatchMode):
    """Counts what this rank receives in collectives, by their names: of n ranks' equal parts n - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = args[0] if "gather" in name else args[1]
            size = dist.ProcessGroup.unbox(args[2]).size()
            self.bytes[name] += whole.nbytes * (size - 1) // size
        return func(*args, **(kwargs or {}))


def received(shape: MeshShape, gradient_checkpointing: bool, gradient_dtype: str) -> Counter[str]:
    with mesh_with_gradients(shape, gradient_dtype) as mesh:
        policy = policy_of(build_model(FAMILY), mesh, gradient_checkpointing)
        packs = own_packs(small_batch(), mesh)[:1]
        backward(policy, packs)
        policy.step(1.0)
        with Received() as counted:
            backward(policy, packs)
        return counted.bytes


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(shard=4), MeshShape(shard=2, tensor=2), MeshShape(pipeline=2, shard=2)])
@pytest.mark.parametrize(
    ("gradient_checkpointing", "gradient_dtype"), [(False, "float32"), (True, "float32"), (False, "bfloat16")]
)
def test_gathers_and_gradients_are_what_the_plan_counts(
    team: Callable[[int], Team], tmp_path: Path, shape: MeshShape, gradient_checkpointing: bool, gradient_dtype: str
) -> None:
    config = build_model(FAMILY).config
    del config.num_experts, config.num_local_experts  # which other families have
    config.save_pretrained(tmp_path)
    recipe = {
        "name": "one",
        "model": {"path": str(tmp_path), "dtype": "float32"},
        "data": {"train": {"path": "arithmetic"}},
        "cluster": {"devices_per_node": 4},
        "train": {
            "parallel": {"tensor": shape.tensor, "pipeline": shape.pipeline},
            "gradient_dtype": gradient_dtype,
        },
        "schedule": {"steps": 1},
    }
    plan = make_plan(Recipe.model_validate(recipe), ModelShape.read(str(tmp_path)))
    gathered = 2 * parameter_gather(plan, "actor").within_node
    scattered = gradient_scatter(plan, "actor").within_node
    for counted in team(4).run(received, shape, gradient_checkpointing, gradient_dtype):
        # Embeddings are gathered once, and tensor parallelism does not cut them: each is a fiftieth here.
        assert counted["c10d::_allgather_base_"] == pytest.approx(gathered, rel=0.03)
        assert counted["c10d::_reduce_scatter_base_"] == pytest.approx(scattered, rel=0.03)
