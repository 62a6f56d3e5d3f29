"""The trainer's log-probs, values and gradients: exact, however the batch is cut up."""

import copy
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from deadlines import within
from sharded_cases import backward, build_model, deviation, own_packs, policy_of, weights_of
from test_sharded_checkpoint import advance, contents
from tiny import DEVICE, tiny_config
from torch import Tensor
from trajectories import small_batch
from transformers import AutoModelForCausalLM, GPT2Config

from corral.data.batch import Batch, Pack
from corral.model.attention import register
from corral.recipe.schema import Optimizer
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.tensor_files import DeferredWrites, HostCopier
from corral.training.trainer import PolicyLoss


def tiny_policy(
    dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False, **optimizer: object
) -> NativePolicyTrainer:
    register()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").eval().to(DEVICE, dtype)
    recipe = Optimizer(**{"learning_rate": 1e-2, "max_gradient_norm": 1e9, **optimizer})
    return NativePolicyTrainer(
        model,
        temperature=0.9,
        logits_chunk=16,
        optimizer=recipe,
        total_updates=10,
        gradient_checkpointing=gradient_checkpointing,
    )


def token_weights(batch: Batch) -> Tensor:
    return torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def gradients(policy: NativePolicyTrainer, packs: list[Pack]) -> dict[str, Tensor]:
    for pack in packs:
        weight = token_weights(pack.batch)[pack.flat]
        policy.forward_backward([(pack, lambda lp, entropy, w=weight: (w * lp).sum() + 0.1 * (w * entropy).sum())])
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def separate_gradients(batch: Batch) -> dict[str, Tensor]:
    """Each trajectory alone, through transformers' own attention and a full softmax."""
    model = tiny_policy().model
    theirs = (
        AutoModelForCausalLM.from_config(copy.deepcopy(tiny_config()), attn_implementation="eager").eval().to(DEVICE)
    )
    theirs.load_state_dict(model.state_dict())
    weights = token_weights(batch)
    for row in range(len(batch)):
        span = slice(batch.offsets[row], batch.offsets[row + 1])
        tokens = torch.from_numpy(batch.sequence(row)).to(DEVICE)
        log_p = (theirs(tokens[None]).logits[0] / 0.9).log_softmax(-1)[:-1]
        chosen = log_p.gather(1, tokens[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        weight = (weights[span] * torch.from_numpy(batch.generated[span]).to(DEVICE))[1:]
        ((chosen + 0.1 * entropy) * weight).sum().backward()
    return {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cap", [20, 33, 1000])
def test_the_gradient_is_that_of_the_separate_sequences_for_every_packing(cap: int) -> None:
    batch = small_batch()
    ours, expected = gradients(tiny_policy(), batch.pack(cap)), separate_gradients(batch)
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], atol=2e-5, rtol=1e-4)


def test_sharing_prompts_changes_nothing_but_the_work() -> None:
    batch = small_batch()
    apart = [pack for row in range(len(batch)) for pack in batch.pack(1000, [row])]
    (together,) = batch.pack(1000)
    assert together.tree.num_nodes < 0.5 * sum(pack.tree.num_nodes for pack in apart)
    shared, separate = gradients(tiny_policy(), [together]), gradients(tiny_policy(), apart)
    for name in shared:
        torch.testing.assert_close(shared[name], separate[name], atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    batch = small_batch()
    plain = gradients(tiny_policy(), batch.pack(1000))
    recomputed = gradients(tiny_policy(gradient_checkpointing=True), batch.pack(1000))
    for name in plain:
        torch.testing.assert_close(plain[name], recomputed[name])


@pytest.mark.parametrize("attention", ["corral", "eager"])
def test_gradient_checkpointing_switches_no_dropout_on(attention: str) -> None:
    config = GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    )
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    policy = NativePolicyTrainer(
        model, temperature=1.0, optimizer=Optimizer(), total_updates=1, gradient_checkpointing=True
    )
    [pack] = small_batch().pack(1000)
    computed: list[torch.Tensor] = []
    policy.forward_backward([(pack, lambda logprobs, entropy: (computed.append(logprobs.detach()), logprobs.sum())[1])])
    [expected] = policy.compute_logprobs([pack])
    torch.testing.assert_close(computed[0], expected)
    assert not any(module.training for module in model.modules())


def test_computing_log_probs_twice_gives_the_same_bits() -> None:
    policy, packs = tiny_policy(), small_batch().pack(40)
    for first, second in zip(policy.compute_logprobs(packs), policy.compute_logprobs(packs), strict=True):
        assert torch.equal(first, second)


def train_to_prefer(policy: NativePolicyTrainer, steps: int) -> tuple[float, float]:
    """Mean log-prob of a batch before and after training to raise it."""
    packs = small_batch().pack(1000)

    def mean() -> float:
        return float(sum(lp.sum() for lp in policy.compute_logprobs(packs))) / small_batch().num_generated

    before = mean()
    for _ in range(steps):
        for pack in packs:
            policy.forward_backward([(pack, lambda lp, _: -lp.sum() / 40)])
        assert not policy.step().skipped
    return before, mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_raises_what_the_loss_rewards(dtype: torch.dtype) -> None:
    before, after = train_to_prefer(tiny_policy(dtype), steps=8)
    assert after > before + 0.5


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    """Each update is far below bfloat16's resolution; the float32 master adds them up."""
    policy = tiny_policy(torch.bfloat16, learning_rate=1e-5)
    assert policy.optimizer is not None
    masters = policy.optimizer.masters
    before = [master.weight.detach().clone() for master in masters]
    train_to_prefer(policy, steps=3)
    moved = [float((master.weight.detach() - old).abs().max()) for master, old in zip(masters, before, strict=True)]
    assert max(moved) == pytest.approx(3e-5, rel=0.1)


def test_a_skipped_update_counts_for_the_learning_rate_whatever_was_not_finite() -> None:
    policy, (pack,) = tiny_policy(schedule="linear"), small_batch().pack(1000)
    losses: list[PolicyLoss] = [
        lambda lp, _: lp.sum() * torch.nan,
        lambda lp, _: (lp - lp.detach()).abs().sqrt().sum(),
        lambda lp, _: lp.sum(),
    ]
    results = []
    for loss in losses:
        policy.forward_backward([(pack, loss)])
        results.append(policy.step())
    assert [result.skipped for result in results] == [True, True, False]
    assert [result.learning_rate for result in results] == pytest.approx([1e-2, 0.9e-2, 0.8e-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_an_update_waits_until_the_states_before_it_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, offload: tuple[str, ...]
) -> None:
    """Gradients are computed meanwhile; and what is written is what was saved."""
    policy, deferred = policy_of(build_model("llama", dtype), offload=offload), DeferredWrites(10**9)
    advance(policy, None, 1)
    policy.save(tmp_path / "at once")
    may_copy, copy = threading.Event(), HostCopier.copy

    def held(self: HostCopier, tensor: torch.Tensor) -> torch.Tensor:
        assert may_copy.wait(within(60))
        return copy(self, tensor)

    monkeypatch.setattr(HostCopier, "copy", held)
    policy.save(tmp_path / "later", None, deferred)
    backward(policy, own_packs(small_batch(), None))
    before = weights_of(policy)
    stepping = threading.Thread(target=policy.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert deviation(weights_of(policy), before) == 0
    may_copy.set()
    stepping.join(within(60))
    assert deviation(weights_of(policy), before) > 0
    deferred.write()
    assert contents(tmp_path / "later") == contents(tmp_path / "at once")


def test_the_frozen_reference_cannot_be_trained() -> None:
    register()
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").eval().to(DEVICE)
    reference = NativePolicyTrainer(model, temperature=1.0, logits_chunk=8)
    with pytest.raises(AssertionError, match="frozen"):
        reference.step()


def test_a_critic_starts_at_zero_and_fits_returns() -> None:
    register()
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").eval().to(DEVICE)
    critic = NativeValueTrainer(ValueModel(model), Optimizer(learning_rate=5e-3), total_updates=60)
    batch = small_batch()
    (pack,) = batch.pack(1000)
    returns = torch.from_numpy((batch.groups == 1)[np.repeat(np.arange(len(batch)), np.diff(batch.offsets))][pack.flat])
    mask, returns = torch.from_numpy(pack.generated).to(DEVICE), returns.to(DEVICE)
    (start,) = critic.compute_values([pack])
    assert not start.any()
    for _ in range(60):
        critic.forward_backward([(pack, lambda values: (values - returns.float())[mask].square().mean())])
        critic.step()
    (values,) = critic.compute_values([pack])
    assert (values - returns.float())[mask].abs().max() < 0.2
