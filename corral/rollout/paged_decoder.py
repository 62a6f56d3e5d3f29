"""One decode step of every sequence: the model's own layers over the paged cache, and sampling, as a CUDA graph.

A decode step of a small batch is hundreds of tiny kernels, and launching them one by one takes the host longer than the
device takes to run them. A graph is captured the first time that as many sequences are decoded, for the next larger of
a few batch sizes, and replayed from then on. It has the addresses of what it computes with (weights, cache, state), so
these stay where they are and only their content changes; and nothing in it may wait for the host. A model that needs
the host within a step (mixtures of experts in float32 do) is computed kernel by kernel.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.kernels.paged_attention import PAGE, paged_decode
from corral.kernels.rms_norm import add_rms_norm, rms_norm
from corral.kernels.sampling import Truncation, sample_tokens
from corral.kernels.swiglu import silu_mul
from corral.model.attention import AttentionKernel, forward_hidden
from corral.model.fused_layers import FusedLayer, fused_layers, norm_parameters
from corral.model.logprobs import OutputHead
from corral.rollout.paged_kv_cache import PagePool

PROGRAMS = 132
"""Programs that keep the multiprocessors of a large GPU busy. With fewer (sequences times kv heads), each sequence's
keys are split over several programs (split-K, as in flash-decoding)."""


@dataclass(frozen=True)
class SlotState:
    """What the device knows of the sequences it decodes: a row for each slot. The host writes a row when a sequence
    gets the slot; from then on the device counts by itself, and the host reads only the sampled tokens."""

    tokens: Tensor
    """int64: sampled last, its keys and values not computed yet."""
    positions: Tensor
    """int32: position of that token."""
    seeds: Tensor
    counters: Tensor
    """int32: number of tokens sampled so far; with the seed, it determines the random number of the next one."""
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    page_table: Tensor
    """[slots, pages], int32; 0 behind a sequence's pages, and in free slots."""

    @classmethod
    def empty(cls, num_slots: int, num_pages: int, device: torch.device) -> "SlotState":
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        whole, real = torch.int64, torch.float32
        return cls(
            tokens=zeros(whole),
            positions=zeros(torch.int32),
            seeds=zeros(whole),
            counters=zeros(torch.int32),
            temperatures=zeros(real) + 1,
            top_k=zeros(whole),
            top_p=zeros(real) + 1,
            min_p=zeros(real),
            page_table=zeros(torch.int32, num_pages),
        )

    def first(self, count: int) -> "SlotState":
        """The first slots, as views of the same memory."""
        return SlotState(*(getattr(self, f.name)[:count] for f in fields(self)))

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_k, self.top_p, self.min_p)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows into other slots, but for the page table, which the host writes."""
        for f in fields(self):
            if f.name != "page_table":
                tensor = getattr(self, f.name)
                tensor[targets] = tensor[sources]


def batch_size(count: int, most: int) -> int:
    """Batch size of the graph that decodes `count` sequences. Up to 128 a step takes as long as reading the weights, so
    powers of two are enough; above, padding costs time."""
    if count <= 128:
        return min(1 << (count - 1).bit_length(), most)
    step = 64 if count <= 512 else 128
    return min(-(-count // step) * step, most)


class PagedDecoder:
    def __init__(self, model: Any, pool: PagePool, state: SlotState, max_steps: int) -> None:
        self.model, self.pool, self.state, self.address = model, pool, state, pool.address
        num_slots, num_pages = state.page_table.shape
        device = pool.device
        self.sampled_tokens = torch.zeros(max_steps, num_slots, dtype=torch.int64, device=device)
        self.sampled_logprobs = torch.zeros(max_steps, num_slots, dtype=torch.float32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """Row of the sampled tokens that the next step writes: a graph cannot take it as an argument."""
        self.rows = torch.arange(num_slots, device=device)
        self.last_position = num_pages * PAGE - 1
        self.head = OutputHead.of_model(model)
        self.rotary = rotary_tables(model, num_pages * PAGE)
        self.graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self.graph_memory: Any = None
        """Memory pool of all graphs, which never run at the same time."""
        self.addresses: tuple[int, ...] = ()
        self.needs_host: bool | None = None
        """Whether a step waits for the host, so that it cannot be captured. None: not yet known."""

    def run(self, count: int, steps: int, truncates: bool) -> tuple[Tensor, Tensor]:
        """Samples `steps` tokens for the first `count` slots. -> (tokens, log-probs) [steps, count], valid until the
        next run"""
        size = batch_size(count, len(self.rows))
        self.cursor.zero_()
        step = self._graph(size, truncates) if self.pool.device.type == "cuda" else lambda: self._step(size, truncates)
        for _ in range(steps):
            step()
        return self.sampled_tokens[:steps, :count], self.sampled_logprobs[:steps, :count]

    def _graph(self, size: int, truncates: bool) -> Callable[[], None]:
        # Sharded training may move parameters: then the graphs would read freed memory.
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if addresses != self.addresses:
            self.graphs.clear()
            self.graph_memory = None  # it is freed with the last of them
            self.addresses = addresses
        if (size, truncates) not in self.graphs:
            self.graphs[size, truncates] = self._capture(size, truncates)
        return self.graphs[size, truncates]

    def _capture(self, size: int, truncates: bool) -> Callable[[], None]:
        self._warm_up(size, truncates)
        if self.needs_host:
            return partial(self._step, size, truncates)
        graph = torch.cuda.CUDAGraph()
        # By default a capture forbids "unsafe" calls (allocations, synchronization) in all threads of the process; a
        # trainer in another thread goes on with them.
        with torch.cuda.graph(graph, pool=self.graph_memory, capture_error_mode="thread_local"):
            self._step(size, truncates)
        self.graph_memory = graph.pool()
        return graph.replay

    def _warm_up(self, size: int, truncates: bool) -> None:
        """A step on empty slots of its own: compiling kernels and allocating workspaces cannot be captured."""
        slots = SlotState.empty(size, self.state.page_table.shape[1], self.pool.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if self.needs_host is None:  # once, before training starts: the mode is of the whole process
                self.needs_host = waits_for_device(lambda: self._sample(self._hidden(slots), slots, truncates))
            elif not self.needs_host:
                self._sample(self._hidden(slots), slots, truncates)
        torch.cuda.current_stream().wait_stream(stream)

    def _step(self, size: int, truncates: bool) -> None:
        state = self.state.first(size)
        tokens, logprobs = self._sample(self._hidden(state), state, truncates)
        state.tokens.copy_(tokens)
        self.sampled_tokens[:, :size].index_copy_(0, self.cursor, tokens[None])
        self.sampled_logprobs[:, :size].index_copy_(0, self.cursor, logprobs[None])
        state.positions.add_(1).clamp_(max=self.last_position)
        state.counters.add_(1)
        self.cursor.add_(1)

    def _sample(self, hidden: Tensor, state: SlotState, truncates: bool) -> tuple[Tensor, Tensor]:
        return sample_tokens(
            self.head.logits(hidden),
            self.rows[: len(hidden)],
            state.temperatures,
            state.seeds,
            state.counters,
            state.truncation if truncates else None,
        )

    def _hidden(self, state: SlotState) -> Tensor:
        """[slots, width], hidden state of each slot's new token."""
        layers = fused_layers(self.model)
        if layers is None or self.rotary is None or layers[0].head_width != self.pool.shape.width:
            context = PagedDecodeAttention(self.pool, state)
            return forward_hidden(self.model, state.tokens, state.positions.long(), context)
        decoder = self.model.get_decoder()
        residual = F.embedding(state.tokens, decoder.embed_tokens.weight)
        change: Tensor | None = None
        for layer in layers:
            if change is None:
                normed = rms_norm(residual, layer.input_norm.weight, layer.input_norm.eps)
            else:
                normed, residual = add_rms_norm(change, residual, layer.input_norm.weight, layer.input_norm.eps)
            attended = self._attend(layer, normed, state)
            change = layer.project_output(attended)
            normed, residual = add_rms_norm(change, residual, layer.post_norm.weight, layer.post_norm.eps)
            change = layer.project_down(silu_mul(layer.project_gate_up(normed)))
        assert change is not None
        return add_rms_norm(change, residual, *norm_parameters(decoder.norm))[0]

    def _attend(self, layer: FusedLayer, normed: Tensor, state: SlotState) -> Tensor:
        q_norm, k_norm = layer.q_norm, layer.k_norm
        keys, values = self.pool.keys_and_values(layer.index)
        return paged_decode(
            layer.project_qkv(normed),
            keys,
            values,
            state.positions,
            state.page_table,
            scale=layer.scaling,
            rotary=self.rotary,
            norms=None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight),
            eps=0.0 if q_norm is None else q_norm.eps,
            splits=num_splits(len(normed), layer.num_kv_heads),
            window=layer.window,
        )


