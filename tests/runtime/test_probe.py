"""The probe: equal weights pass, anything else is named."""

import math

import numpy as np
import pytest
import torch
from tiny import DEVICE, tiny_config
from transformers import AutoModelForCausalLM

from corral.model.attention import register
from corral.recipe.errors import RunError
from corral.rollout.native_engine import model_logprobs
from corral.runtime.weight_publisher import PROBE_BOUNDS, PROBE_TOKENS, compare_logprobs, probe_batch
from corral.training.native_trainer import NativePolicyTrainer

PROMPT = [(7 * i) % 90 + 3 for i in range(200)]
WHERE = {"version": 7, "name": "device 3 on 10.0.0.2"}


def tiny_policy(dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> NativePolicyTrainer:
    register()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").to(DEVICE, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return NativePolicyTrainer(model, temperature=temperature, logits_chunk=16)


def trainer_logprobs(policy: NativePolicyTrainer, prompt: list[int]) -> list[float]:
    """Log-probs of the prompt's tokens behind the first."""
    batch = probe_batch(prompt)
    (pack,) = batch.pack(PROBE_TOKENS)
    (logprobs,) = policy.compute_logprobs([pack])
    column = np.zeros(len(batch.tokens), np.float32)
    column[pack.flat] = logprobs.float().cpu().numpy()
    return column[1:].tolist()


def test_a_probe_is_the_beginning_of_its_prompt_and_small() -> None:
    assert probe_batch(PROMPT).sequence(0).tolist() == PROMPT[:PROBE_TOKENS]
    assert probe_batch(PROMPT[:5]).num_generated == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_engine_with_the_trainers_weights_agrees(dtype: torch.dtype, temperature: float) -> None:
    policy = tiny_policy(dtype, temperature)
    for prompt in (PROMPT[:20], PROMPT[5:25]):
        ours = model_logprobs(policy.model, prompt, temperature)
        assert len(ours) == 19
        assert compare_logprobs(trainer_logprobs(policy, prompt), ours, dtype, **WHERE) <= PROBE_BOUNDS[dtype] / 10


@pytest.mark.parametrize("name", [name for name, _ in tiny_policy().model.named_parameters()])
def test_any_one_tensor_that_did_not_arrive_is_noticed(name: str) -> None:
    policy = tiny_policy()
    before = trainer_logprobs(policy, PROMPT)
    with torch.no_grad():
        dict(policy.model.named_parameters())[name].mul_(1.05)
    with pytest.raises(RunError, match=r"after the transfer of version 7 the engine on device 3 on 10.0.0.2 disagrees"):
        compare_logprobs(before, model_logprobs(policy.model, PROMPT[:PROBE_TOKENS]), torch.float32, **WHERE)


def test_a_disagreement_is_reported_with_its_size_and_what_is_not_a_number_is_one() -> None:
    with pytest.raises(RunError, match=r"by 0.3 on the probe prompt \(bound 0.0002\): its weights are not those"):
        compare_logprobs([-1.0, -2.0], [-1.0, -2.3], torch.float32, **WHERE)
    with pytest.raises(RunError, match="by nan"):
        compare_logprobs([-1.0, -2.0], [-1.0, math.nan], torch.bfloat16, **WHERE)
