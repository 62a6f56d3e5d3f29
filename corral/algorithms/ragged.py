"""Sums, means and other reductions over ragged batches: per sequence, per group of sequences, per turn.

Everything that takes a mask reads masked-out entries as absent: they are not multiplied by 0 (NaN would survive that)
but replaced, and get no gradient. A sum over nothing is 0, and so is a mean over nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor
else:

    class _LazyTorch:
        """`torch`, imported when one of its functions is first called. Declarations stand beside the functions that
        they declare, and whoever reads a recipe reads declarations. Importing torch takes seconds, which `corral plan`
        and the processes that run reward functions should not spend."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module("torch"), name)
            setattr(self, name, found)  # the next access does not come here
            return found

    torch = _LazyTorch()


def shape_of(found: Any) -> str:
    """What a user's function returned, in words: `one number`, `a tensor of shape [4, 2]`."""
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    return f"a tensor of shape {list(found.shape)}" if found.dim() else "one number"


def only(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is True, 0 elsewhere, whatever stood there."""
    return values.masked_fill(~mask, 0)


# Per sequence: offsets [N + 1] cut [T] into N segments.


def segment_ids(offsets: Tensor) -> Tensor:
    """[T]: which sequence each token belongs to."""
    return expand(torch.arange(len(offsets) - 1, device=offsets.device), offsets)


def expand(per_sequence: Tensor, offsets: Tensor) -> Tensor:
    """[N] -> [T]: every token gets its sequence's value."""
    return torch.repeat_interleave(per_sequence, offsets.diff())


def segment_count(mask: Tensor, offsets: Tensor) -> Tensor:
    """[N]: how many of each sequence's tokens are in the mask."""
    return _running_count(mask)[offsets].diff()


def segment_sum(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[N]: sum over each sequence's masked tokens. Unlike `index_add`, adds in one order on every device."""
    return torch.segment_reduce(only(values, mask), "sum", offsets=offsets)


def segment_mean(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[N]: mean over each sequence's masked tokens; 0 for a sequence that has none."""
    return segment_sum(values, mask, offsets) / segment_count(mask, offsets).clamp(min=1)


# Along a sequence: these take the masked tokens alone, which `compact` picks out.


def compact(mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Where the masked tokens are, and the offsets of the batch that consists of them only."""
    return mask.nonzero().squeeze(1), _running_count(mask)[offsets]


def shift_left(values: Tensor, offsets: Tensor) -> Tensor:
    """[T]: each token gets its successor's value, a sequence's last token 0."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[offsets[1:][offsets.diff() > 0] - 1] = 0
    return shifted


def discounted_suffix_sums(values: Tensor, offsets: Tensor, discount: float) -> Tensor:
    """[T]: `s_t = v_t + discount * s_{t+1}` within each sequence.

    Walks from the last token of all sequences at once to the first of the longest, so it takes as many steps as the
    longest sequence has tokens, and touches every token once.
    """
    lengths, order = offsets.diff().sort(descending=True)
    last = offsets[1:][order] - 1
    num_tokens = lengths.tolist()
    num_active = len(num_tokens)
    sums = torch.zeros_like(values)
    carried = values.new_zeros(num_active)
    for step in range(num_tokens[0] if num_tokens else 0):
        while num_tokens[num_active - 1] <= step:
            num_active -= 1
        position = last[:num_active] - step
        carried = values[position] + discount * carried[:num_active]
        sums[position] = carried
    return sums


def turn_ids(mask: Tensor, offsets: Tensor) -> Tensor:
    """[T]: the number of the turn a masked token is in, counted from 0 through the batch; -1 on other tokens.

    A turn is an unbroken run of masked tokens of one sequence.
    """
    follows = torch.zeros_like(mask)
    follows[1:] = mask[:-1]
    follows[offsets[:-1][offsets.diff() > 0]] = False
    return ((mask & ~follows).cumsum(0) - 1).masked_fill(~mask, -1)


# Per group: `groups` [N] numbers the prompts. `present` [N] says which sequences count. Every sequence, also one that
# does not count, gets its group's number. In float64: a group of equal rewards must have a spread of exactly 0, since
# GRPO divides by that spread.


def group_count(present: Tensor, groups: Tensor) -> Tensor:
    """[N]: how many sequences of the group count."""
    return group_sum(torch.ones_like(present, dtype=torch.float64), present, groups)


def group_sum(values: Tensor, present: Tensor, groups: Tensor) -> Tensor:
    index = _group_index(groups)
    sums = torch.zeros(len(groups), dtype=torch.float64, device=values.device)
    return sums.index_add(0, index, only(values.double(), present))[index]


def group_mean(values: Tensor, present: Tensor, groups: Tensor) -> Tensor:
    return group_sum(values, present, groups) / group_count(present, groups).clamp(min=1)


def group_std(values: Tensor, present: Tensor, groups: Tensor) -> Tensor:
    """Bessel-corrected (n - 1); 0 for a group of one."""
    deviations = values.double() - group_mean(values, present, groups)
    freedom = (group_count(present, groups) - 1).clamp(min=1)
    return (group_sum(deviations.square(), present, groups) / freedom).sqrt()


def group_range(values: Tensor, present: Tensor, groups: Tensor) -> Tensor:
    """The group's largest value minus its smallest, exact: 0 if and only if all are equal."""
    index = _group_index(groups)
    values, index_present = values.double()[present], index[present]
    start = torch.zeros(len(groups), dtype=torch.float64, device=values.device)
    largest = start.scatter_reduce(0, index_present, values, "amax", include_self=False)
    smallest = start.scatter_reduce(0, index_present, values, "amin", include_self=False)
    return (largest - smallest)[index]


# Over the whole batch.


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T]: `(v - mean) / sqrt(variance + 1e-8)` over the masked tokens, Bessel-corrected; 0 elsewhere."""
    chosen = values[mask]
    if len(chosen) < 2:
        raise ValueError(
            f"whitening needs at least 2 generated tokens in the batch, this one has {len(chosen)}; "
            "use more prompts or samples per step, or an advantage that does not whiten (such as dr_grpo)"
        )
    return only((values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), mask)


def whiten_parts(values: Tensor, mask: Tensor, parts: Tensor) -> Tensor:
    """[T]: each part whitened by itself. `parts` [T] numbers them; 0 where a part has a single masked token."""
    found = torch.zeros_like(values)
    for part in parts[mask].unique():
        own = mask & (parts == part)
        found += whiten(values, own) if int(own.sum()) > 1 else 0
    return found


def _running_count(mask: Tensor) -> Tensor:
    """[T + 1]: how many masked tokens stand before each position."""
    return torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))


def _group_index(groups: Tensor) -> Tensor:
    """Any group numbers -> 0, 1, 2, ..."""
    index: Tensor = torch.unique(groups, return_inverse=True)[1]
    return index
