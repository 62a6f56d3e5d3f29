"""Kernels against the same formula in float64: results and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.dtype == dtype or found.dtype == torch.float32
    assert found.shape == expected.shape, what
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < BOUNDS[dtype], f"{what}: {error:.2e}"


def check_function(ours: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Outputs, and gradients of all inputs under random gradients of all outputs."""
    dtype = inputs[0].dtype
    results = []
    for compute, kind in ((ours, dtype), (plain, torch.float64)):
        leaves = [tensor.detach().to(kind).requires_grad_() for tensor in inputs]
        outputs = compute(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [
            random(*output.shape, seed=99 + n, dtype=dtype, device=output.device) for n, output in enumerate(outputs)
        ]
        gradients = torch.autograd.grad(
            outputs, leaves, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)]
        )
        results.append([*outputs, *gradients])
    names = [*(f"output {n}" for n in range(len(outputs))), *(f"gradient {n}" for n in range(len(inputs)))]
    for name, found, expected in zip(names, *results, strict=True):
        check(found, expected, dtype, name)
