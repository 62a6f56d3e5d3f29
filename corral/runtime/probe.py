"""After a transfer: does the engine compute what the trainer does?

Both are asked for the log-probs of the same few tokens. A tensor that did not arrive, arrived twice or in the wrong
place, or belongs to another version, shows there, whichever it is: all of them take part in every log-prob.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corral.data.batch import Batch
from corral.data.trajectory import FloatArray, StopReason, Trajectory
from corral.data.tree import TokenTree
from corral.model.attention import TreeAttention, forward_hidden
from corral.model.logprobs import head_logprobs
from corral.recipe.errors import RunError

PROBE_TOKENS = 64
"""Altogether: one forward pass of next to no time."""

PROBE_BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 1.0, torch.float16: 0.1}
"""Of a log-prob's deviation, by the model's data type: three to five times what mere rounding does. Where engine and
trainer use the same kernels the deviation is 0. With others (the same 64 tokens of SmolLM2-135M read one by one instead
of all at once) it was 4e-5, 0.3 and 0.02: a log-prob is a difference of logits of up to 40, which bfloat16 rounds to
multiples of 0.25. One of the model's 272 tensors missing made it 1.4 and more. Weights that are one update old show in
float32 (7e-4 for a learning rate of 1e-6), and not in the others with any bound that rounding keeps."""


def probe_batch(prompts: Sequence[Sequence[int]]) -> Batch:
    """The beginnings of these prompts, every token behind the first marked as generated: what a trainer scores."""
    assert min(map(len, prompts)) > 1, "a probe needs prompts of two tokens or more"
    chosen = prompts[: PROBE_TOKENS // 2]
    return Batch.of([probe_trajectory(prompt[: PROBE_TOKENS // len(chosen)]) for prompt in chosen])


def probe_trajectory(prompt: Sequence[int]) -> Trajectory:
    generated = np.arange(len(prompt)) > 0
    return Trajectory(
        tokens=np.array(prompt, np.int64),
        generated=generated,
        logprobs=np.zeros(len(prompt), np.float32),
        versions=np.where(generated, 0, -1),
        turn_rewards=[],
        stop=StopReason.LENGTH,
        prompt_id=0,
        sample=0,
        row=0,
    )


@torch.inference_mode()
def engine_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Of all tokens behind the first, under the weights that the engine decodes with."""
    head = model.get_output_embeddings()
    device = head.weight.device
    tree = TokenTree.build([np.array(tokens[:-1], np.int64)])
    hidden = forward_hidden(
        model,
        torch.from_numpy(tree.tokens).to(device),
        torch.from_numpy(tree.positions).to(device),
        TreeAttention(tree, device),
    )
    rows = torch.arange(len(hidden), device=device)
    targets = torch.tensor(tokens[1:], device=device)
    bias = getattr(head, "bias", None)
    logprobs, _ = head_logprobs(hidden, head.weight, bias, rows, targets, temperature=temperature, chunk=PROBE_TOKENS)
    return logprobs.tolist()


def compare(
    trainer: Sequence[float] | FloatArray,
    engine: Sequence[float] | FloatArray,
    dtype: torch.dtype,
    *,
    version: int,
    name: str,
) -> float:
    """The largest difference of two log-probs of the same token. `name`: of the engine, for the error if it is too
    large."""
    difference = np.abs(np.asarray(trainer, np.float64) - np.asarray(engine, np.float64))
    deviation, bound = float(difference.max()), PROBE_BOUNDS[dtype]
    if not deviation <= bound:  # nor when it is not a number
        raise RunError(
            f"after the transfer of version {version} the engine on {name} disagrees with the trainer by "
            f"{deviation:.2g} on the probe prompt (bound {bound:g}): its weights are not those that were sent, or the "
            "two do not compute the same model"
        )
    return deviation
