"""Chunked log-probs and entropy against the obvious computation."""

import pytest
import torch
from tiny import DEVICE

from corral.model.logprobs import head_logprobs


def case(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype)
    bias = torch.randn(11, generator=generator, dtype=dtype)
    rows = torch.tensor([0, 1, 1, 1, 3, 4, 6, 6])
    targets = torch.tensor([2, 0, 10, 10, 5, 5, 1, 2])
    return tuple(tensor.to(DEVICE) for tensor in (hidden, weight, bias, rows, targets))


def obvious(hidden, weight, bias, rows, targets, temperature):  # type: ignore[no-untyped-def]
    log_p = ((hidden @ weight.T + (0 if bias is None else bias)) / temperature).log_softmax(-1)
    return log_p[rows, targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_do_not_depend_on_the_chunk(chunk: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, rows, targets = case(torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    used_bias = bias if with_bias else None
    upstream = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (8, 7)]
    results = []
    for compute in (
        lambda: head_logprobs(hidden, weight, used_bias, rows, targets, temperature=temperature, chunk=chunk),
        lambda: obvious(hidden, weight, used_bias, rows, targets, temperature),
    ):
        logprobs, entropy = compute()
        (logprobs * upstream[0]).sum().add((entropy * upstream[1]).sum()).backward()
        results.append([logprobs.detach(), entropy.detach(), *(t.grad for t in inputs if t.grad is not None)])
        for tensor in inputs:
            tensor.grad = None
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_log_probs_of_all_targets_of_a_row_sum_to_one() -> None:
    hidden, weight, bias, _, _ = case(torch.float32)
    rows, targets = torch.zeros(11, dtype=torch.long, device=DEVICE), torch.arange(11, device=DEVICE)
    logprobs, _ = head_logprobs(hidden, weight, bias, rows, targets, temperature=1.3, chunk=2)
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