class PagedDecodeAttention:
    """Attention context for models that are not fused: one new token in each slot."""

    def __init__(self, pool: PagePool, state: SlotState) -> None:
        self.pool, self.state = pool, state

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.pool.keys_and_values(layer)
        padded = (self.pool.padded(tensor[0]) for tensor in (query, key, value))
        qkv = torch.cat([tensor.transpose(0, 1).flatten(1) for tensor in padded], dim=1)
        output = paged_decode(
            qkv,
            keys,
            values,
            self.state.positions,
            self.state.page_table,
            scale=kernel.scale_of(query),
            splits=num_splits(len(qkv), keys.shape[1]),
            window=kernel.window,
            sinks=kernel.sinks,
        )
        return output.view(len(qkv), query.shape[1], -1)[..., : value.shape[3]].transpose(0, 1)[None]


def waits_for_device(work: Callable[[], Any]) -> bool:
    """Whether `work` makes the host wait for the device; it is broken off there."""
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
    """Number of programs for each sequence and kv head: one of few values, since a kernel is compiled for each."""
    programs = sequences * kv_heads
    return next((splits for splits in (1, 4) if splits * programs >= PROGRAMS), 32)


def rotary_tables(model: Any, length: int) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) [positions, width], as the model itself computes them. None: it has none that hold for every length,
    or that turn whole heads."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        return None
    layers = fused_layers(model)
    if layers is None:
        return None
    parameter = next(model.parameters())
    with torch.no_grad():
        cos, sin = rotary(parameter.new_empty(1, 1, 1), torch.arange(length, device=parameter.device)[None])
    if cos.shape[-1] != layers[0].head_width:
        return None
    return cos[0].contiguous(), sin[0].contiguous()
