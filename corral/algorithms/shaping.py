"""What happens to rewards before they become advantages, and to groups whose rewards have no variance."""

import torch
from torch import Tensor

from corral.algorithms import ragged


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """[N]: soft penalty on length, to be added to rewards (DAPO, Yu et al., 2025, arXiv 2503.14476).

    0 up to `max_tokens - buffer_tokens` generated tokens, from there falling linearly to `-penalty` at `max_tokens`.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"the buffer of {buffer_tokens} tokens must be within 1 and the limit of {max_tokens} tokens")
    excess = lengths - (max_tokens - buffer_tokens)
    return -penalty * (excess / buffer_tokens).clamp(0, 1)


def clipped_rewards(token_rewards: Tensor, mask: Tensor, offsets: Tensor, bound: float) -> Tensor:
    """[T]: each trajectory's rewards, scaled such that their sum is within [-bound, bound].

    In float64, and a lone reward becomes the bound itself: rewards that are clipped to the same number must have no
    spread, since GRPO divides by it.
    """
    totals = ragged.segment_sum(token_rewards.double(), mask, offsets)
    is_beyond = ragged.expand(totals.abs() > bound, offsets)
    fractions = token_rewards.double() / ragged.expand(totals.abs(), offsets)
    return torch.where(is_beyond, fractions * bound, token_rewards.double())


def informative_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[N] bool: whether the rewards in the trajectory's group differ. If not, every advantage is 0.

    DAPO's dynamic sampling (arXiv 2503.14476) drops the others; a group of one is among them.
    """
    return ragged.group_range(rewards, torch.ones_like(groups, dtype=torch.bool), groups) > 0
