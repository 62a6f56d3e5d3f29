"""What a recipe may change about a model and its tokenizer, and what it gets for its mistakes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from corral.model import model_loading
from corral.model.fused_layers import fused_layers
from corral.model.model_loading import load_config, load_model, load_tokenizer, resolve_dtype
from corral.recipe.errors import UserError
from corral.recipe.schema import Model

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    "{{ words | default([]) | join('+') }}"
)


def test_chat_template_arguments_reach_the_template(tiny_model: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def rendered(**arguments: object) -> str:
        model = Model(path=str(tiny_model), chat_template=TEMPLATE, chat_template_arguments=arguments)
        return str(load_tokenizer(model).apply_chat_template(messages, tokenize=False))

    assert rendered() == "hi"
    assert rendered(enable_thinking=False) == "hi<no thoughts>"
    assert rendered(enable_thinking=True) == "hi"
    assert rendered(enable_thinking=None, words=["a", "b"]) == "hi<no thoughts>a+b"


def test_the_name_of_a_template_argument_is_a_name() -> None:
    with pytest.raises(ValueError, match="pattern"):
        Model(path="x", chat_template_arguments={"a %}{{ 1": 2})


def test_the_configuration_is_changed_and_saved(tiny_model: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    overrides = {"rope_parameters": rope, "max_position_embeddings": 1024}
    model = load_model(Model(path=str(tiny_model), dtype="float32", config_overrides=overrides), torch.device("cpu"))
    model.save_pretrained(tmp_path)
    saved = load_config(Model(path=str(tmp_path)))
    assert saved.max_position_embeddings == 1024
    assert saved.rope_parameters["factor"] == 2.0


def test_a_key_that_the_configuration_does_not_have_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="has no 'max_positions'"):
        load_config(Model(path=str(tiny_model), config_overrides={"max_positions": 9}))


@pytest.mark.parametrize(
    ("capability", "hip", "dtype"),
    [((9, 0), None, torch.bfloat16), ((7, 0), None, torch.float16), ((9, 4), "6.4", torch.bfloat16)],
)
def test_auto_is_what_the_gpu_multiplies(
    capability: tuple[int, int], hip: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert resolve_dtype("auto", torch.device("cuda")) == dtype


def test_a_model_that_is_sharded_later_is_loaded_for_the_device_that_computes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda _: True)
    settings = Model(path=str(tiny_model))
    loaded = load_model(settings, torch.device("cpu"), computes_on=SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    assert loaded.dtype == torch.bfloat16
    assert fused_layers(loaded) is not None
    assert next(loaded.parameters()).device.type == "cpu"
