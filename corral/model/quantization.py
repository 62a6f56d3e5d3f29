"""Frozen weights in 4 or 8 bits, beside which adapters are trained (QLoRA, Dettmers et al. 2023).

The formats are those of bitsandbytes: NF4 in blocks of 64 numbers, or int8 in rows. A linear layer puts its matrix
together in the model's dtype whenever it computes, in the backward pass again, and multiplies as any other: trainer and
engine have the same codes, and the same numbers come out of them. Embeddings, norms and the head stay as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from corral.model.experts import holds_experts
from corral.model.lora import LoraLinear, set_class
from corral.recipe.errors import UserError, install_command
from corral.recipe.schema import Quantization

BLOCK = 64
"""Numbers of a block of NF4, which have one scale."""


class QuantizedLinear(nn.Linear):
    """A linear layer without `weight`. Made out of a plain one by `quantize`."""

    bits: int
    compute_dtype: torch.dtype
    codes: Tensor
    """Two of 4 bits in a byte, or int8 [outputs, inputs]."""
    scales: Tensor
    """Largest number of each block, or of each row, in float32."""

    def dequantized(self) -> Tensor:
        """The weight [outputs, inputs], rounded to what its codes can say."""
        from bitsandbytes import functional as bnb

        if self.bits == 8:
            eight: Tensor = bnb.int8_vectorwise_dequant(self.codes, self.scales)
            return eight.to(self.compute_dtype)
        # Blocks go on from row to row. Given a matrix, bitsandbytes 0.50 begins one with each row on CPUs with AVX-512.
        shape = torch.Size((self.out_features * self.in_features,))
        state = bnb.QuantState(self.scales, shape, blocksize=BLOCK, quant_type="nf4", dtype=self.compute_dtype)
        four: Tensor = bnb.dequantize_4bit(self.codes, state)
        return four.view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        compute: Any = _QuantizedProduct.apply
        outputs: Tensor = compute(input, self)
        return outputs if self.bias is None else outputs + self.bias


class QuantizedLoraLinear(LoraLinear, QuantizedLinear):
    """The same with an adapter."""


class _QuantizedProduct(Function):
    """Autograd would keep the matrix of every layer until the backward pass, and so the whole model in its dtype."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return F.linear(input, linear.dequantized())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.linear.dequantized(), None


@torch.no_grad()
def quantize(model: Any, quantization: Quantization, device: torch.device, encoded_from: torch.dtype) -> None:
    """Replaces the weights of the language model's linear layers, but for its head, by codes on the device. Layer by
    layer: the device never holds the model in its dtype. `encoded_from`: the dtype of the weights that adapters which
    are there were trained beside; codes of others would be others."""
    model.lora_quantization, model.encoded_from = quantization, encoded_from
    for linear in quantizable(model):
        dtype = linear.weight.dtype
        codes, scales = encode(linear.weight.to(device, encoded_from), quantization.bits)
        del linear.weight
        linear.register_parameter("weight", None)
        linear.register_buffer("codes", codes, persistent=False)
        linear.register_buffer("scales", scales, persistent=False)
        set_class(linear, QuantizedLoraLinear if isinstance(linear, LoraLinear) else QuantizedLinear)
        linear.bits, linear.compute_dtype = quantization.bits, dtype


@torch.no_grad()
def round_weights(model: Any, quantization: Quantization, encoded_from: torch.dtype) -> None:
    """Rounds the same weights to what their codes can say, and leaves them in the model's dtype."""
    for linear in quantizable(model):
        plain = QuantizedLinear(linear.in_features, linear.out_features, bias=False, device="meta")
        plain.bits, plain.compute_dtype = quantization.bits, encoded_from
        plain.codes, plain.scales = encode(linear.weight.to(encoded_from), quantization.bits)
        linear.weight.data = plain.dequantized().to(linear.weight.dtype)


def quantizable(model: Any) -> list[Any]:
    if any(map(holds_experts, model.modules())):
        raise UserError(
            f"model.quantization: {type(model).__name__} is a mixture, and experts, which are most of its weights, are "
            "not quantized; leave it out"
        )
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    return [one for one in decoder.modules() if type(one) in (nn.Linear, LoraLinear) and one is not head]


def encode(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes, scales)"""
    try:
        from bitsandbytes import functional as bnb
    except ImportError as error:
        raise UserError(f"model.quantization needs an extra: {install_command('quantization')}") from error
    weight = weight.contiguous()
    if bits == 8:
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return codes, scales
    codes, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    return codes, state.absmax
