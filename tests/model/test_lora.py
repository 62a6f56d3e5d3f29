"""Adapters: what PEFT computes and writes, in training, decoding and files."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_config
from torch import Tensor
from trajectories import small_batch
from transformers import AutoModelForCausalLM

from corral.model.attention import register
from corral.model.fused_layers import fuse
from corral.model.lora import PEFT_PREFIX, adapters_disabled, add_adapters, has_adapters, peft_names
from corral.model.model_loading import load_model
from corral.recipe.errors import UserError
from corral.recipe.schema import Lora, Model, Optimizer
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine, model_logprobs
from corral.training.native_trainer import NativePolicyTrainer

CPU = torch.device("cpu")
TOKENS = [5, 9, 33, 7, 60, 12, 44]
SOME = Lora(rank=4, targets=["q_proj", "down_proj"])


def random_adapters(model: Any) -> Any:
    """The model with adapters that compute something: B is not zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(folder: Path, lora: Lora = Lora(rank=4)) -> Any:
    model = load_model(Model(path=str(folder), dtype="float32"), CPU)
    add_adapters(model, lora)
    return random_adapters(model)


def train_squares(model: Any) -> dict[str, Tensor]:
    """Gradients of the sum of squared log-probs, by our trainer."""
    policy = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    for pack in small_batch().pack(45):
        policy.forward_backward([(pack, lambda logprobs, entropy: (logprobs**2).sum())])
    return gradients_of(model)


def peft_trains_squares(theirs: Any) -> dict[str, Tensor]:
    """The same by PEFT, one trajectory at a time."""
    batch = small_batch()
    for row in range(len(batch)):
        generated = torch.from_numpy(batch.generated[batch.positions_of([row])][1:])
        (logprobs_of(theirs, batch.sequence(row).tolist())[generated] ** 2).sum().backward()
    return gradients_of(theirs)


def gradients_of(model: Any) -> dict[str, Tensor]:
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in trained.values())
    return trained


def check_engine(model: Any, paged: bool, tolerance: float) -> None:
    """Log-probs of what the engine samples are those of the whole model."""
    engine = NativeEngine(model, None, max_sequences=4, max_prefill_tokens=64, max_length=64, paged=paged)
    completion = asyncio.run(engine.generate(TOKENS, Sampling(max_tokens=12), 3))
    engine.close()
    whole = model_logprobs(model, [*TOKENS, *completion.tokens])
    assert completion.logprobs == pytest.approx(whole[len(TOKENS) - 1 :], abs=tolerance)


def merged_logprobs(model: Any, folder: Path) -> list[float]:
    """Of the base model in the folder with the weights that another engine would get."""
    policy = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    plain = load_model(Model(path=str(folder), dtype="float32"), CPU)
    plain.load_state_dict(dict(policy.weights(merged=True)), strict=False)
    return model_logprobs(plain, TOKENS)


def peft_of(folder: Path, ours: Any) -> Any:
    """PEFT's model with the same adapters."""
    lora: Lora = ours.lora
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.resolved_alpha,
        target_modules=targets,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    theirs = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        if "lora" in name:
            theirs[f"{PEFT_PREFIX}{name}.default.weight"].data.copy_(parameter.data)
    return model.eval()


def logprobs_of(model: Any, tokens: list[int]) -> Tensor:
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "lora", [Lora(rank=4), SOME, Lora(rank=4, alpha=3.0, rslora=True, targets=["v_proj", "up_proj"])], ids=str
)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_a_plain_peft_model(tiny_model: Path, lora: Lora, fused: bool) -> None:
    ours = adapted(tiny_model, lora)
    theirs = peft_of(tiny_model, ours)
    if fused:
        assert fuse(ours)
    found, expected = train_squares(ours), peft_trains_squares(theirs)
    assert len(found) == len(expected) > 0
    for name, gradient in found.items():
        its = expected[f"{PEFT_PREFIX}{name}.default.weight"]
        torch.testing.assert_close(gradient, its, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("paged", "fused"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_engine_samples_with_the_adapters(family: str, paged: bool, fused: bool) -> None:
    register()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="corral").eval()
    bare = model_logprobs(model, TOKENS)
    add_adapters(model, Lora(rank=4))
    random_adapters(model)
    if fused:
        assert fuse(model)
    check_engine(model, paged, tolerance=1e-5)
    assert np.abs(np.array(model_logprobs(model, TOKENS)) - bare).max() > 0.01


def test_without_its_adapters_it_is_the_base_model_and_in_this_thread_only(tiny_model: Path) -> None:
    model = adapted(tiny_model)
    base = model_logprobs(load_model(Model(path=str(tiny_model), dtype="float32"), CPU), TOKENS)
    with_adapters, elsewhere = model_logprobs(model, TOKENS), []
    with adapters_disabled():
        assert model_logprobs(model, TOKENS) == base
        thread = threading.Thread(target=lambda: elsewhere.extend(model_logprobs(model, TOKENS)))
        thread.start()
        thread.join()
    assert model_logprobs(model, TOKENS) == with_adapters == elsewhere
    assert with_adapters != base


def save(model: Any, folder: Path) -> None:
    NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1).save(folder)


