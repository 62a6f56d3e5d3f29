"""Decoder layers of the Llama family, computed with fewer and larger kernels.

`fuse` leaves a transformers model as it is to everybody who looks at it: the same modules, parameters, names and
hooks. Two things change: the weights of projections with the same input lie behind each other in memory, so that one
product computes them all, and the layers' forward methods are replaced. Models that are not exactly of this shape are
left alone.

Merged parameters, as vLLM has them, would change names, checkpoints and the optimizer's state; a merged copy beside the
parameters would have to be kept in step with every update. Views of one storage need neither.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corral.kernels.merged_linear import adjacent, merged_linear
from corral.kernels.rms_norm import add_rms_norm, rms_norm
from corral.kernels.rotary import rotate, rotate_merged, split_heads
from corral.kernels.swiglu import silu_mul
from corral.model.attention import ATTENTION_NAME, corral_attention
from corral.model.lora import LoraLinear, add_adapter_outputs

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Prefixes of transformers' class names. Other families may compute something else with the same parts."""


class NormParameters(NamedTuple):
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class FusedLayer:
    """Weights and sizes of a layer, for the engine's decoder, which computes it itself.

    Tensors are views of the parameters, so they follow every update in place.
    """

    module: Any
    index: int
    num_kv_heads: int
    head_width: int
    scaling: float
    window: int | None

    @property
    def input_norm(self) -> NormParameters:
        return norm_parameters(self.module.input_layernorm)

    @property
    def post_norm(self) -> NormParameters:
        """The norm between attention and the feed-forward part."""
        return norm_parameters(self.module.post_attention_layernorm)

    def project_qkv(self, tokens: Tensor) -> Tensor:
        """[tokens, (heads + 2 kv_heads) * head_width]: queries, keys, values in this order."""
        return project(tokens, qkv_projections(self.module))

    @property
    def q_norm(self) -> NormParameters | None:
        """The norm of each query head, in models that have it (Qwen3)."""
        norm = getattr(self.module.self_attn, "q_norm", None)
        return None if norm is None else norm_parameters(norm)

    @property
    def k_norm(self) -> NormParameters | None:
        norm = getattr(self.module.self_attn, "k_norm", None)
        return None if norm is None else norm_parameters(norm)

    def project_output(self, attended: Tensor) -> Tensor:
        projected: Tensor = self.module.self_attn.o_proj(attended)
        return projected

    def project_gate_up(self, tokens: Tensor) -> Tensor:
        """[tokens, 2 * intermediate width]: gate, then up."""
        return project(tokens, gate_up_projections(self.module))

    def project_down(self, gated: Tensor) -> Tensor:
        projected: Tensor = self.module.mlp.down_proj(gated)
        return projected


def fuse(model: Any, move_weights: bool = True) -> bool:
    """Fuses the model, if it is one that can be; returns whether it is. `move_weights`: whether weights of projections
    with the same input are moved behind each other; without it they are multiplied one by one where they are not."""
    decoder = model.get_decoder()
    if not is_fusible(decoder):
        return False
    for layer in computed_layers(decoder):
        for linears in (qkv_projections(layer), gate_up_projections(layer)) if move_weights else ():
            make_adjacent([linear.weight for linear in linears])
            if biases := biases_of(linears):
                make_adjacent(biases)
        # Bound methods: a deep copy of the layer computes with its own weights.
        layer.forward = MethodType(layer_forward, layer)
        layer.mlp.forward = MethodType(mlp_forward, layer.mlp)
    if decoder.norm.weight is not None:
        decoder.norm.forward = MethodType(norm_forward, decoder.norm)
    return True


def computed_layers(decoder: Any) -> list[Any]:
    """Layers that have parameters; others are on other stages of a pipeline."""
    return [layer for layer in decoder.layers if any(True for _ in layer.parameters())]


def unfuse(model: Any) -> bool:
    """Restores transformers' forward methods, for those who replace that of a single module (tensor parallelism).
    Returns whether the model was fused."""
    decoder, was_fused = model.get_decoder(), False
    layers = getattr(decoder, "layers", ())
    for module in [*layers, *(getattr(layer, "mlp", None) for layer in layers), getattr(decoder, "norm", None)]:
        forward = getattr(module, "__dict__", {}).get("forward")
        if getattr(forward, "__func__", None) in (layer_forward, mlp_forward, norm_forward):
            del module.forward
            was_fused = True
    return was_fused


