"""Chunked log-probs and entropy against the obvious computation."""

from collections.abc import Callable

import pytest
import torch
from tiny import DEVICE

from corral.model.logprobs import HeadLogprobsInPlace, OutputHead


class Head:
    """A linear layer with given tensors."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias


def head_logprobs(hidden, weight, bias, rows, targets, temperature, chunk, scale=1.0, softcap=None):  # type: ignore[no-untyped-def]
    head = OutputHead(Head(weight, bias), scale, softcap)
    return head.logprobs(hidden, rows, targets, temperature=temperature, chunk=chunk)


def in_place(hidden, weight, bias, rows, targets, temperature, chunk):  # type: ignore[no-untyped-def]
    """As on a GPU, wherever the tensors are."""
    return HeadLogprobsInPlace.apply(hidden, weight, bias, rows, targets, temperature, chunk)


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


@pytest.mark.parametrize("compute", [head_logprobs, in_place])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_do_not_depend_on_the_chunk(
    chunk: int, temperature: float, with_bias: bool, compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> None:
    hidden, weight, bias, rows, targets = case(torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    used_bias = bias if with_bias else None
    upstream = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (8, 7)]
    results = []
    for way in (
        lambda: compute(hidden, weight, used_bias, rows, targets, temperature=temperature, chunk=chunk),
        lambda: obvious(hidden, weight, used_bias, rows, targets, temperature),
    ):
        logprobs, entropy = way()
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


@pytest.mark.parametrize("compute", [head_logprobs, in_place])
@pytest.mark.parametrize("used", [0, 1], ids=["log-probs", "entropy"])
def test_a_loss_may_use_only_one_of_the_two(
    used: int, compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> None:
    hidden, weight, bias, rows, targets = case(torch.float32)
    hidden.requires_grad_()
    gradients = [
        torch.autograd.grad(outputs[used].square().sum(), hidden)[0]
        for outputs in (
            compute(hidden, weight, bias, rows, targets, temperature=0.7, chunk=3),
            obvious(hidden, weight, bias, rows, targets, 0.7),
        )
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_second_backward_pass_gives_the_same_gradient(chunk: int) -> None:
    """The first one leaves nothing of the logits."""
    hidden, weight, bias, rows, targets = case(torch.float32)
    hidden.requires_grad_()
    loss = in_place(hidden, weight, bias, rows, targets, 0.7, chunk)[0].sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second)


def test_gradients_of_a_bfloat16_head_are_summed_over_chunks_without_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(DEVICE, torch.bfloat16) for n in (64, 32))
    rows, targets = torch.arange(64, device=DEVICE), (torch.arange(64) % 32).to(DEVICE)
    weight.requires_grad_()
    whole, chunked = (
        torch.autograd.grad(in_place(hidden, weight, None, rows, targets, 1.0, chunk)[0].sum(), weight)[0].float()
        for chunk in (64, 4)
    )
    assert (whole - chunked).norm() < 4e-3 * whole.norm()


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize(("scale", "softcap"), [(0.25, None), (1.0, 1.5), (2.0, 3.0)])
def test_scaled_and_capped_logits_are_those_of_the_formula(chunk: int, scale: float, softcap: float | None) -> None:
    hidden, weight, bias, rows, targets = case(torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    results = []
    for is_ours in (True, False):
        if is_ours:
            logprobs, entropy = head_logprobs(hidden, weight, bias, rows, targets, 0.7, chunk, scale, softcap)
        else:
            logits = (hidden @ weight.T + bias) * scale
            log_p = ((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7).log_softmax(-1)
            logprobs, entropy = log_p[rows, targets], -(log_p.exp() * log_p).sum(-1)
        (logprobs.sum() + 2 * entropy.sum()).backward()
        results.append([logprobs.detach(), entropy.detach(), *(tensor.grad for tensor in inputs)])
        for tensor in inputs:
            tensor.grad = None
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_soft_capped_logits_take_little_memory_of_a_gpu() -> None:
    hidden = torch.randn(8192, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(50_000, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    rows, targets = torch.arange(8192, device="cuda"), torch.zeros(8192, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = head_logprobs(hidden, weight, None, rows, targets, 1.0, 8192, 1.0, 30.0)
    logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * 1024 * 50_000 * 4