@pytest.mark.parametrize("lora", [Lora(rank=4), SOME, Lora(rank=4, rslora=True)], ids=str)
def test_peft_loads_a_checkpoint_as_it_is(tiny_model: Path, tmp_path: Path, lora: Lora) -> None:
    model = adapted(tiny_model, lora)
    save(model, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    theirs = logprobs_of(PeftModel.from_pretrained(base, tmp_path).eval(), TOKENS)
    assert theirs.tolist() == pytest.approx(model_logprobs(model, TOKENS), abs=1e-5)


@pytest.mark.parametrize("lora", [None, SOME])
def test_an_adapter_of_peft_is_a_model_merged_or_to_go_on_from(
    tiny_model: Path, tmp_path: Path, lora: Lora | None
) -> None:
    theirs = peft_of(tiny_model, adapted(tiny_model, SOME))
    theirs.save_pretrained(tmp_path)
    loaded = load_model(Model(path=str(tmp_path), lora=lora, dtype="float32"), CPU)
    assert has_adapters(loaded) == (lora is not None)
    assert model_logprobs(loaded, TOKENS) == pytest.approx(logprobs_of(theirs, TOKENS).tolist(), abs=1e-5)


def test_merged_weights_are_what_other_engines_get(tiny_model: Path) -> None:
    model = adapted(tiny_model)
    assert merged_logprobs(model, tiny_model) == pytest.approx(model_logprobs(model, TOKENS), abs=1e-5)
    policy = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    assert {name for name, _ in policy.weights()} == {n for n, p in model.named_parameters() if p.requires_grad}


def test_adapters_that_are_not_computed_here_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="use_dora"):
        load_model(Model(path=str(tmp_path)), CPU)


def test_a_target_that_is_not_there_is_refused_with_those_that_are(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"no linear layer is called query; there are down_proj, .*v_proj"):
        load_model(Model(path=str(tiny_model), lora=Lora(targets=["query"])), CPU)


def test_the_head_is_no_target(tiny_model: Path) -> None:
    for targets in (["lm_head"], ["q_proj", "lm_head"]):
        with pytest.raises(UserError, match="lm_head is the model's head"):
            load_model(Model(path=str(tiny_model), lora=Lora(targets=targets)), CPU)


def test_targets_that_are_a_regular_expression_are_the_layers_that_have_tensors(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    pattern = r".*layers\.0\..*(q|up)_proj"
    theirs = get_peft_model(base, LoraConfig(r=2, target_modules=pattern, init_lora_weights=False)).eval()
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == pattern
    ours = load_model(Model(path=str(tmp_path), dtype="float32"), CPU)
    assert model_logprobs(ours, TOKENS) == pytest.approx(logprobs_of(theirs, TOKENS).detach(), abs=1e-5)


def test_an_adapter_of_another_rank_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    save(adapted(tiny_model), tmp_path)
    with pytest.raises(UserError, match=r"has \(rank, scale\) \(4, 2.0\), the recipe \(8, 2.0\)"):
        load_model(Model(path=str(tmp_path), lora=Lora(rank=8)), CPU)


def test_names_are_those_of_peft() -> None:
    name = "model.layers.0.mlp.up_proj.lora_A"
    assert peft_names([name]) == {name: f"base_model.model.{name}.weight"}
