"""Fused layers against the model's own code: the same hidden states, gradients and names."""

import copy

import pytest
import torch
from test_tree_attention import sequences
from tiny import DEVICE, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from corral.data.batch import TokenTree
from corral.kernels.merged_linear import adjacent
from corral.model.attention import TreeAttention, forward_hidden, register
from corral.model.fused_layers import fuse, fused_layers, unfuse

FAMILIES = ["llama", "llama with biases", "mistral", "qwen2", "qwen3"]


def tiny(family: str) -> torch.nn.Module:
    register()
    config = tiny_config(family if family in ("qwen2", "qwen3", "qwen3_moe") else "llama")
    if family == "mistral":
        config = MistralConfig(**{**config.to_dict(), "model_type": "mistral"}, sliding_window=None)
    config.attention_bias = family == "llama with biases"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="corral").eval().to(DEVICE)
    for name, parameter in model.named_parameters():  # norms and biases that are not all ones and zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def hidden_states(model: torch.nn.Module) -> torch.Tensor:
    tree = TokenTree.build(sequences())
    tokens, positions = (torch.from_numpy(array).to(DEVICE) for array in (tree.tokens, tree.positions))
    return forward_hidden(model, tokens, positions, TreeAttention(tree, DEVICE))


def hidden_states_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    hidden = hidden_states(model)
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    (hidden * upstream).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"hidden states": hidden.detach(), **gradients}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_hidden_states_and_gradients_of_the_models_own_code(
    family: str, gradient_checkpointing: bool
) -> None:
    model = tiny(family)
    expected = hidden_states_and_gradients(copy.deepcopy(model))
    assert fuse(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    found = hidden_states_and_gradients(model)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_moves_weights_and_changes_neither_names_nor_values_nor_identities(family: str) -> None:
    model = tiny(family)
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    fuse(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_are_views_of_the_parameters(family: str) -> None:
    model = tiny(family)
    assert fused_layers(model) is None
    fuse(model)
    layers = fused_layers(model)
    assert layers is not None
    assert [layer.index for layer in layers] == [0, 1]
    first, attention = layers[0], model.get_decoder().layers[0].self_attn
    assert (first.num_kv_heads, first.head_width) == (2, 16 if family == "qwen3" else 8)
    assert first.scaling == attention.scaling
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert adjacent([projection.weight for projection in projections]) is not None
    tokens = torch.randn(3, attention.q_proj.in_features, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def separately() -> Tensor:
        return torch.cat([projection(tokens) for projection in projections], dim=-1)

    torch.testing.assert_close(first.project_qkv(tokens), separately())
    assert (first.q_norm is not None) == (first.k_norm is not None) == (family == "qwen3")
    with torch.no_grad():
        attention.v_proj.weight.fill_(7.0)
    torch.testing.assert_close(first.project_qkv(tokens), separately())


def test_a_copy_of_a_fused_model_computes_with_its_own_weights() -> None:
    model = tiny("llama")
    fuse(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert bool(hidden_states(other).any())
    assert not bool(hidden_states(model).any())


def test_an_unfused_model_computes_module_by_module_again() -> None:
    model = tiny("qwen2")
    expected = hidden_states(model)
    fuse(model)
    unfuse(model)
    called = []
    model.get_decoder().layers[0].mlp.up_proj.register_forward_hook(lambda *_: called.append(True))
    torch.testing.assert_close(hidden_states(model), expected, atol=1e-5, rtol=1e-5)
    assert called


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_other_models_are_left_alone(family: str) -> None:
    model = tiny(family)
    assert not fuse(model)
    assert fused_layers(model) is None
    assert "forward" not in model.get_decoder().layers[0].__dict__


def test_a_layer_with_a_part_more_is_left_alone() -> None:
    model = tiny("llama")
    model.get_decoder().layers[1].mlp.extra = torch.nn.Linear(4, 4)
    assert not fuse(model)
