"""Adapters of a mixture's experts: what PEFT computes and writes for them, with its `target_parameters`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_lora import (
    CPU,
    TOKENS,
    adapted,
    check_engine,
    logprobs_of,
    merged_logprobs,
    peft_trains_squares,
    save,
    train_squares,
)
from tiny_families import config_of, tiny_family_model
from transformers import AutoModelForCausalLM

from corral.model.experts import expert_matrices
from corral.model.lora import adapters_disabled, as_peft, peft_names
from corral.model.model_loading import load_model
from corral.recipe.errors import UserError
from corral.recipe.schema import Lora, Model
from corral.recipe.shape import ModelShape
from corral.rollout.native_engine import model_logprobs

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
    found, expected = train_squares(ours), peft_trains_squares(theirs)
    assert len(found) == len(expected) > 0
    for name, peft in peft_names(found).items():
        its = expected[peft.replace(".weight", ".default.weight")]
        largest = float(its.abs().max())
        torch.testing.assert_close(as_peft(peft, found[name]), its, rtol=1e-4, atol=2e-5 * largest, msg=name)


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
    check_engine(model, paged, tolerance=1e-4)


def test_merged_weights_are_what_other_engines_get(folders: dict[str, Path]) -> None:
    model = adapted(folders["gpt_oss-window8"], Lora(rank=4))
    merged = merged_logprobs(model, folders["gpt_oss-window8"])
    assert merged == pytest.approx(model_logprobs(model, TOKENS), abs=2e-4)


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
