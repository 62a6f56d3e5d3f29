"""Drawing tokens. The logits are read once, in tiles; then a program for each draw picks the tile that its point on the
CDF falls into, and reads that one again to find the token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192


@triton.jit
def _summarise(logits, temperatures, highest, sums, likeliest, vocabulary, tiles, TILE: tl.constexpr):
    """Of each tile of a row: the highest logit, where it is, and the sum of exp(logit - highest)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    x = x / temperature
    top, place = tl.max(x, 0, return_indices=True)
    total = tl.sum(tl.where(top == -float("inf"), 0.0, tl.exp(x - top)), 0)
    tl.store(highest + row * tiles + tile, top)
    tl.store(sums + row * tiles + tile, total)
    tl.store(likeliest + row * tiles + tile, tile * TILE + place)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _pick(
    logits, rows, temperatures, seeds, counters, highest, sums, likeliest, tokens, logprobs, vocabulary, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(0)
    row = tl.load(rows + draw).to(tl.int64)
    temperature = tl.load(temperatures + row)
    index = tl.arange(0, TILES)
    known = index < tiles
    tops = tl.load(highest + row * tiles + index, mask=known, other=-float("inf"))
    top, best = tl.max(tops, 0, return_indices=True)
    weights = tl.load(sums + row * tiles + index, mask=known, other=0.0) * tl.exp(tops - top)
    total = tl.sum(weights, 0)
    z = _mix(tl.load(seeds + draw).to(tl.uint64)) + (tl.load(counters + draw).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    point = (_mix(z) >> 41).to(tl.float32) * (1.0 / 8388608) * total
    ends = tl.cumsum(weights, 0)
    # Rounding may put a point behind everything: then it belongs to the last tile, and token, with any probability.
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    tile = tl.minimum(tl.sum((ends <= point).to(tl.int32), 0), last)
    before = tl.sum(tl.where(index < tile, weights, 0.0), 0)
    scale = tl.where(temperature > 0, temperature, 1.0)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    p = tl.exp(x / scale - top)
    places = tl.arange(0, TILE)
    last_place = tl.max(tl.where(p > 0, places, 0), 0)
    place = tl.minimum(tl.sum((before + tl.cumsum(p, 0) <= point).to(tl.int32), 0), last_place)
    token = tile * TILE + place
    if temperature == 0:
        token = tl.load(likeliest + row * tiles + best)
    chosen = tl.load(logits + row * vocabulary + token).to(tl.float32) / scale
    tl.store(tokens + draw, token.to(tl.int64))
    tl.store(logprobs + draw, chosen - top - tl.log(total))


def draw_in_tiles(
    logits: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """As `corral.kernels.draw.draw`, without truncation."""
    num_rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    highest, sums = torch.empty(2, num_rows, tiles, dtype=torch.float32, device=logits.device)
    likeliest = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    _summarise[(num_rows, tiles)](
        logits, temperatures, highest, sums, likeliest, vocabulary, tiles, TILE=TILE, num_warps=8
    )
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    _pick[(len(rows),)](
        logits, rows, temperatures, seeds, counters, highest, sums, likeliest, tokens, logprobs, vocabulary, tiles,
        TILE=TILE, TILES=triton.next_power_of_2(tiles), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
