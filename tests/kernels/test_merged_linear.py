"""One product for several projections, and the check that their weights lie next to each other."""

import pytest
import torch
from compare import random
from torch import Tensor, nn

from corral.kernels.merged_linear import adjacent, merged_linear


def projections(device: torch.device, apart: bool) -> list[Tensor]:
    """x, then weights and biases of 3, 1 and 2 outputs."""
    weights = random(6, 4, seed=1, dtype=torch.float32, device=device).split([3, 1, 2])
    biases = random(6, seed=2, dtype=torch.float32, device=device).split([3, 1, 2])
    x = random(5, 4, seed=0, dtype=torch.float32, device=device)
    return [x, *(tensor.clone() if apart else tensor for tensor in (*weights, *biases))]


def separate(x: Tensor, *parameters: Tensor) -> Tensor:
    pairs = zip(parameters[:3], parameters[3:], strict=True)
    return torch.cat([x @ weight.T + bias for weight, bias in pairs], dim=-1)


@pytest.mark.parametrize("apart", [False, True], ids=["adjacent", "apart"])
def test_each_projection_gets_its_own_gradient(apart: bool, device: torch.device) -> None:
    inputs = projections(device, apart)
    x, parameters = inputs[0], [nn.Parameter(tensor) for tensor in inputs[1:]]
    assert (adjacent(parameters[:3]) is None) == apart
    output = merged_linear(x.requires_grad_(), parameters[:3], parameters[3:])
    upstream = random(5, 6, seed=3, dtype=torch.float32, device=device)
    gradients = torch.autograd.grad(output, [x, *parameters], upstream)
    expected = torch.autograd.grad(separate(x, *parameters), [x, *parameters], upstream)
    torch.testing.assert_close(output, separate(x, *parameters))
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_frozen_weights_get_no_gradient(device: torch.device) -> None:
    x, *parameters = projections(device, apart=False)
    merged_linear(x.requires_grad_(), parameters[:3]).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in parameters)


def test_adjacent_tensors_are_one_view() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    view = adjacent([nn.Parameter(part) for part in whole.split([3, 1, 2])])
    assert view is not None
    assert torch.equal(view, whole)
    assert view.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(6, 4)[:2], torch.zeros(6, 4)[2:]],
        list(reversed(torch.zeros(6, 4).split(3))),
        list(torch.zeros(6, 4).split([2, 1, 3])[::2]),
        list(torch.zeros(4, 6).split(3, dim=1)),
        [part.T for part in torch.zeros(4, 4).split(2)],
    ],
    ids=["two storages", "wrong order", "a gap", "columns", "transposed"],
)
def test_other_tensors_are_not_adjacent(tensors: list[Tensor]) -> None:
    assert adjacent(tensors) is None
