"""Log-sum-exp, entropy and the gradient of logits in Triton against float64."""

import pytest
import torch
from compare import DTYPES, check, random

pytest.importorskip("triton")

from corral.kernels.gpu import log_softmax_kernels as gpu
from corral.kernels.log_softmax import logsumexp_and_entropy, overwrite_with_gradient

CASES = [(50, 64), (100, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "block"), CASES, ids=["one block", "several blocks"])
def test_log_sum_exp_and_entropy_of_rows(
    vocabulary: int, block: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "BLOCK_SIZE", block)
    logits = 5 * random(4, vocabulary, seed=0, dtype=dtype, device=device)
    log_p = (logits.double() / 0.7).log_softmax(-1)
    logsumexp, entropy = gpu.logsumexp_and_entropy(logits, 0.7)
    check(logsumexp, (logits.double() / 0.7).logsumexp(-1), torch.float32, "logsumexp")
    check(entropy, -(log_p.exp() * log_p).sum(-1), torch.float32, "entropy")
    for ours, plain in zip((logsumexp, entropy), logsumexp_and_entropy(logits.cpu(), 0.7), strict=True):
        check(ours.cpu(), plain, torch.float32, "plain")


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "block"), CASES, ids=["one block", "several blocks"])
def test_the_gradient_takes_the_place_of_the_logits(
    vocabulary: int,
    block: int,
    dtype: torch.dtype,
    with_entropy: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 1 has no target, row 2 has three of which two are equal."""
    monkeypatch.setattr(gpu, "BLOCK_SIZE", block)
    logits = 3 * random(4, vocabulary, seed=0, dtype=dtype, device=device)
    rows, targets = torch.tensor([0, 2, 2, 2, 3]), torch.tensor([1, 49, 3, 3, 0])
    starts = torch.tensor([0, 1, 1, 4, 5])
    d_logprobs, d_entropy = (random(n, seed=n, dtype=torch.float32, device=device) for n in (5, 4))
    leaf = logits.cpu().double().requires_grad_()
    log_p = (leaf / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (log_p[rows, targets] * d_logprobs.cpu()).sum()
    (loss + (entropy * d_entropy.cpu()).sum() if with_entropy else loss).backward()
    assert leaf.grad is not None
    logsumexp, entropies = gpu.logsumexp_and_entropy(logits, 0.7)
    for compute, place in ((gpu.overwrite_with_gradient, device), (overwrite_with_gradient, torch.device("cpu"))):
        found = logits.to(place, copy=True)
        upstream = (d_logprobs.to(place), d_entropy.to(place) if with_entropy else None)
        of_rows = (logsumexp.to(place), entropies.to(place), starts.to(place), targets.to(place))
        compute(found, *of_rows, *upstream, 0.7)
        check(found.cpu(), leaf.grad, dtype, "logits")
