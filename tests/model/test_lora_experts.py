"""Adapters of a mixture's experts: what PEFT computes and writes for them, with its `target_parameters`."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_lora import CPU, TOKENS, logprobs_of, random_adapters, save
from tiny_families import config_of, tiny_family_model
from trajectories import small_batch
from transformers import AutoModelForCausalLM

from corral.model.experts import expert_matrices
from corral.model.lora import adapters_disabled, as_peft, peft_names
from corral.model.model_loading import load_model
from corral.recipe.errors import UserError
from corral.recipe.schema import Lora, Model, Optimizer
from corral.recipe.shape import ModelShape
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine, model_logprobs
from corral.training.native_trainer import NativePolicyTrainer

FAMILIES = {
    "qwen3_moe": "experts only",
    "mixtral": "the same under other names in its files",
    "gpt_oss-window8": "matrices the other way around, biases, gate and up interleaved",
    "deepseek_v3": "dense layers and shared experts beside them",
}
MATRICES = ["experts.gate_up_proj", "experts.down_proj"]
CASES = [
    Lora(rank=4),
    Lora(rank=3, alpha=5.0, rslora=True, targets=["q_proj", "experts.down_proj"]),
    Lora(rank=8, targets=MATRICES),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in made.items():
        tiny_family_model(config_of(name)).save_pretrained(folder)
    return made


def adapted(folder: Path, lora: Lora) -> Any:
    return random_adapters(load_model(Model(path=str(folder), dtype="float32"), CPU), lora)


def base_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def peft_of(folder: Path, ours: Any) -> Any:
    """PEFT's model with the same adapters."""
    lora, targets = ours.lora, ours.lora_targets
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.resolved_alpha,
        target_modules=targets.linears,
        target_parameters=targets.matrices,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base_of(folder), config)
    theirs, own = dict(model.named_parameters()), {n: p for n, p in ours.named_parameters() if "lora" in n}
    for name, peft in peft_names(own).items():
        theirs[peft.replace(".weight", ".default.weight")].data.copy_(as_peft(peft, own[name].data))
    return model.eval()


