"""Log-sum-exp and entropy of rows of logits, and the gradient of the logits, written over them."""

import torch
from torch import Tensor


def logsumexp_and_entropy(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[rows, vocabulary] -> (log-sum-exp, entropy) of logits / temperature, float32 [rows] each."""
    if logits.is_cuda:
        from corral.kernels.gpu import log_softmax_kernels

        return log_softmax_kernels.logsumexp_and_entropy(logits, temperature)
    scaled = logits.float() / temperature
    logsumexp = scaled.logsumexp(-1)
    return logsumexp, logsumexp - (scaled.softmax(-1) * scaled).sum(-1)


def overwrite_with_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    target_starts: Tensor,
    targets: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Replaces the logits by their gradient, given those of the targets' log-probs and of the rows' entropies.

    logsumexp, entropy, d_entropy [rows]; row r's targets are `targets[target_starts[r] : target_starts[r + 1]]`, and
    d_logprobs goes with them.
    """
    if logits.is_cuda:
        from corral.kernels.gpu import log_softmax_kernels

        log_softmax_kernels.overwrite_with_gradient(
            logits, logsumexp, entropy, target_starts, targets, d_logprobs, d_entropy, temperature
        )
        return
    log_p = logits.float() / temperature - logsumexp[:, None]
    rows = torch.repeat_interleave(target_starts.diff())
    sums = d_logprobs.new_zeros(len(logits)).index_add_(0, rows, d_logprobs)
    gradient = -log_p.exp() * sums[:, None]
    if d_entropy is not None:
        gradient -= d_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
    gradient.index_put_((rows, targets), d_logprobs, accumulate=True)
    logits.copy_(gradient / temperature)
