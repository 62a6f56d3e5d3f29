"""Log-probabilities' normaliser and entropy of rows of logits, and the logits' gradient in their own memory."""

import torch
from torch import Tensor


def head_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[rows, vocabulary] -> (log of the sum of exponentials, entropy), float32 [rows], of logits / temperature."""
    if logits.is_cuda:
        from corral.kernels.gpu.logits import statistics

        return statistics(logits, temperature)
    scaled = logits.float() / temperature
    normaliser = scaled.logsumexp(-1)
    return normaliser, normaliser - (scaled.softmax(-1) * scaled).sum(-1)


def overwrite_with_gradient(
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    target_starts: Tensor,
    targets: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> None:
    """From the gradients of the targets' log-probs and of the rows' entropies to that of the logits, in place.

    normaliser, entropy, d_entropy [rows]; row r's targets are `targets[target_starts[r] : target_starts[r + 1]]`, and
    d_logprobs goes with them.
    """
    if logits.is_cuda:
        from corral.kernels.gpu import logits as gpu

        gpu.overwrite_with_gradient(
            logits, normaliser, entropy, target_starts, targets, d_logprobs, d_entropy, temperature
        )
        return
    log_p = logits.float() / temperature - normaliser[:, None]
    rows = torch.repeat_interleave(target_starts.diff())
    sums = d_logprobs.new_zeros(len(logits)).index_add_(0, rows, d_logprobs)
    gradient = -log_p.exp() * sums[:, None]
    if d_entropy is not None:
        gradient -= d_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
    gradient.index_put_((rows, targets), d_logprobs, accumulate=True)
    logits.copy_(gradient / temperature)