@pytest.mark.parametrize("lora", CASES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss-window8"])
@pytest.mark.slow
def test_gradients_are_those_of_a_plain_peft_model(folders: dict[str, Path], family: str, lora: Lora) -> None:
    ours = adapted(folders[family], lora)
    theirs = peft_of(folders[family], ours)
    batch = small_batch()
    policy = NativePolicyTrainer(ours, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    for pack in batch.pack(45):
        policy.forward_backward([(pack, lambda logprobs, entropy: (logprobs**2).sum())])
    for row in range(len(batch)):
        generated = torch.from_numpy(batch.generated[batch.positions_of([row])][1:])
        (logprobs_of(theirs, batch.sequence(row).tolist())[generated] ** 2).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == len(expected) > 0
    for name, peft in peft_names(trained).items():
        gradient, theirs_of_it = trained[name].grad, expected[peft.replace(".weight", ".default.weight")]
        assert gradient is not None
        assert theirs_of_it is not None
        largest = float(theirs_of_it.abs().max())
        torch.testing.assert_close(as_peft(peft, gradient), theirs_of_it, rtol=1e-4, atol=2e-5 * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_all_experts_have_adapters_that_peft_loads_as_they_are(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model = adapted(folders[family], Lora(rank=4))
    experts = [name for name, module in model.named_modules() if expert_matrices(module)]
    assert len(model.lora_targets.matrices) == 2 * len(experts) > 0
    save(model, tmp_path)
    theirs = PeftModel.from_pretrained(base_of(folders[family]), tmp_path).eval()
    ours = model_logprobs(model, TOKENS)
    assert logprobs_of(theirs, TOKENS).tolist() == pytest.approx(ours, abs=2e-4)
    assert logprobs_of(theirs.merge_and_unload(), TOKENS).tolist() == pytest.approx(ours, abs=2e-4)
    again = load_model(Model(path=str(tmp_path), lora=Lora(rank=4), dtype="float32"), CPU)
    assert model_logprobs(again, TOKENS) == ours
    with adapters_disabled():
        bare = model_logprobs(model, TOKENS)
    plain = load_model(Model(path=str(folders[family]), dtype="float32"), CPU)
    assert bare == model_logprobs(plain, TOKENS)
    assert np.abs(np.array(ours) - bare).max() > 0.01


@pytest.mark.parametrize("lora", CASES, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss-window8"])
@pytest.mark.slow
def test_an_adapter_of_peft_is_merged_or_gone_on_from(
    folders: dict[str, Path], tmp_path: Path, family: str, lora: Lora
) -> None:
    theirs = peft_of(folders[family], adapted(folders[family], lora))
    theirs.save_pretrained(tmp_path)
    expected = pytest.approx(logprobs_of(theirs, TOKENS).tolist(), abs=2e-4)
    for wanted in (lora, None):
        loaded = load_model(Model(path=str(tmp_path), lora=wanted, dtype="float32"), CPU)
        assert model_logprobs(loaded, TOKENS) == expected
    merged = dict(loaded.named_parameters())
    for name, parameter in theirs.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name].data, parameter.data, rtol=1e-5, atol=1e-6)


def test_files_are_those_that_peft_writes(folders: dict[str, Path], tmp_path: Path) -> None:
    ours = adapted(folders["qwen3_moe"], CASES[1])
    save(ours, tmp_path / "ours")
    peft_of(folders["qwen3_moe"], ours).save_pretrained(tmp_path / "theirs")
    written, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_engine_samples_with_the_adapters(folders: dict[str, Path], family: str, paged: bool) -> None:
    model = adapted(folders[family], Lora(rank=4, targets=MATRICES))
    engine = NativeEngine(model, None, max_sequences=4, max_prefill_tokens=64, max_length=64, paged=paged)
    completion = asyncio.run(engine.generate(TOKENS, Sampling(max_tokens=12), 3))
    engine.close()
    whole = model_logprobs(model, [*TOKENS, *completion.tokens])
    assert completion.logprobs == pytest.approx(whole[len(TOKENS) - 1 :], abs=1e-4)


def test_merged_weights_are_what_other_engines_get(folders: dict[str, Path]) -> None:
    model = adapted(folders["gpt_oss-window8"], Lora(rank=4))
    policy = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    plain = load_model(Model(path=str(folders["gpt_oss-window8"]), dtype="float32"), CPU)
    plain.load_state_dict(dict(policy.weights(merged=True)), strict=False)
    assert model_logprobs(plain, TOKENS) == pytest.approx(model_logprobs(model, TOKENS), abs=2e-4)


def test_names_of_linear_layers_do_not_mean_experts(folders: dict[str, Path]) -> None:
    ours = adapted(folders["deepseek_v3"], Lora(rank=2, targets=["down_proj"]))
    assert not ours.lora_targets.matrices
    assert adapted(folders["qwen3_moe"], Lora(rank=2, targets=["down_proj"])).lora_targets.matrices


def test_dropout_of_experts_is_refused_as_peft_does(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"model\.lora\.dropout: adapters of experts"):
        adapted(folders["qwen3_moe"], Lora(dropout=0.1))
    assert adapted(folders["qwen3_moe"], Lora(dropout=0.1, targets=["q_proj"])).lora_targets.linears


def test_a_target_that_is_not_there_is_refused_with_those_that_are(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"called query; there are experts.down_proj, experts.gate_up_proj, .*v_proj"):
        adapted(folders["qwen3_moe"], Lora(targets=["query"]))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("lora", [Lora(rank=4), Lora(rank=4, targets=["q_proj", "experts.down_proj"])], ids=str)
def test_a_plan_counts_the_adapters_that_there_are(folders: dict[str, Path], family: str, lora: Lora) -> None:
    model, shape = adapted(folders[family], lora), ModelShape.find(str(folders[family]))
    assert shape is not None
    targets = None if lora.targets == "all-linear" else lora.targets
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.num_adapter_parameters(lora.rank, targets) == trained
