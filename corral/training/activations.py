"""What a forward pass keeps for its backward pass, and where.

Without gradient checkpointing it is all that is inside of each layer. With it, it is each layer's input, from which the
backward pass computes the layer again; with `selective` also the results of matrix products and of attention, so that
only what is cheap is computed twice. Inputs may wait in the host's memory.

A micro-batch above its budget of tokens (a trajectory that is longer) is trained in parts: its layers are checkpointed
in any case, and feed-forward networks, which need most of a layer's memory and compute each token for itself, take one
chunk of tokens after the other, as in Arctic Long Sequence Training (Bekman et al. 2025). Attention sees all tokens,
so gradients are those of the whole, to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from corral.model.experts import holds_experts
from corral.recipe.errors import UserError
from corral.recipe.schema import GradientCheckpointing

LayerForward = Callable[..., Any]
aten = torch.ops.aten
KEPT_OPERATORS = {
    op.default
    for op in (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten._grouped_mm,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._flash_attention_forward,
    )
}
"""What is kept with `selective`: the operators whose work grows with the width of the model or the square of tokens."""


class LayerActivations:
    """What the layers of one model keep."""

    def __init__(
        self, causal: Any, checkpointing: GradientCheckpointing, *, offload: bool = False, max_tokens: int | None = None
    ) -> None:
        """`offload`: inputs of checkpointed layers are in the host's memory until the backward pass. `max_tokens`:
        budget of this rank; None: there is none."""
        self.checkpointing, self.offload, self.max_tokens = checkpointing, offload, max_tokens
        self.is_long = False
        """Whether the pass has more tokens than the budget. Ranks that compute experts together decide it together:
        what is computed again exchanges tokens again."""
        self.layers: list[Any] = layers_of(causal)
        # transformers adds experts' biases to their product in place (gpt-oss), which a result that is kept does not
        # survive.
        is_changed = any(holds_experts(module) and getattr(module, "has_bias", False) for module in causal.modules())
        self.kept_operators = KEPT_OPERATORS - ({aten._grouped_mm.default} if is_changed else set())
        self.last_offloaded: OffloadedTensor | None = None

    def begin(self) -> None:
        """Called before each forward pass."""
        self.last_offloaded = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Layers keep within it what they should. What they were before, they are afterwards."""
        if not self.layers and self.checkpointing:
            raise UserError(
                "train.gradient_checkpointing: transformers knows no layers of this model to compute again; "
                "set it to false"
            )
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(replaced_forward(layer, partial(self._run_layer, layer.forward)))
                feed_forward = feed_forward_of(layer)
                if self.max_tokens is not None and feed_forward is not None:
                    chunked = partial(self._run_in_chunks, feed_forward.forward)
                    stack.enter_context(replaced_forward(feed_forward, chunked))
            yield

    def _run_layer(self, forward: LayerForward, *args: Any, **kwargs: Any) -> Any:
        # An engine in another thread may decode with the same modules, without gradients.
        if not torch.is_grad_enabled() or not (self.checkpointing or self.is_long):
            return forward(*args, **kwargs)
        contexts = noop_context_fn
        if self.checkpointing == "selective" and not self.is_long:
            contexts = partial(create_selective_checkpoint_contexts, self.keep_products)
        if self.offload and args:
            self.last_offloaded = OffloadedTensor(args[0], self.last_offloaded)
            forward, args = partial(run_with, forward, self.last_offloaded), args[1:]
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def keep_products(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in self.kept_operators else CheckpointPolicy.PREFER_RECOMPUTE

    def _run_in_chunks(self, forward: LayerForward, hidden: Tensor) -> Tensor:
        if not self.is_long or self.max_tokens is None or hidden.shape[-2] <= self.max_tokens:
            output: Tensor = forward(hidden)
            return output
        chunks = hidden.split(self.max_tokens, -2)
        return torch.cat([checkpoint(forward, chunk, use_reentrant=False) for chunk in chunks], -2)


def layers_of(causal: Any) -> list[Any]:
    """The model's layers, or of a pipeline stage its own."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:  # code of the model's own
        found = [module for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
    return [layer for layer in found if any(True for _ in layer.parameters())]


def feed_forward_of(layer: Any) -> Any | None:
    """The layer's feed-forward network, if it is one that computes each token for itself: linear layers and functions.
    Not a mixture of experts, whose routing is counted, and exchanged, for a micro-batch as a whole."""
    module = getattr(layer, "mlp", None)
    if module is None:
        return None
    with_tensors = [
        part
        for part in module.modules()
        if any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False))
    ]
    is_dense = all(isinstance(part, nn.Linear) for part in with_tensors)  # also of 4 or 8 bits, which are buffers
    return module if with_tensors and is_dense else None


@contextmanager
def replaced_forward(module: nn.Module, forward: LayerForward) -> Iterator[None]:
    """A method of the instance. FSDP's hooks and a layer's own `__call__` are outside of it, as they should be: they
    would run again with the layer."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def run_with(forward: LayerForward, hidden: "OffloadedTensor", *args: Any, **kwargs: Any) -> Any:
    return forward(hidden.take(), *args, **kwargs)


class OffloadedTensor:
    """A layer's input on its way to the host's memory and back.

    It is taken twice: by the forward pass, as it is, and by the backward pass, which gets a copy of the copy. Copies
    run on a stream of their own. The backward pass goes through layers in reverse order, so when it takes one, the one
    before it starts on its way back, and travels while this layer computes.
    """

    def __init__(self, tensor: Tensor, before: "OffloadedTensor | None") -> None:
        self.tensor: Tensor | None = tensor
        """On the device: until the forward pass has taken it, and when it is back."""
        self.before, self.device, self.requires_grad = before, tensor.device, tensor.requires_grad
        self.is_first = True
        self.arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            stream = copy_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self.on_host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
                self.on_host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(stream)  # its memory is not given to others before it is copied
        else:
            self.on_host = tensor.detach()

    def take(self) -> Tensor:
        if self.is_first:
            assert self.tensor is not None
            tensor, self.tensor, self.is_first = self.tensor, None, False
            return tensor
        self.bring_back()
        if self.before is not None:
            self.before.bring_back()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        assert self.tensor is not None
        tensor, self.tensor, self.before = self.tensor, None, None
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor.detach().requires_grad_(self.requires_grad)

    def bring_back(self) -> None:
        if self.tensor is not None:
            return
        if self.device.type != "cuda":
            self.tensor = self.on_host
            return
        with torch.cuda.stream(copy_stream(self.device)):
            self.tensor = self.on_host.to(self.device, non_blocking=True)
            self.arrived = torch.cuda.current_stream(self.device).record_event()


STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process on which activations travel."""
    if device not in STREAMS:
        STREAMS[device] = torch.cuda.Stream(device)
    return STREAMS[device]
