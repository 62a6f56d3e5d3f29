"""The registered attention function against transformers' own, for several model families."""

import copy

import numpy as np
import pytest
import torch
from tiny import DEVICE, tiny_config
from transformers import AutoModelForCausalLM

from corral.data.batch import TokenTree
from corral.model.attention import AttentionKernel, TreeAttention, _AttentionBlock, forward_hidden, register
from corral.model.model_parallel import distribute_tree

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]


def both_models(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same weights with our attention and with transformers' eager one."""
    register()
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(tiny_config(family)), attn_implementation="corral").eval()
    ours.load_state_dict(theirs.state_dict())
    return ours.to(DEVICE), theirs.to(DEVICE)


def sequences() -> list[np.ndarray]:
    """Three prompts with a common beginning, four samples each, some of which start alike."""
    rng = np.random.default_rng(0)
    prompts = [[5, 6, 7, *rng.integers(3, 90, 6)] for _ in range(3)]
    return [np.array([*prompt, *rng.integers(3, 6, 1 + i)]) for prompt in prompts for i in range(4)]


def hidden_of_tree(model: torch.nn.Module, tree: TokenTree) -> torch.Tensor:
    tokens, positions = (torch.from_numpy(array).to(DEVICE) for array in (tree.tokens, tree.positions))
    return forward_hidden(model, tokens, positions, TreeAttention(tree, DEVICE))


def hidden_alone(model: torch.nn.Module, sequence: np.ndarray) -> torch.Tensor:
    return model.get_decoder()(input_ids=torch.from_numpy(sequence)[None].to(DEVICE)).last_hidden_state[0]


@pytest.mark.parametrize("call_cost", [0, 10**9], ids=["chunk by chunk", "with one mask"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_gives_every_sequence_the_hidden_states_it_has_alone(
    family: str, call_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeAttention, "CALL_COST", call_cost)
    ours, theirs = both_models(family)
    tree = TokenTree.build(sequences())
    assert tree.num_nodes < 0.6 * sum(map(len, sequences()))
    hidden = hidden_of_tree(ours, tree)
    for sequence, path in zip(sequences(), tree.paths, strict=True):
        torch.testing.assert_close(hidden[path], hidden_alone(theirs, sequence), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_gives_the_gradient_of_the_separate_sequences(family: str) -> None:
    ours, theirs = both_models(family)
    tree = TokenTree.build(sequences())
    hidden = hidden_of_tree(ours, tree)
    weights = [
        torch.randn(len(s), hidden.shape[1], generator=torch.Generator().manual_seed(i)).to(DEVICE)
        for i, s in enumerate(sequences())
    ]
    sum((hidden[path] * weight).sum() for path, weight in zip(tree.paths, weights, strict=True)).backward()
    for sequence, weight in zip(sequences(), weights, strict=True):
        (hidden_alone(theirs, sequence) * weight).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("call_cost", [0, 10**9], ids=["chunk by chunk", "with one mask"])
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("kernel", [AttentionKernel(), AttentionKernel(window=3)], ids=["all", "window"])
def test_runs_of_queries_are_parts_of_the_whole(
    call_cost: int, parts: int, kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks of a context group compute. The tree has several roots, and padding at its end. A window that leaves
    out most keys is computed some queries at a time."""
    monkeypatch.setattr(TreeAttention, "CALL_COST", call_cost)
    distributed = distribute_tree(TokenTree.build([*sequences(), np.arange(20, 61)]), parts)
    tree = distributed.tree
    assert tree.num_nodes % (2 * parts) == 0
    assert [chunk.end for chunk in tree.chunks] == [*(chunk.start for chunk in tree.chunks[1:]), tree.num_nodes]
    query, key, value = torch.randn(3, 1, 4, tree.num_nodes, 8, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    whole = TreeAttention(tree, DEVICE).attend(0, query, key, value, kernel)
    monkeypatch.setattr(_AttentionBlock, "MIN_QUERIES", 2)
    seen = []
    for rank in range(parts):
        nodes, runs = distributed.nodes(rank), distributed.runs(rank)
        assert np.concatenate([np.arange(run.start, run.stop) for run in runs]).tolist() == nodes.tolist()
        part = TreeAttention(tree, DEVICE, runs).attend(0, query[:, :, nodes], key, value, kernel)
        torch.testing.assert_close(part, whole[:, :, nodes], atol=2e-6, rtol=2e-5)
        seen += nodes.tolist()
    assert sorted(seen) == list(range(tree.num_nodes))


LONG = np.arange(100_000)
SAMPLES = [np.concatenate([LONG[:3000], [i], LONG[: 500 + 600 * i]]) for i in range(8)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "sequences",
    [[LONG], SAMPLES, [LONG[:20_000], *(np.array([i, *LONG[:400]]) for i in range(1, 40))]],
    ids=["one long sequence", "samples of a prompt", "one long and many short"],
)
def test_ranks_of_a_context_group_have_equal_work(sequences: list[np.ndarray], num_ranks: int) -> None:
    distributed = distribute_tree(TokenTree.build(sequences), num_ranks)
    chunks = distributed.tree.chunks
    pairs = np.zeros(distributed.tree.num_nodes)  # counted key by key, from what attention gets
    for chunk in chunks:
        pairs[chunk.start : chunk.end] = len(chunk.path) - np.arange(chunk.end - chunk.start)[::-1]
    work = [pairs[distributed.nodes(rank)].sum() for rank in range(num_ranks)]
    assert max(work) < 1.05 * np.mean(work)
    slices = pairs.reshape(num_ranks, -1).sum(1)
    assert slices.max() > 1.1 * slices.mean()  # which contiguous slices have not


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("alike", [True, False], ids=["shared beginnings", "nothing shared"])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (3, False), (None, True), (4, True)])
def test_one_call_for_all_chunks_is_the_same_attention(
    window: int | None, has_sinks: bool, parts: int, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in bfloat16; here in float32, so that no rounding hides a key too much."""
    distinct = [np.array([n, *range(10, 14 + n)]) for n in range(4)]
    distributed = distribute_tree(TokenTree.build(sequences() if alike else distinct), parts)
    tree = distributed.tree
    query, key, value, upstream = torch.randn(
        4, 1, 4, tree.num_nodes, 8, generator=torch.Generator().manual_seed(2)
    ).to(DEVICE)
    # Values are narrower than keys, as in latent attention.
    key, value, upstream = key[:, :2].requires_grad_(), value[:, :2, :, :6].requires_grad_(), upstream[..., :6]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE).requires_grad_()
    kernel = AttentionKernel(scale=0.3, window=window, sinks=sinks if has_sinks else None)
    for rank in range(parts):
        own, results = distributed.nodes(rank), []
        for in_one_call in (False, True):
            monkeypatch.setattr("corral.model.attention.has_flash", lambda _, answer=in_one_call: answer)
            attention = TreeAttention(tree, DEVICE, None if parts == 1 else distributed.runs(rank))
            output = attention.attend(0, query[:, :, own], key, value, kernel)
            assert ("varlen" in attention.__dict__) == in_one_call
            results.append(
                [output, *torch.autograd.grad(output, [key, value, *[sinks] * has_sinks], upstream[:, :, own])]
            )
        for plain, varlen in zip(*results, strict=True):
            torch.testing.assert_close(varlen, plain, atol=2e-6, rtol=2e-5)
    assert (attention.varlen.keys is None) == (parts == 1 and not alike)
