"""One token of every sequence: the model's own layers over the paged cache, and the draw, captured as a CUDA graph.

A graph is captured the first time that as many sequences are decoded, for the next larger of a few batch sizes. What it
computes with (weights, cache, state) stays at its address, whatever is in it. A model that needs the host in between
(mixtures of experts in float32 do) is computed kernel by kernel.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.kernels.paged_attention import PAGE, paged_decode
from corral.kernels.rms_norm import add_rms_norm, rms_norm
from corral.kernels.sampling import sample_tokens
from corral.kernels.swiglu import silu_mul
from corral.model.attention import AttentionKernel, forward_hidden
from corral.model.fused_layers import FusedLayer, fused_layers, norm_parameters
from corral.rollout.paged.pool import PagePool
from corral.rollout.paged.state import SlotState

PROGRAMS = 132
"""That keep a GPU's multiprocessors busy: where there are fewer, sequences are read in several parts each."""


def batch_size(count: int, most: int) -> int:
    """The size of the graph that decodes `count` sequences. Up to 128 a step takes as long as reading the weights does;
    above, what is decoded for nobody costs time."""
    if count <= 128:
        return min(1 << (count - 1).bit_length(), most)
    step = 64 if count <= 512 else 128
    return min(-(-count // step) * step, most)


class Decoder:
    def __init__(self, model: Any, pool: PagePool, state: SlotState, scales: dict[int, float], max_steps: int) -> None:
        self.model, self.pool, self.state, self.scales = model, pool, state, scales
        num_slots, num_pages = state.table.shape
        device = pool.device
        self.drawn_tokens = torch.zeros(max_steps, num_slots, dtype=torch.int64, device=device)
        self.drawn_logprobs = torch.zeros(max_steps, num_slots, dtype=torch.float32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """The row into which the next step's draws go."""
        self.rows = torch.arange(num_slots, device=device)
        self.last_position = num_pages * PAGE - 1
        self.head = model.get_output_embeddings()
        self.rotary = rotary_tables(model, num_pages * PAGE)
        self.graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self.memory: Any = None
        """Of all graphs: they never run at the same time."""
        self.addresses: tuple[int, ...] = ()
        self.needs_host: bool | None = None
        """Within a step, so that it cannot be captured. None: not yet known."""

    def run(self, count: int, steps: int, truncates: bool) -> tuple[Tensor, Tensor]:
        """`steps` tokens for the first `count` slots. -> (tokens, log-probs) [steps, count], until the next run"""
        size = batch_size(count, len(self.rows))
        self.cursor.zero_()
        step = self.graph(size, truncates) if self.pool.device.type == "cuda" else lambda: self.step(size, truncates)
        for _ in range(steps):
            step()
        return self.drawn_tokens[:steps, :count], self.drawn_logprobs[:steps, :count]

    def graph(self, size: int, truncates: bool) -> Callable[[], None]:
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if addresses != self.addresses:
            self.graphs.clear()
            self.memory = None  # is gone with the last of them
            self.addresses = addresses
        if (size, truncates) not in self.graphs:
            self.graphs[size, truncates] = self.capture(size, truncates)
        return self.graphs[size, truncates]

    def capture(self, size: int, truncates: bool) -> Callable[[], None]:
        self.rehearse(size, truncates)
        if self.needs_host:
            return partial(self.step, size, truncates)
        graph = torch.cuda.CUDAGraph()
        # Who learns in this process meanwhile is not to be disturbed by it.
        with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
            self.step(size, truncates)
        self.memory = graph.pool()
        return graph.replay

    def rehearse(self, size: int, truncates: bool) -> None:
        """A step on slots that nobody has, for what is compiled and allocated on first use."""
        slots = SlotState.empty(size, self.state.table.shape[1], self.pool.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if self.needs_host is None:  # once, before anybody learns: it is asked of the whole process
                self.needs_host = waits_for_device(lambda: self.draw(self.hidden(slots), slots, truncates))
            elif not self.needs_host:
                self.draw(self.hidden(slots), slots, truncates)
        torch.cuda.current_stream().wait_stream(stream)

    def step(self, size: int, truncates: bool) -> None:
        state = self.state.first(size)
        tokens, logprobs = self.draw(self.hidden(state), state, truncates)
        state.tokens.copy_(tokens)
        self.drawn_tokens[:, :size].index_copy_(0, self.cursor, tokens[None])
        self.drawn_logprobs[:, :size].index_copy_(0, self.cursor, logprobs[None])
        state.positions.add_(1).clamp_(max=self.last_position)
        state.counters.add_(1)
        self.cursor.add_(1)

    def draw(self, hidden: Tensor, state: SlotState, truncates: bool) -> tuple[Tensor, Tensor]:
        return sample_tokens(
            self.head(hidden),
            self.rows[: len(hidden)],
            state.temperatures,
            state.seeds,
            state.counters,
            state.truncation if truncates else None,
        )

    def hidden(self, state: SlotState) -> Tensor:
        """[slots, width], after each slot's new token."""
        layers = fused_layers(self.model)
        if layers is None or self.rotary is None:
            context = PagedDecode(self.pool, state, self.scales)
            return forward_hidden(self.model, state.tokens, state.positions.long(), context)
        decoder = self.model.get_decoder()
        residual = F.embedding(state.tokens, decoder.embed_tokens.weight)
        change: Tensor | None = None
        for layer in layers:
            if change is None:
                normed = rms_norm(residual, layer.input_norm.weight, layer.input_norm.eps)
            else:
                normed, residual = add_rms_norm(change, residual, layer.input_norm.weight, layer.input_norm.eps)
            attended = self.attend(layer, normed, state)
            change = F.linear(attended, layer.o_weight, layer.o_bias)
            normed, residual = add_rms_norm(change, residual, layer.post_norm.weight, layer.post_norm.eps)
            change = F.linear(silu_mul(F.linear(normed, layer.gate_up_weight)), layer.down_weight)
        assert change is not None
        return add_rms_norm(change, residual, *norm_parameters(decoder.norm))[0]

    def attend(self, layer: FusedLayer, normed: Tensor, state: SlotState) -> Tensor:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        keys, values = self.pool.keys_and_values(layer.index)
        return paged_decode(
            F.linear(normed, layer.qkv_weight, layer.qkv_bias),
            keys,
            values,
            state.positions,
            state.table,
            scale=layer.scaling,
            rotary=self.rotary,
            norms=None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight),
            eps=0.0 if q_norm is None else q_norm.eps,
            splits=num_splits(len(normed), layer.num_kv_heads),
        )


class PagedDecode:
    """Attention context for models that are not fused: one new token in each slot."""

    def __init__(self, pool: PagePool, state: SlotState, scales: dict[int, float]) -> None:
        self.pool, self.state, self.scales = pool, state, scales

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.pool.keys_and_values(layer)
        qkv = torch.cat([tensor[0].transpose(0, 1).flatten(1) for tensor in (query, key, value)], dim=1)
        output = paged_decode(
            qkv,
            keys,
            values,
            self.state.positions,
            self.state.table,
            scale=self.scales[layer],
            splits=num_splits(len(qkv), keys.shape[1]),
        )
        return output.view(len(qkv), -1, query.shape[3]).transpose(0, 1)[None]


def waits_for_device(work: Callable[[], Any]) -> bool:
    """Whether `work` was broken off because the host would have had to wait."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        return False
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def num_splits(sequences: int, kv_heads: int) -> int:
    """One of few: a kernel is compiled for each."""
    programs = sequences * kv_heads
    return next((splits for splits in (1, 4) if splits * programs >= PROGRAMS), 32)


def rotary_tables(model: Any, length: int) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) [positions, width], as the model itself computes them. None: it has none that hold for every length,
    or that turn whole heads."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return None
    parameter = next(model.parameters())
    with torch.no_grad():
        cos, sin = rotary(parameter.new_empty(1, 1, 1), torch.arange(length, device=parameter.device)[None])
    layers = fused_layers(model)
    if layers is None or cos.shape[-1] != layers[0].head_width:
        return None
    return cos[0].contiguous(), sin[0].contiguous()
