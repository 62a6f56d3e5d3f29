"""Terms beside the policy loss."""

from torch import Tensor

from corral.algorithms import ragged


def llds(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[T]: penalty on good trajectories becoming less likely (lazy likelihood displacement suppression).

    Deng et al., 2025, "On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral", arXiv 2512.04220.
    For trajectories with an advantage of at least 0, turn by turn: if the turn as a whole became less likely than it
    was under the old policy, `max(0, log pi_old - log pi)` on each of its tokens, else nothing. On the first update
    after playing nothing has moved yet, and it is 0. The paper weights it with 0.2.

    To normalise as the paper does (by the trajectory's tokens and the number of trajectories with an advantage of at
    least 0), aggregate with `seq_mean_token_mean` and let `num_sequences` be `num_preserved`'s sum over the update.
    """
    fall = ragged.only(old_logprobs, mask) - ragged.only(logprobs, mask)
    turns = ragged.turn_ids(mask, offsets)[mask]
    turn_falls = fall.new_zeros(len(mask)).index_add(0, turns, fall.detach()[mask])
    fell = mask.clone()
    fell[mask] = turn_falls[turns] > 0
    preserved = ragged.expand(_preserved(advantages, mask, offsets), offsets)
    return ragged.only(fall.clamp(min=0), fell & preserved)


def num_preserved(advantages: Tensor, mask: Tensor, offsets: Tensor) -> int:
    """How many trajectories `llds` looks after."""
    return int(_preserved(advantages, mask, offsets).sum())


def _preserved(advantages: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[N]: generated something, with a mean advantage of at least 0."""
    played = ragged.segment_count(mask, offsets) > 0
    return played & (ragged.segment_sum(advantages, mask, offsets) >= 0)
