"""Token sampling without sorting or copying the logits, by inverse CDF in two kernels.

The first reads the logits once and leaves a few numbers for each tile of the vocabulary. The second has a program for
each token to sample: from those numbers it finds the tile that its point on the CDF falls into, and reads that tile
alone again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_SIZE = 8192


# A program reads one tile (TILE logits) of one row, and stores its maximum m, the sum l of exp(logit - m), and the
# argmax: the partial softmax of flash-attention, from which the row's softmax follows without another pass. A whole row
# of 151,936 logits for one program would leave most of the GPU idle at small batches; tiles of 8192 make 19 programs of
# each row. In float32: bfloat16 sums over thousands of tokens stop growing once a term is smaller than 1/256 of them.
@triton.jit
def _tile_softmax_kernel(
    logits_ptr, temperatures_ptr, m_ptr, l_ptr, argmax_ptr, row_stride, vocab_size, num_tiles, TILE: tl.constexpr
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=-float("inf"))
    logit = logit.to(tl.float32) / temperature
    m, argmax = tl.max(logit, 0, return_indices=True)
    # A tile may be all -inf, after truncation: -inf - -inf is NaN.
    l = tl.sum(tl.where(m == -float("inf"), 0.0, tl.exp(logit - m)), 0)
    tl.store(m_ptr + row * num_tiles + tile, m)
    tl.store(l_ptr + row * num_tiles + tile, l)
    tl.store(argmax_ptr + row * num_tiles + tile, tile * TILE + argmax)


# The finalizer of splitmix64, bit for bit that of `corral.kernels.sampling.uniform`: the same request has the same
# random numbers on every device, whatever it is batched with. Triton's own generator (Philox) has no twin on the host.
@triton.jit
def _splitmix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


# A program samples one token. Several may read the same row (samples of one prompt), so rows are not computed again for
# each. NUM_TILES is `num_tiles` rounded up to a power of two, as Triton wants its ranges.
#
# Numerics: the CDF is summed tile by tile, then within the tile, all in float32 relative to the row's maximum. So a
# point within rounding of an edge between two tokens may go to the other one than on the host, which sums in another
# order.
@triton.jit
def _sample_kernel(
    logits_ptr, rows_ptr, temperatures_ptr, seeds_ptr, counters_ptr, m_ptr, l_ptr, argmax_ptr,
    tokens_ptr, logprobs_ptr, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    tiles = tl.arange(0, NUM_TILES)
    mask = tiles < num_tiles
    tile_m = tl.load(m_ptr + row * num_tiles + tiles, mask=mask, other=-float("inf"))
    m, best_tile = tl.max(tile_m, 0, return_indices=True)
    tile_l = tl.load(l_ptr + row * num_tiles + tiles, mask=mask, other=0.0) * tl.exp(tile_m - m)
    l = tl.sum(tile_l, 0)
    counter = tl.load(counters_ptr + sample).to(tl.uint64)
    z = _splitmix64(tl.load(seeds_ptr + sample).to(tl.uint64)) + (counter + 1) * 0x9E3779B97F4A7C15
    # 23 bits, and never 0: a uniform number in (0, 1), times l.
    point = tl.maximum((_splitmix64(z) >> 41).to(tl.float32), 0.5) * (1.0 / 8388608) * l
    tile_ends = tl.cumsum(tile_l, 0)
    # Rounding may put a point behind everything, or behind its tile's own sum: then it belongs to the last tile, and
    # token, with a weight that rounding does not swallow.
    last_tile = tl.max(tl.where(tile_l > l / 16777216, tiles, 0), 0)
    tile = tl.minimum(tl.sum((tile_ends <= point).to(tl.int32), 0), last_tile)
    before = tl.sum(tl.where(tiles < tile, tile_l, 0.0), 0)
    scale = tl.where(temperature > 0, temperature, 1.0)
    place = tl.arange(0, TILE)
    column = tile * TILE + place
    logit = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab_size, other=-float("inf"))
    p = tl.exp(logit.to(tl.float32) / scale - m)
    last_place = tl.max(tl.where(p > tl.sum(p, 0) / 16777216, place, 0), 0)
    chosen = tl.minimum(tl.sum((before + tl.cumsum(p, 0) <= point).to(tl.int32), 0), last_place)
    token = tile * TILE + chosen
    if temperature == 0:
        token = tl.load(argmax_ptr + row * num_tiles + best_tile)
    token_logit = tl.load(logits_ptr + row * row_stride + token).to(tl.float32) / scale
    tl.store(tokens_ptr + sample, token.to(tl.int64))
    tl.store(logprobs_ptr + sample, token_logit - m - tl.log(l))


def sample_in_tiles(
    logits: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes what `corral.kernels.sampling.sample_tokens` does, without truncation. The rows may be apart in memory,
    as the last ones of whole sequences are."""
    num_rows, vocab_size = logits.shape
    row_stride, column_stride = logits.stride()
    assert column_stride == 1
    num_tiles = triton.cdiv(vocab_size, TILE_SIZE)
    m, l = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    argmax = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    _tile_softmax_kernel[(num_rows, num_tiles)](
        logits, temperatures, m, l, argmax, row_stride, vocab_size, num_tiles, TILE=TILE_SIZE, num_warps=8
    )
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    _sample_kernel[(len(rows),)](
        logits, rows, temperatures, seeds, counters, m, l, argmax, tokens, logprobs, row_stride, vocab_size, num_tiles,
        TILE=TILE_SIZE, NUM_TILES=triton.next_power_of_2(num_tiles), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
