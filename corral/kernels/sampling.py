"""Token sampling: seeded by request, on the device, with the log-probability of each sampled token.

A token is a function of the logits, the request's seed and the token's place in the response, by inverse CDF: the same
on every device but for rounding, whatever the request is batched with. torch.multinomial has one generator for a whole
batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from corral.recipe.schema import SORTED_ROWS

GOLDEN_GAMMA, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's constants


@dataclass(frozen=True)
class Truncation:
    """Top-k, top-p and min-p of each row of logits; 0, 1 and 0 switch them off."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    counters: Tensor,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample i comes from row `rows[i]` of the logits [rows, vocabulary], at the row's temperature (0: greedy).

    -> (tokens, their log-probs at that temperature (at 1 where it is 0) before truncation, in float32).
    """
    if logits.is_cuda:
        from corral.kernels.gpu.sampling_kernels import sample_in_tiles

        if truncation is None:
            return sample_in_tiles(logits, rows, temperatures, seeds, counters)
    scaled = scale_logits(logits.float(), temperatures)
    allowed = scaled if truncation is None else truncate_logits(scaled, truncation)
    if logits.is_cuda:
        tokens, _ = sample_in_tiles(allowed, rows, (temperatures > 0).float(), seeds, counters)
    else:
        tokens = sample_by_inverse_cdf(allowed, rows, uniform(seeds, counters), temperatures == 0)
    return tokens, scaled[rows, tokens] - scaled.logsumexp(-1)[rows]


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """A number in (0, 1) for each (seed, counter), by splitmix64, which needs no state.

    23 bits, one fewer than float32 holds below 1: the largest number times the sum of a row's weights is then never
    rounded up to that sum, behind which there is no token. Instead of 0 it is half of the next number: at 0 the first
    token begins, so that it would be sampled once in 2^23 times however unlikely it is.
    """
    z = _splitmix64(_splitmix64(seeds) + (counters.long() + 1) * GOLDEN_GAMMA)
    return _shift_right(z, 41).to(torch.float32).clamp(min=0.5) * 2.0**-23


def _splitmix64(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64's own keeps the sign, and torch has no uint64 arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def scale_logits(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Greedy rows (temperature 0) are left at temperature 1, for their log-probabilities."""
    return logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]


def truncate_logits(logits: Tensor, truncation: Truncation) -> Tensor:
    """Tokens outside top-k, top-p or min-p get -inf.

    top-p keeps the smallest set of most likely tokens whose probability reaches p of what top-k left, as transformers
    and vLLM do it, and always the most likely one.
    """
    columns = (logits, truncation.top_k, truncation.top_p, truncation.min_p)
    parts = zip(*(column.split(SORTED_ROWS) for column in columns), strict=True)
    smallest = torch.cat([smallest_kept(*part) for part in parts])
    return logits.masked_fill(logits < smallest, -torch.inf)


def smallest_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows, 1]. Sorting takes ten times the memory of the logits, so it is done for a few rows at a time."""
    ordered, _ = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    probability = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    keep &= before < top_p[:, None]
    keep &= probability >= min_p[:, None] * probability[:, :1]
    keep[:, 0] = True
    return torch.where(keep, ordered, torch.inf).min(-1, keepdim=True).values


def sample_by_inverse_cdf(logits: Tensor, rows: Tensor, uniforms: Tensor, greedy: Tensor) -> Tensor:
    """One token for each sample: from row `rows[i]` of the logits, by inverse CDF, or the argmax where greedy[row].

    Samples of the same row share its CDF: their points are put into one row of a rectangle, for searchsorted. (On a CPU
    this is many times faster than torch.multinomial.)
    """
    cdf = logits.softmax(-1).cumsum(-1)
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows, minlength=len(logits))
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
    points = uniforms.new_zeros(len(logits), int(counts.max()))
    points[rows[order], column] = uniforms[order]
    sampled = torch.searchsorted(cdf, points * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.empty_like(rows)
    tokens[order] = sampled[rows[order], column]
    return torch.where(greedy[rows], logits.argmax(-1)[rows], tokens) if greedy.any() else tokens
