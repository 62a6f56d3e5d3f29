"""A checkpoint does not show how many processes wrote it, and loads on any number of them."""

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_cases import backward, build_model, deviation, mesh_of, own_packs, policy_of, weights_of
from team import ROUNDING, Team
from trajectories import small_batch
from transformers import AutoModelForCausalLM

from corral.model.attention import register
from corral.recipe.errors import UserError
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Optimizer
from corral.training import sharding, tensor_files
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.process_mesh import ProcessMesh
from corral.training.sharding import local_tensor
from corral.training.tensor_files import DeferredWrites, TensorFiles, write_tensors

pytestmark = pytest.mark.slow

Teams = Callable[[int], Team]
Weights = dict[str, torch.Tensor]


def advance(policy: NativePolicyTrainer, mesh: ProcessMesh | None, updates: int) -> None:
    for _ in range(updates):
        backward(policy, own_packs(small_batch(), mesh))
        assert not policy.step().skipped


def train_and_save(shape: MeshShape | None, family: str, dtype: torch.dtype, folder: Path, updates: int = 2) -> Weights:
    """-> the weights one update after what was saved."""
    mesh = mesh_of(shape)
    policy = policy_of(build_model(family, dtype), mesh)
    advance(policy, mesh, updates)
    policy.save(folder)
    advance(policy, mesh, 1)
    return weights_of(policy)


def loaded(shape: MeshShape | None, dtype: torch.dtype, folder: Path) -> tuple[NativePolicyTrainer, ProcessMesh | None]:
    mesh = mesh_of(shape)
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="corral").eval()
    policy = policy_of(model, mesh)
    policy.load(folder)
    return policy, mesh


def resume(shape: MeshShape | None, dtype: torch.dtype, folder: Path) -> Weights:
    policy, mesh = loaded(shape, dtype, folder)
    advance(policy, mesh, 1)
    return weights_of(policy)


def load_and_save(shape: MeshShape | None, dtype: torch.dtype, folder: Path, copy: Path) -> None:
    loaded(shape, dtype, folder)[0].save(copy)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(
    scope="module",
    params=[
        ("llama", torch.float32, MeshShape(replicate=2, shard=2)),
        ("qwen2", torch.bfloat16, MeshShape(shard=2, tensor=2)),
        ("qwen3_moe", torch.float32, MeshShape(expert=2, tensor=2)),
        ("llama", torch.float32, MeshShape(pipeline=4)),
        ("qwen3_moe", torch.bfloat16, MeshShape(pipeline=2, expert=2)),
    ],
    ids=["llama", "qwen2-bfloat16", "qwen3_moe", "llama-pipeline", "qwen3_moe-pipeline"],
)
def four(
    request: pytest.FixtureRequest, team: Teams, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.dtype, Weights]:
    """What four processes have saved, its type, and the weights one update later."""
    family, dtype, shape = request.param
    folder = tmp_path_factory.mktemp("four")
    return folder, dtype, team(4).run(train_and_save, shape, family, dtype, folder)[0]


@pytest.mark.gpu
def test_what_four_processes_saved_goes_on_anywhere(team: Teams, four: tuple[Path, torch.dtype, Weights]) -> None:
    folder, dtype, expected = four
    tolerance = ROUNDING if dtype == torch.float32 else 0.02
    assert deviation(resume(None, dtype, folder), expected) < tolerance
    for other in (MeshShape(context=2), MeshShape(replicate=2), MeshShape(shard=3), MeshShape(pipeline=2)):
        assert deviation(team(other.size).run(resume, other, dtype, folder)[1], expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(replicate=2), MeshShape(pipeline=2)])
def test_the_same_mesh_goes_on_to_the_last_bit(
    team: Teams, tmp_path: Path, dtype: torch.dtype, shape: MeshShape
) -> None:
    expected = team(2).run(train_and_save, shape, "llama", dtype, tmp_path)[0]
    assert deviation(team(2).run(resume, shape, dtype, tmp_path)[1], expected) == 0


