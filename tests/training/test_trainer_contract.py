"""Every trainer against its contract. A new one is one more line of `POLICIES` or `CRITICS`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEVICE, tiny_config
from trainer_contract import POLICY_CONTRACT, VALUE_CONTRACT, MakePolicy, MakeValue
from transformers import AutoModelForCausalLM

from corral.model.attention import register
from corral.recipe.schema import Optimizer
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.trainer import PolicyTrainer, ValueTrainer


def load_model(folder: Path | None, attention: str) -> Any:
    register()
    torch.manual_seed(3)
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval().to(DEVICE)
    return AutoModelForCausalLM.from_config(tiny_config(), attn_implementation=attention).eval().to(DEVICE)


OPTIMIZER = Optimizer(learning_rate=1e-3, schedule="linear")
"""The learning rate tells updates apart."""


def native_policy(folder: Path | None, attention: str = "corral") -> PolicyTrainer:
    return NativePolicyTrainer(load_model(folder, attention), temperature=0.9, optimizer=OPTIMIZER, total_updates=10)


def native_critic(attention: str = "corral") -> ValueTrainer:
    return NativeValueTrainer(ValueModel(load_model(None, attention)), OPTIMIZER, total_updates=10)


POLICIES: dict[str, MakePolicy] = {"native": native_policy, "general": partial(native_policy, attention="sdpa")}
CRITICS: dict[str, MakeValue] = {"native": native_critic, "general": partial(native_critic, attention="sdpa")}


@pytest.mark.parametrize("check", POLICY_CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", POLICIES)
def test_policy_trainer_keeps_its_contract(
    name: str, check: Callable[[MakePolicy, Path], None], tmp_path: Path
) -> None:
    check(POLICIES[name], tmp_path)


@pytest.mark.parametrize("check", VALUE_CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CRITICS)
def test_value_trainer_keeps_its_contract(name: str, check: Callable[[MakeValue, Path], None], tmp_path: Path) -> None:
    check(CRITICS[name], tmp_path)
