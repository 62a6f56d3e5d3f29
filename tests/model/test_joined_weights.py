"""A list of tensors behaves as the tensor that it would be in memory, and is not put together to be sliced."""

import pytest
import torch
from torch import Tensor

from corral.model.joined_weights import JoinedTensor, joining_later


def experts() -> tuple[JoinedTensor, Tensor]:
    """(as transformers makes it of a file's tensors, the same in memory): gate and up, stacked, in one tensor."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    sources = ["experts.*.gate.weight", "experts.*.up.weight"]
    parts = {source: [torch.randn(3, 5) for _ in range(4)] for source in sources}
    made = []
    for within in (True, False):
        converter = WeightConverter(sources, "experts.gate_up", [MergeModulelist(dim=0), Concatenate(dim=1)])
        converter.collected_tensors.update({source: list(tensors) for source, tensors in parts.items()})
        if within:
            with joining_later():
                made += converter.convert("experts.gate_up").values()
        else:
            made += converter.convert("experts.gate_up").values()
    joined, whole = made
    assert isinstance(joined, JoinedTensor)
    assert type(whole) is Tensor
    assert joined.shape == whole.shape == (4, 6, 5)
    return joined, whole


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[1:3],
        lambda t: t[3:7],
        lambda t: t[4:],
        lambda t: t.chunk(3)[1],
        lambda t: t.chunk(2, 1)[0].chunk(3, 1)[2],
        lambda t: t.chunk(2, -1)[1][:2],
        lambda t: torch.cat([half.chunk(3, 1)[1] for half in t.chunk(2, 1)], 1)[1:],
        lambda t: t.transpose(1, 2).contiguous()[:, 2:4],
        lambda t: torch.stack([t, t], 1)[1:, 0:1],
        lambda t: t.detach()[...],
    ],
)
def test_views_are_lists_of_views_of_the_parts(view, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    joined, whole = experts()
    with monkeypatch.context() as patch:
        patch.setattr(JoinedTensor, "read", lambda *_: pytest.fail("it was put together"))
        seen = view(joined)
        assert isinstance(seen, JoinedTensor)
        copy = torch.empty(seen.shape)
        copy.copy_(seen)
    torch.testing.assert_close(copy, view(whole), rtol=0, atol=0)
    torch.testing.assert_close(seen.to(torch.float64), view(whole).to(torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize(
    "compute", [lambda t: t * 2, lambda t: t[::2], lambda t: t.sum(), lambda t: torch.equal(t, t), lambda t: t[1]]
)
def test_other_operators_get_all_of_it(compute) -> None:  # type: ignore[no-untyped-def]
    joined, whole = experts()
    assert torch.equal(torch.as_tensor(compute(joined)), torch.as_tensor(compute(whole)))


def test_elements_in_another_order_are_read_where_they_are_copied() -> None:
    from transformers.core_model_loading import Interleave, WeightConverter

    stored = torch.randn(4, 6, 5)

    def convert() -> Tensor:
        converter = WeightConverter("w13", "gate_up", [Interleave(dim=1)])
        converter.collected_tensors["w13"] = [stored]
        return converter.convert("gate_up")["gate_up"]

    with joining_later():
        joined = convert()
    assert isinstance(joined, JoinedTensor)
    assert torch.equal(joined.detach()[1:3], convert()[1:3])
    assert torch.equal(torch.empty(4, 6, 5).copy_(joined), convert())


def test_what_was_not_read_cannot_be_changed() -> None:
    joined, _ = experts()
    with pytest.raises(NotImplementedError, match="not read yet"):
        joined.mul_(2)
    with pytest.raises(NotImplementedError, match="not read yet"):
        joined[1:].copy_(torch.zeros(3, 6, 5))


def test_a_parameter_of_it_keeps_its_parts() -> None:
    joined, whole = experts()
    parameter = torch.nn.Parameter(joined)
    assert isinstance(parameter.data, JoinedTensor)
    assert torch.equal(parameter.data.to(torch.float64), whole.to(torch.float64))
