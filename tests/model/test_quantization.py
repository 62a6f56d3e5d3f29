"""Frozen weights in 4 and 8 bits: bitsandbytes' codes, the gradients of PEFT's QLoRA, in trainer, engine and files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_lora import CPU, TOKENS, check_engine, logprobs_of, peft_trains_squares, random_adapters, save, train_squares
from tiny import save_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from corral.model.lora import PEFT_PREFIX
from corral.model.model_loading import load_model
from corral.model.quantization import QuantizedLinear, QuantizedLoraLinear
from corral.recipe.errors import UserError
from corral.recipe.schema import Lora, Model, Quantization
from corral.rollout.native_engine import model_logprobs
from corral.training.checkpoint import export_merged

bnb = pytest.importorskip("bitsandbytes")
LORA = Lora(rank=4)


def quantized(folder: Path, bits: Any, lora: Lora = LORA) -> Any:
    """A quantized model with adapters that compute something."""
    settings = Model(path=str(folder), lora=lora, quantization=Quantization(bits=bits), dtype="float32")
    return random_adapters(load_model(settings, CPU))


def dequantized_base(folder: Path, ours: Any) -> Any:
    """transformers' own model with the weights that our codes stand for."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            base.get_submodule(name).weight.data = module.dequantized()
    return base


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 and 128 numbers. bitsandbytes' own layers are wrong with rows that are no whole blocks, on CPUs with
    AVX-512."""
    folder = tmp_path_factory.mktemp("wide")
    save_tiny_model(folder, hidden_size=64, head_dim=16, intermediate_size=128)
    return folder


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_bitsandbytes(tiny_model: Path, bits: int) -> None:
    ours = quantized(tiny_model, bits)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    layers = {name: module for name, module in ours.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == 14
    assert not isinstance(ours.get_output_embeddings(), QuantizedLinear)
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight.data
        if bits == 4:
            theirs = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=False)
            theirs = theirs.to("cpu")
            assert torch.equal(layer.codes, theirs.data)
            values = theirs.quant_state.code[torch.stack([theirs.data >> 4, theirs.data & 15], dim=-1).int()]
            expected = (values.view(-1, 64) * theirs.quant_state.absmax[:, None]).view(weight.shape)
        else:
            linear = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
            linear.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            linear = linear.to("cpu")
            assert torch.equal(layer.codes, linear.weight.data)
            expected = linear.weight.data * linear.weight.SCB[:, None] / 127
        torch.testing.assert_close(layer.dequantized(), expected, rtol=1e-5, atol=1e-6)
        error = (layer.dequantized() - weight).abs().mean() / weight.abs().mean()
        assert 0 < error < (0.12 if bits == 4 else 0.015)


@pytest.mark.parametrize(("bits", "by"), [(4, "bitsandbytes"), (4, "plain"), (8, "plain")])
@pytest.mark.parametrize("lora", [LORA, Lora(rank=4, targets=["q_proj", "down_proj"])], ids=str)
def test_gradients_are_those_of_peft_on_the_same_base(
    wide_model: Path, tmp_path: Path, bits: int, by: str, lora: Lora
) -> None:
    """`bitsandbytes`: PEFT's own QLoRA, on the model as transformers quantizes it. `plain`: PEFT on the weights that
    the codes stand for; its int8 would also round what layers get."""
    ours = quantized(wide_model, bits, lora)
    save(ours, tmp_path)
    base = dequantized_base(wide_model, ours)
    if by == "bitsandbytes":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(
            wide_model, dtype=torch.float32, quantization_config=config, device_map="cpu"
        ).eval()
        linear = [module for module in base.modules() if isinstance(module, bnb.nn.Linear4bit)]
        assert len(linear) == 14
        for module in linear:  # on a CPU with AVX-512 for bfloat16 it would compute in that, whatever it was asked for
            module.support_avx512bf16_for_cpu = False
    found = train_squares(ours)
    expected = peft_trains_squares(PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval())
    assert len(found) == len(expected) > 0
    for name, gradient in found.items():
        its = expected[f"{PEFT_PREFIX}{name}.default.weight"]
        torch.testing.assert_close(gradient, its, rtol=1e-4, atol=1e-5 * max(1, its.abs().max()), msg=name)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("paged", [False, True])
def test_the_engine_decodes_with_the_trainers_codes(tiny_model: Path, bits: int, paged: bool) -> None:
    model = quantized(tiny_model, bits)
    check_engine(model, paged, tolerance=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_merged_and_served_models_have_the_weights_of_training(tiny_model: Path, tmp_path: Path, bits: Any) -> None:
    model = quantized(tiny_model, bits)
    save(model, tmp_path / "checkpoint")
    expected = pytest.approx(model_logprobs(model, TOKENS), abs=1e-5)
    again = Model(path=str(tmp_path / "checkpoint"), lora=LORA, quantization=Quantization(bits=bits), dtype="float32")
    assert model_logprobs(load_model(again, CPU), TOKENS) == expected
    merged = load_model(Model(path=str(tmp_path / "checkpoint"), dtype="float32"), CPU)
    assert all(type(module) is nn.Linear for module in merged.modules() if isinstance(module, nn.Linear))
    assert model_logprobs(merged, TOKENS) == expected
    export_merged(tmp_path / "checkpoint", tmp_path / "whole", "float32")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert logprobs_of(whole.eval(), TOKENS).tolist() == expected
    with pytest.raises(UserError, match=rf"set `model.quantization.bits: {bits}`"):
        load_model(Model(path=str(tmp_path / "checkpoint"), lora=LORA, dtype="float32"), CPU)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_the_dtype_of_training_whatever_a_model_is_loaded_in(
    tiny_model: Path, tmp_path: Path, bits: Any
) -> None:
    """The base is stored in float32: codes of its own numbers would differ from those of what training has rounded."""
    few = Quantization(bits=bits)
    trained = load_model(Model(path=str(tiny_model), lora=LORA, quantization=few, dtype="bfloat16"), CPU)
    save(trained, tmp_path / "checkpoint")
    path = str(tmp_path / "checkpoint")
    merged = load_model(Model(path=path, dtype="float32"), CPU)
    again = load_model(Model(path=path, lora=LORA, quantization=few, dtype="float32"), CPU)
    for name, module in trained.named_modules():
        if isinstance(module, QuantizedLinear):
            torch.testing.assert_close(merged.get_submodule(name).weight, module.dequantized().float(), rtol=0, atol=0)
            assert torch.equal(again.get_submodule(name).codes, module.codes)


def test_no_layer_keeps_its_matrix_for_the_backward_pass(tiny_model: Path) -> None:
    model = quantized(tiny_model, 4)
    layer = next(module for module in model.modules() if isinstance(module, QuantizedLoraLinear))
    sizes: list[int] = []

    def record(saved: torch.Tensor) -> torch.Tensor:
        sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(record, lambda saved: saved):
        layer(torch.randn(3, layer.in_features, requires_grad=True)).sum().backward()
    assert max(sizes) < layer.in_features * layer.out_features
    held = sum(buffer.nbytes for name, buffer in layer.named_buffers())
    assert held == layer.in_features * layer.out_features * (0.5 + 4 / 64)


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    from tiny_families import config_of, tiny_family_model

    tiny_family_model(config_of("qwen3_moe")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a mixture, and experts"):
        quantized(tmp_path, 4)