@pytest.mark.gpu
def test_files_are_the_same_whoever_writes_them(
    team: Teams, tmp_path: Path, four: tuple[Path, torch.dtype, Weights]
) -> None:
    folder, dtype, _ = four
    one, three = tmp_path / "one", tmp_path / "three"
    load_and_save(None, dtype, folder, one)
    team(3).run(load_and_save, MeshShape(shard=3), dtype, folder, three)
    team(3).run(load_and_save, MeshShape(pipeline=3), dtype, folder, tmp_path / "stages")
    team(4).run(load_and_save, MeshShape(pipeline=2, tensor=2), dtype, folder, tmp_path / "cut stages")
    files = contents(folder)
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "actor/optimizer.json",
        "actor/optimizer.safetensors",
    }
    assert contents(one) == files
    assert contents(three) == files
    assert contents(tmp_path / "stages") == files
    assert contents(tmp_path / "cut stages") == files


def train_and_save_rounded(shape: MeshShape | None, folder: Path, offload: tuple[str, ...] = ()) -> None:
    mesh = mesh_of(shape)
    policy = policy_of(build_model("llama"), mesh, offload=offload, state_dtype="bfloat16")
    advance(policy, mesh, 2)
    policy.save(folder)


def load_and_save_rounded(shape: MeshShape | None, folder: Path, copy: Path) -> Weights:
    """-> the weights one update after what was saved"""
    mesh = mesh_of(shape)
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="corral").eval()
    policy = policy_of(model, mesh, state_dtype="bfloat16")
    policy.load(folder)
    policy.save(copy)
    advance(policy, mesh, 1)
    return weights_of(policy)


def test_moments_in_bfloat16_are_the_same_files_on_every_mesh(team: Teams, tmp_path: Path) -> None:
    team(2).run(train_and_save_rounded, MeshShape(shard=2), tmp_path / "two", ("optimizer",))
    stored = TensorFiles(tmp_path / "two" / "actor", "optimizer")
    assert {stored[name].dtype for name in stored.names if "exp_avg" in name} == {torch.bfloat16}
    expected = load_and_save_rounded(None, tmp_path / "two", tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    for shape in (MeshShape(pipeline=2), MeshShape(tensor=2)):
        copy = tmp_path / str(shape)
        weights = team(2).run(load_and_save_rounded, shape, tmp_path / "two", copy)
        assert contents(copy) == contents(tmp_path / "two")
        assert deviation(weights[1], expected) < 2e-4  # a moment may be rounded to the other side


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "mixtral"])
def test_the_models_files_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    policy_of(build_model(family)).save(tmp_path / "ours")
    build_model(family).save_pretrained(tmp_path / "theirs")
    ours = {name: content for name, content in contents(tmp_path / "ours").items() if "/" not in name}
    assert ours == contents(tmp_path / "theirs")


def test_large_models_are_split_into_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, team: Teams
) -> None:
    """(The processes are forked, some before this test: the limit is lowered in there.)"""
    team(2).run(save_in_pieces, MeshShape(shard=2), tmp_path / "two")
    monkeypatch.setattr(tensor_files, "MAX_FILE", 30_000)
    save_in_pieces(None, tmp_path / "one")
    files = contents(tmp_path / "one")
    assert contents(tmp_path / "two") == files
    index = json.loads(files["model.safetensors.index.json"])
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in build_model("llama").parameters())
    policy, _ = loaded(None, torch.float32, tmp_path / "two")
    assert deviation(weights_of(policy), weights_of(policy_of(build_model("llama")))) == 0
    assert policy.optimizer is not None
    assert policy.optimizer.updates == 0


def save_in_pieces(shape: MeshShape | None, folder: Path) -> None:
    limit, tensor_files.MAX_FILE = tensor_files.MAX_FILE, 30_000
    try:
        mesh = mesh_of(shape)
        policy_of(build_model("llama"), mesh).save(folder)
    finally:
        tensor_files.MAX_FILE = limit


