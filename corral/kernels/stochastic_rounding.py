"""Rounding to bfloat16 that is right on average.

A second moment with beta 0.999 moves by a thousandth of its size in an update at most, while it falls; bfloat16 has
steps of 1/256 to 1/128. Rounded to the nearest, it would stay where it is for good. Rounded up or down at random, with
the nearer one likelier in proportion, it moves by the right amount in the mean.

The random bits are a hash of the number, of another one that belongs to it (its weight; equal moments are common, and
would all be rounded alike), and of how often its parameter was updated. So there is no generator to save, and what is
rounded does not depend on where on which mesh it is, nor on a resume.
"""

import torch
from torch import Tensor


def round_to_bfloat16(values: Tensor, weights: Tensor, num_updates: Tensor) -> Tensor:
    """float32 -> bfloat16. `weights`: float32, one for each value. `num_updates`: one number."""
    bits = values.view(torch.int32)
    mixed = bits ^ (weights.view(torch.int32) * 0x2545F491 + num_updates.to(torch.int32) * 0x3C6EF372)
    # Three rounds of shift and multiply (after "lowbias32" of Wellons), in 32 bits that overflow; shifts of signed
    # numbers copy the sign, which is masked away.
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * 0x7FEB352D
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * 0x046CA68B
    mixed = mixed ^ ((mixed >> 16) & 0xFFFF)
    # The lower half of a float32 is what a bfloat16 has not: adding a random half carries as often as it is large.
    return ((bits + (mixed & 0xFFFF)) & -65536).view(torch.float32).bfloat16()