def fused_layers(model: Any) -> list[FusedLayer] | None:
    """The layers of a fused model; None if it is not fused, or its weights were moved since (as FSDP does)."""
    decoder = model.get_decoder()
    if not is_fusible(decoder):
        return None
    layers = []
    for layer in decoder.layers:
        tensors = [
            [linear.weight for linear in linears] for linears in (qkv_projections(layer), gate_up_projections(layer))
        ]
        if biases := biases_of(qkv_projections(layer)):
            tensors.append(biases)
        if any(adjacent(group) is None for group in tensors):
            return None
        attention = layer.self_attn
        width = attention.head_dim
        layers.append(
            FusedLayer(
                module=layer,
                index=attention.layer_idx,
                num_kv_heads=attention.k_proj.out_features // width,
                head_width=width,
                scaling=attention.scaling,
                window=window_of(attention),
            )
        )
    return layers


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    past_key_values: Any = None,
    **context: Any,
) -> Tensor:
    """Forward method of a decoder layer, called by transformers with the context that `forward_hidden` passes along.

    The residual stream is carried through `add_rms_norm`, which adds and normalizes in one pass over memory. Rounding
    is where transformers rounds: after each projection, each addition and each norm.
    """
    assert position_embeddings is not None
    assert past_key_values is None, "a fused model must be called by `forward_hidden`"
    shape = hidden_states.shape
    tokens = hidden_states.reshape(-1, shape[-1])
    normed, residual = add_rms_norm(tokens, None, *norm_parameters(self.input_layernorm))
    attended = attend(self.self_attn, normed, shape[:-1], position_embeddings, context)
    normed, residual = add_rms_norm(attended, residual, *norm_parameters(self.post_attention_layernorm))
    output: Tensor = residual + self.mlp(normed)
    return output.view(shape)


def mlp_forward(self: Any, tokens: Tensor) -> Tensor:
    """Forward method of a feed-forward network: [tokens, width] -> [tokens, width]"""
    output: Tensor = self.down_proj(silu_mul(project(tokens, (self.gate_proj, self.up_proj))))
    return output


def attend(
    attention: Any, tokens: Tensor, shape: torch.Size, position_embeddings: tuple[Tensor, Tensor], context: Any
) -> Tensor:
    """The attention part of a layer: tokens [tokens, width] -> [tokens, width]; `shape` is (batch, tokens of each)."""
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    merged = project(tokens, linears)
    num_heads, num_kv_heads = (linear.out_features // attention.head_dim for linear in linears[:2])
    cos, sin = (table.expand(*shape, -1).reshape(-1, table.shape[-1]) for table in position_embeddings)
    if hasattr(attention, "q_norm"):
        query, key, value = split_heads(merged, num_heads, num_kv_heads)
        query = rms_norm(query, *norm_parameters(attention.q_norm))
        key = rms_norm(key, *norm_parameters(attention.k_norm))
        query, key = rotate(query, key, cos, sin)
    else:
        query, key, value = rotate_merged(merged, cos, sin, num_heads, num_kv_heads)
    query, key, value = (part.unflatten(0, shape).transpose(1, 2) for part in (query, key, value))
    output, _ = corral_attention(
        attention,
        query,
        key,
        value,
        None,
        scaling=attention.scaling,
        sliding_window=window_of(attention),
        **context,
    )
    projected: Tensor = attention.o_proj(output.reshape(len(tokens), -1))
    return projected


def project(tokens: Tensor, linears: tuple[nn.Linear, ...]) -> Tensor:
    """What linear layers with the same input compute, beside each other: [tokens, all outputs]."""
    outputs = merged_linear(tokens, [linear.weight for linear in linears], biases_of(linears))
    return add_adapter_outputs(outputs, tokens, linears)


def window_of(attention: Any) -> int | None:
    """The sliding window of a layer: its own where its family alternates (Qwen), the configuration's in Mistral."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or None
    return getattr(attention.config, "sliding_window", None)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, *norm_parameters(self))


def is_fusible(decoder: Any) -> bool:
    """Whether all layers are of a known class and have exactly the known parts; one more or less would be left out."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not is_norm(getattr(decoder, "norm", None)):
        return False
    uses_ours = getattr(decoder.config, "_attn_implementation", None) == ATTENTION_NAME
    return uses_ours and len(layers) > 0 and all(is_fusible_layer(layer) for layer in computed_layers(decoder))


def is_fusible_layer(layer: nn.Module) -> bool:
    names = {f"{family}DecoderLayer" for family in FAMILIES}
    if not names & {base.__name__ for base in type(layer).__mro__}:  # FSDP replaces the class by a subclass
        return False
    parts = {"input_layernorm", "post_attention_layernorm"}
    parts |= {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    head_norms = {"self_attn.q_norm", "self_attn.k_norm"}
    found = {name for name, module in layer.named_modules() if list(module.parameters(recurse=False))}
    if found not in (parts, parts | head_norms):
        return False
    mlp: Any = layer.mlp
    linears = [layer.get_submodule(name) for name in found if name.endswith("_proj")]
    norms = [layer.get_submodule(name) for name in found if name.endswith("norm")]
    return (
        all(type(linear) in (nn.Linear, LoraLinear) and "forward" not in linear.__dict__ for linear in linears)
        and all(is_norm(norm) for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        and len({linear.bias is None for linear in qkv_projections(layer)}) == 1
    )


def is_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight") and hasattr(module, "variance_epsilon")
    )


def qkv_projections(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def gate_up_projections(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    return layer.mlp.gate_proj, layer.mlp.up_proj


def biases_of(linears: tuple[nn.Linear, ...]) -> list[Tensor]:
    return [linear.bias for linear in linears if linear.bias is not None]


def norm_parameters(module: Any) -> NormParameters:
    return NormParameters(module.weight, module.variance_epsilon)


@torch.no_grad()
def make_adjacent(parameters: list[Tensor]) -> None:
    """Moves the parameters into one new storage; the old ones are freed as soon as nobody else holds them."""
    if adjacent(parameters) is not None:
        return
    storage = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, storage.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