def bytes_copied_of_gathered(shape: MeshShape, folder: Path) -> tuple[int, int]:
    """-> (number of tensors that were put together for a checkpoint, bytes of it that this rank has)"""
    mesh = mesh_of(shape)
    policy, deferred, gathered = policy_of(build_model("llama"), mesh), DeferredWrites(10**9), list[str]()
    advance(policy, mesh, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "all_gather", lambda tensor, group: gathered.append("") or tensor)
        policy.save(folder, None, deferred)
    deferred.wait_for_copies()
    return len(gathered), sum(tensor.nbytes for parts in deferred.copies.values() for _, tensor in parts)


@pytest.mark.parametrize("shape", [MeshShape(shard=4), MeshShape(replicate=2, shard=2)])
def test_each_rank_copies_its_own_shards_and_nothing_is_gathered(team: Teams, tmp_path: Path, shape: MeshShape) -> None:
    found = team(4).run(bytes_copied_of_gathered, shape, tmp_path)
    total = sum(size for _, size in found)
    assert [number for number, _ in found] == [0] * 4
    assert max(size for _, size in found) < 0.3 * total


def save_where_seen(shape: MeshShape, folder: Path) -> None:
    """Only ranks 1 and 2 see the folder."""
    mesh = mesh_of(shape)
    assert mesh is not None
    writers = [1, 2]
    policy_of(build_model("llama"), mesh).save(folder if mesh.rank in writers else folder / "elsewhere", writers)


def test_only_ranks_that_see_the_folder_write(team: Teams, tmp_path: Path) -> None:
    team(3).run(save_where_seen, MeshShape(shard=3), tmp_path / "there")
    policy_of(build_model("llama")).save(tmp_path / "one")
    assert contents(tmp_path / "there") == contents(tmp_path / "one")


def save_deferred(shape: MeshShape, folder: Path, max_bytes: int) -> int:
    """Changes the weights between the copies and the files, and returns the number of copies."""
    policy, deferred = policy_of(build_model("llama"), mesh_of(shape)), DeferredWrites(max_bytes)
    policy.save(folder, None, deferred)
    policy.saving.wait_for_copies()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            local_tensor(parameter).zero_()
    num_copies = sum(len(parts) for parts in deferred.copies.values())
    deferred.write()
    return num_copies


@pytest.mark.gpu
@pytest.mark.parametrize("max_bytes", [0, 40_000, 10**9])
def test_tensors_that_are_written_later_are_those_that_were_saved(team: Teams, tmp_path: Path, max_bytes: int) -> None:
    """Those that fit into the memory that may be used; others are written at once."""
    num_copies = team(2).run(save_deferred, MeshShape(shard=2), tmp_path / "later", max_bytes)
    policy_of(build_model("llama")).save(tmp_path / "at once")
    assert contents(tmp_path / "later") == contents(tmp_path / "at once")
    num_tensors = len(TensorFiles(tmp_path / "later", "model").names)
    assert (sum(num_copies) > 0, sum(num_copies) < num_tensors) == (max_bytes > 0, max_bytes < 10**9)


def save_on_a_full_disk(shape: MeshShape, folder: Path) -> str:
    mesh = mesh_of(shape)
    assert mesh is not None
    policy = policy_of(build_model("llama"), mesh)
    write_at = tensor_files.write_at

    def full(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
        raise OSError("no space left")

    tensor_files.write_at = full if mesh.rank == 1 else write_at
    try:
        with pytest.raises(OSError) as error:
            policy.save(folder)
    finally:
        tensor_files.write_at = write_at
    policy.save(folder)
    return str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(replicate=2)])
def test_a_rank_that_cannot_write_raises_on_all(team: Teams, tmp_path: Path, shape: MeshShape) -> None:
    first, second = team(2).run(save_on_a_full_disk, shape, tmp_path)
    assert (first, second) == ("another rank could not write its part", "no space left")


