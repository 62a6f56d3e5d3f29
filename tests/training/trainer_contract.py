"""What every `PolicyTrainer` and `ValueTrainer` promises, checked through the seams alone."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trajectories import small_batch

from corral.data.batch import Pack
from corral.recipe.errors import RunError
from corral.training.trainer import PolicyTrainer, ValueTrainer

MakePolicy = Callable[[Path | None], PolicyTrainer]
"""A trainer of the same small float32 policy each time, on one process; or of the one in a checkpoint's folder."""
MakeValue = Callable[[], ValueTrainer]


def one_pack() -> Pack:
    (pack,) = small_batch().pack(1000)
    return pack


def raise_logprobs(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -logprobs.sum() / 40


def weights_of(policy: PolicyTrainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.weights()}


def changed(policy: PolicyTrainer, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(weight, before[name]) for name, weight in policy.weights())


def log_probs_are_zero_where_nothing_was_generated_and_empty_without_a_pack(make: MakePolicy, folder: Path) -> None:
    policy, pack = make(None), one_pack()
    logprobs, nothing = policy.compute_logprobs([pack, None])
    generated = torch.from_numpy(pack.generated).to(logprobs.device)
    assert (logprobs[generated] < 0).all()
    assert not logprobs[~generated].any()
    assert not logprobs.requires_grad
    assert nothing.numel() == 0


def the_loss_is_given_the_same_log_probs_and_its_value_is_returned(make: MakePolicy, folder: Path) -> None:
    policy, pack = make(None), one_pack()
    (expected,) = policy.compute_logprobs([pack])
    given: list[Tensor] = []

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        given.extend([logprobs.detach(), entropy.detach()])
        return 3.0 * logprobs.sum()

    assert policy.forward_backward([(pack, loss)]) == pytest.approx(3.0 * float(expected.sum()), rel=1e-5)
    torch.testing.assert_close(given[0], expected)
    assert (given[1][expected != 0] > 0).all()
    assert not given[1][expected == 0].any()
    assert policy.forward_backward([(None, None)]) == 0.0


def an_update_raises_what_the_loss_rewards(make: MakePolicy, folder: Path) -> None:
    policy, pack = make(None), one_pack()
    (before,) = policy.compute_logprobs([pack])
    policy.forward_backward([(pack, raise_logprobs)])
    result = policy.step()
    assert not result.skipped
    assert result.gradient_norm > 0
    (after,) = policy.compute_logprobs([pack])
    assert after.sum() > before.sum()


def gradients_add_up_and_are_scaled(make: MakePolicy, folder: Path) -> None:
    once, twice, pack = make(None), make(None), one_pack()
    once.forward_backward([(pack, raise_logprobs)])
    for _ in range(2):
        twice.forward_backward([(pack, raise_logprobs)])
    assert once.step().gradient_norm == pytest.approx(twice.step(0.5).gradient_norm, rel=1e-5)


def zero_grad_drops_gradients_and_bad_losses(make: MakePolicy, folder: Path) -> None:
    policy, fresh, pack = make(None), make(None), one_pack()
    policy.forward_backward([(pack, lambda logprobs, _: logprobs.sum() * math.nan)])
    policy.zero_grad()
    for trainer in (policy, fresh):
        trainer.forward_backward([(pack, raise_logprobs)])
    assert policy.step().gradient_norm == pytest.approx(fresh.step().gradient_norm, rel=1e-6)


def what_is_not_finite_never_reaches_the_weights(make: MakePolicy, folder: Path) -> None:
    policy, pack = make(None), one_pack()
    before = weights_of(policy)
    policy.forward_backward([(pack, raise_logprobs)])
    policy.forward_backward([(pack, lambda logprobs, _: logprobs.sum() * math.nan)])
    assert policy.step().skipped
    policy.forward_backward([(pack, lambda logprobs, _: (logprobs - logprobs.detach()).abs().sqrt().sum())])
    result = policy.step()  # a finite loss with an infinite slope
    assert result.skipped
    assert not math.isfinite(result.gradient_norm)
    assert not changed(policy, before)
    policy.forward_backward([(pack, raise_logprobs)])
    assert not policy.step().skipped
    assert changed(policy, before)


def weights_that_are_not_finite_are_not_saved(make: MakePolicy, folder: Path) -> None:
    policy = make(None)
    for _, weight in policy.weights():
        weight.view(-1)[0] = math.inf
        break
    with pytest.raises(RunError, match=r"weights are not finite, here 1 of \d+ tensors, such as .*embed"):
        policy.save(folder / "bad")
    assert not (folder / "bad").exists()


def weights_are_whole_and_of_the_stated_dtype(make: MakePolicy, folder: Path) -> None:
    policy = make(None)
    weights = weights_of(policy)
    assert {weight.dtype for weight in weights.values()} == {policy.dtype}
    if policy.whole_model is not None:
        assert {name: p.shape for name, p in policy.whole_model.named_parameters()} == {
            name: weight.shape for name, weight in weights.items()
        }


def a_policy_resumes_to_the_last_bit(make: MakePolicy, folder: Path) -> None:
    policy, pack = make(None), one_pack()
    policy.forward_backward([(pack, raise_logprobs)])
    policy.step()
    policy.save(folder)
    resumed = make(folder)
    resumed.load(folder)
    for trainer in (policy, resumed):
        trainer.forward_backward([(pack, raise_logprobs)])
    assert policy.step() == resumed.step()
    assert not changed(resumed, weights_of(policy))


def a_critic_fits_returns_skips_bad_losses_and_resumes(make: MakeValue, folder: Path) -> None:
    critic, resumed, pack = make(), make(), one_pack()
    mask = torch.from_numpy(pack.generated)

    def loss(values: Tensor) -> Tensor:
        return (values - 1.0)[mask.to(values.device)].square().mean()

    start, nothing = critic.compute_values([pack, None])
    assert nothing.numel() == 0
    assert critic.forward_backward([(None, None)]) == 0.0
    assert critic.forward_backward([(pack, loss)]) == pytest.approx(float(loss(start)), rel=1e-5)
    assert not critic.step().skipped
    critic.save(folder)
    resumed.load(folder)
    for trainer in (critic, resumed):
        trainer.forward_backward([(pack, loss)])
        trainer.step()
        trainer.forward_backward([(pack, lambda values: values.sum() * math.nan)])
        assert trainer.step().skipped
    (values,), (same,) = critic.compute_values([pack]), resumed.compute_values([pack])
    assert torch.equal(values, same)
    assert float(loss(values)) < float(loss(start))


POLICY_CONTRACT = [
    log_probs_are_zero_where_nothing_was_generated_and_empty_without_a_pack,
    the_loss_is_given_the_same_log_probs_and_its_value_is_returned,
    an_update_raises_what_the_loss_rewards,
    gradients_add_up_and_are_scaled,
    zero_grad_drops_gradients_and_bad_losses,
    what_is_not_finite_never_reaches_the_weights,
    weights_that_are_not_finite_are_not_saved,
    weights_are_whole_and_of_the_stated_dtype,
    a_policy_resumes_to_the_last_bit,
]
VALUE_CONTRACT = [a_critic_fits_returns_skips_bad_losses_and_resumes]
