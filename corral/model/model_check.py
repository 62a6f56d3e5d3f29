"""The guard at load: what Corral computes of a model is compared with the model's own plain forward pass.

A family that is declared wrongly, a new release of transformers, or code that comes with a model would otherwise train
on wrong numbers without a word. A few short sequences are enough: a state that leaks between sequences, a mask or a
position that is wrong moves log-probs by whole nats.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.batch import TokenTree
from corral.model.attention import ATTENTION_NAME, TreeAttention, forward_hidden, window_problem
from corral.model.fused_layers import fuse, unfuse
from corral.model.general_forward import is_general, sequence_logits
from corral.model.logprobs import OutputHead
from corral.recipe.errors import UserError, one_line

TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
REPORT = "; please report the model, and set `model.implementation: general` meanwhile"
HALF_TOLERANCE = 0.3
"""Mean difference of log-probs in nats that rounding cannot explain: in half precision a tenth is usual."""


@contextmanager
def plain_forward(model: Any) -> Iterator[None]:
    """Within it, the model computes as transformers wrote it, without Corral's attention and fused layers."""
    if is_general(model):
        yield
        return
    was_fused = unfuse(model)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        if was_fused:
            fuse(model, move_weights=False)  # they are where they were


@torch.no_grad()
def plain_logprobs(model: Any, tokens: list[int], device: torch.device | None = None) -> Tensor:
    """Log-prob of each token after the first, by the model's own forward pass over this sequence alone."""
    device = device or next(model.parameters()).device
    with plain_forward(model):
        logits = sequence_logits(model, torch.tensor([tokens], device=device))[:-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:], device=device)[:, None])[:, 0]


def plain_hidden(model: Any, tokens: list[int], device: torch.device) -> Tensor:
    """Hidden states [tokens, width] of the same pass, on a pipeline stage that does not have the head."""
    with plain_forward(model):
        hidden: Tensor = model.get_decoder()(torch.tensor([tokens], device=device), use_cache=False).last_hidden_state
    return hidden[0]


def probe_sequences(model: Any) -> list[list[int]]:
    """Two unrelated sequences of different lengths, and one that begins as the first does."""
    config = model.config.get_text_config()
    special = {value for key, value in config.to_dict().items() if key.endswith("_token_id") and isinstance(value, int)}
    usable = [token for token in range(min(config.vocab_size, 5000)) if token not in special]
    picks = np.random.default_rng(0).choice(usable, 36).tolist()
    return [picks[:14], picks[14:22], [*picks[:7], *picks[22:]]]


@torch.no_grad()
def check_model(model: Any) -> None:
    """Raises where packed sequences (fast path), or a sequence and its beginning (general path), do not give what the
    plain forward pass gives."""
    sequences = probe_sequences(model)
    with one_line(f"model.path: {model.config._name_or_path}: transformers' own forward pass fails"):
        expected = [plain_logprobs(model, sequence) for sequence in sequences]
    if torch.cat(expected).isnan().any():  # samples of it could all be the same, and train nothing without a word
        raise UserError(
            f"model.path: {model.config._name_or_path}: its log-probs are NaN: weights or config.json are bad"
        )
    if not is_general(model):
        if (window := window_problem(model)) is not None:
            raise UserError(f"model.path: {model.config._name_or_path}: {window}{REPORT}")
        found = difference([packed_logprobs(model, sequences, expected[0].device)], expected)
        raise_if_packing_differs(model, found, model.dtype)
        return
    computed = [plain_logprobs(model, sequence[:-3]) for sequence in sequences]
    found = difference(computed, [one[:-3] for one in expected])
    problem = "a token's log-prob depends on the tokens behind it, so it is not a causal model"
    raise_if_large(found, model.dtype, f"model.path: {model.config._name_or_path}: {problem}")


ThroughStages = Callable[[int, Callable[[], Tensor]], Tensor]
"""(number of tokens, what this stage computes of the hidden states of the one before) -> what it computed"""


@torch.no_grad()
def difference_on_stage(model: Any, device: torch.device, is_last: bool, through_stages: ThroughStages) -> float:
    """What `check_model` compares, on one stage of a pipeline, all of which call it; 0 on those before the last."""
    sequences = probe_sequences(model)
    plain, packed = (plain_logprobs, packed_logprobs) if is_last else (plain_hidden, packed_hidden)
    expected = [through_stages(len(one), partial(plain, model, one, device)) for one in sequences]
    computed = through_stages(probe_tree(sequences).num_nodes, partial(packed, model, sequences, device))
    if window_problem(model, lambda compute: through_stages(1, compute)) is not None:
        return math.inf
    return difference([computed], expected) if is_last else 0.0


def probe_tree(sequences: list[list[int]]) -> TokenTree:
    return TokenTree.build([np.array(sequence, np.int64) for sequence in sequences])


def packed_hidden(model: Any, sequences: list[list[int]], device: torch.device) -> Tensor:
    """Hidden states [nodes, width] of the sequences as one tree."""
    tree = probe_tree(sequences)
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.tokens, tree.positions))
    return forward_hidden(model, tokens, positions, TreeAttention(tree, device))


def packed_logprobs(model: Any, sequences: list[list[int]], device: torch.device) -> Tensor:
    """`plain_logprobs` of all sequences, computed as one tree."""
    log_p = OutputHead.of_model(model).logits(packed_hidden(model, sequences, device)).float().log_softmax(-1)
    by_sequence = [
        log_p[torch.from_numpy(path[:-1]).to(device), torch.tensor(sequence[1:], device=device)]
        for sequence, path in zip(sequences, probe_tree(sequences).paths, strict=True)
    ]
    return torch.cat(by_sequence)


def raise_if_packing_differs(model: Any, found: float, dtype: torch.dtype) -> None:
    """`dtype`: in which the model computes. Of a sharded one that is trained, it is not that of the parameters."""
    problem = f"packed sequences give other log-probs than transformers' own forward pass{REPORT}"
    raise_if_large(found, dtype, f"model.path: {model.config._name_or_path}: {problem}")


def raise_if_large(found: float, dtype: torch.dtype, problem: str) -> None:
    if not found <= TOLERANCE.get(dtype, HALF_TOLERANCE):
        raise UserError(f"{problem} (a difference of {found:.2f} nats in the mean)")


def difference(computed: list[Tensor], expected: list[Tensor]) -> float:
    """Mean over tokens of the absolute difference. 0 where the plain forward pass itself gives no numbers: then the
    weights are broken, which training finds and says."""
    theirs = torch.cat(expected).double()
    return float((torch.cat(computed).double() - theirs).abs().mean()) if bool(theirs.isfinite().all()) else 0.0