DAMAGES: dict[str, tuple[Callable[[Weights, str], object], str]] = {
    "shape": (lambda states, name: states.update({name: states[name].flatten()[:1].clone()}), "is [1], not ["),
    "nan": (lambda states, name: states.update({name: states[name] * torch.nan}), "numbers that are not finite"),
    "integers": (lambda states, name: states.update({name: states[name].long()}), "numbers that are not finite"),
    "gone": (lambda states, name: states.pop(name), "has only a part of the states of"),
}


@pytest.mark.parametrize(
    ("key", "damage"),
    # Without a master weight the weight itself takes its place: that of a run in float32.
    sorted({*product(["exp_avg", "exp_avg_sq", "step", "master"], DAMAGES)} - {("master", "gone")}),
)
def test_states_that_do_not_fit_are_refused(tmp_path: Path, key: str, damage: str) -> None:
    """A fused kernel would read and write beyond them."""
    train_and_save(None, "llama", torch.bfloat16, tmp_path)
    file = tmp_path / "actor" / "optimizer.safetensors"
    states, (change, message) = load_file(file), DAMAGES[damage]
    name = next(name for name in states if name.endswith(f"proj.weight.{key}"))
    change(states, name)
    save_file(states, file)
    with pytest.raises(UserError) as error:
        loaded(None, torch.bfloat16, tmp_path)
    assert message in str(error.value)


def test_what_is_no_file_of_tensors_is_refused_in_one_line(tmp_path: Path) -> None:
    train_and_save(None, "llama", torch.float32, tmp_path)
    (tmp_path / "actor" / "optimizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"the optimizer in .* cannot be read: there is no 'updates'"):
        loaded(None, torch.float32, tmp_path)
    (tmp_path / "actor" / "optimizer.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"the optimizer in .* cannot be read"):
        loaded(None, torch.float32, tmp_path)


# --- the critic


def critic_of(mesh: ProcessMesh | None, dtype: torch.dtype) -> NativeValueTrainer:
    recipe = Optimizer(learning_rate=1e-2, epsilon=1e-2)
    return NativeValueTrainer(ValueModel(build_model("qwen2", dtype)), recipe, 10, mesh=mesh)


def train_critic(critic: NativeValueTrainer, mesh: ProcessMesh | None) -> Weights:
    for pack in own_packs(small_batch(), mesh):
        critic.forward_backward([(pack, lambda values: (values - 1.0).square().sum() / 100)])
    critic.step()
    return {name: weight.clone() for name, weight in critic.weights()}


def save_critic(shape: MeshShape, dtype: torch.dtype, folder: Path) -> Weights:
    mesh = mesh_of(shape)
    assert mesh is not None
    critic = critic_of(mesh, dtype)
    train_critic(critic, mesh)
    critic.save(folder)
    return train_critic(critic, mesh)


@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(pipeline=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_critic_goes_on_anywhere(team: Teams, tmp_path: Path, shape: MeshShape, dtype: torch.dtype) -> None:
    expected = team(2).run(save_critic, shape, dtype, tmp_path / "two")[0]
    critic = critic_of(None, dtype)
    critic.load(tmp_path / "two")
    critic.save(tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert deviation(train_critic(critic, None), expected) < (1e-4 if dtype == torch.float32 else 0.05)


# --- the files themselves


def test_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 4).bfloat16(),
        "a": torch.randn(2, 3),
        "step": torch.tensor(2.0),
        "counts": torch.arange(5),
        "half": torch.randn(7).half(),
        "mask": torch.tensor([True, False, True]),
        "äöü": torch.randn(0, 3),
    }
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_tensors(tmp_path, "ours", kinds, tensors.items(), ProcessMesh.build(MeshShape(), torch.device("cpu")))
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    stored = TensorFiles(tmp_path, "ours")
    assert stored.names == set(tensors)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_the_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    policy = policy_of(build_model("qwen2"))
    advance(policy, None, 1)
    policy.save(tmp_path)
    with pytest.raises(UserError, match="optimizer of another model: this one has no lm_head"):
        policy_of(build_model("llama")).load(tmp_path)
    assert os.listdir(tmp_path)
