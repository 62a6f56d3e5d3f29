"""What a recipe may change about a model and its tokenizer, and what it gets for its mistakes."""

import gc
import json
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.utils.logging import enable_progress_bar

from corral.hub import is_only_path
from corral.model import model_loading
from corral.model.fused_layers import unfuse
from corral.model.model_loading import (
    STORED_WEIGHTS,
    end_tokens,
    load_config,
    load_model,
    load_to_shard,
    load_tokenizer,
    model_source,
    read_chat_template,
    resolve_dtype,
    serialize_convolutions,
)
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


def test_a_chat_template_may_be_a_file_in_the_home_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    assert load_tokenizer(Model(path=str(tiny_model), chat_template="~/t.jinja")).chat_template == TEMPLATE


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.slow
def test_the_garbage_collector_pauses_while_transformers_is_imported_and_is_as_before_afterwards(
    tiny_model: Path, is_enabled: bool
) -> None:
    collections: list[str] = []
    was_enabled, seen = gc.isenabled(), lambda phase, _: collections.append(phase)
    gc.collect()  # none is due because of what was before
    gc.callbacks.append(seen)
    try:
        (gc.enable if is_enabled else gc.disable)()
        load_tokenizer(Model(path=str(tiny_model)))
        load_config(Model(path=str(tiny_model)))
        assert (gc.isenabled(), gc.get_freeze_count()) == (is_enabled, 0)
    finally:
        gc.callbacks.remove(seen)
        (gc.enable if was_enabled else gc.disable)()
    assert collections == []


def test_the_name_of_a_template_argument_is_a_name() -> None:
    with pytest.raises(ValueError, match="pattern"):
        Model(path="x", chat_template_arguments={"a %}{{ 1": 2})


def test_bars_of_reading_and_writing_weights_are_hidden(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    enable_progress_bar()
    load_model(Model(path=str(tiny_model)), torch.device("cpu")).save_pretrained(tmp_path)
    assert capfd.readouterr().err == ""


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


def test_auto_is_what_the_cpu_multiplies() -> None:
    page = Path("/proc/cpuinfo").read_text()
    flags = set(re.findall(r"\b(?:avx512_bf16|amx_bf16|bf16)\b", page))  # of x86, and of ARM
    assert resolve_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if flags else torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [("~nobody-of-that-name/x", "cannot be read: Could not determine"), ("latin1.jinja", "cannot be read: .*utf-8")],
)
def test_a_template_that_cannot_be_read_is_one_line(given: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "latin1.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=f"model.chat_template: .*{message}"):
        read_chat_template(given if given.startswith("~") else str(tmp_path / given))


def test_a_model_to_shard_has_no_memory_but_the_dtype_and_layers_of_the_device_that_computes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda _: True)
    loaded = load_to_shard(Model(path=str(tiny_model)), torch.device("cuda"))
    assert {(p.device.type, p.dtype) for p in loaded.parameters()} == {("meta", torch.bfloat16)}
    assert unfuse(loaded)
    stored = getattr(loaded, STORED_WEIGHTS)
    plain = load_model(Model(path=str(tiny_model), dtype="float32"), torch.device("cpu"))
    for (name, parameter), expected in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(stored[parameter].float(), expected.float(), msg=name)


@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64"), reason="convolutions are right elsewhere")
def test_threads_that_convolve_equal_shapes_at_once_get_their_own_numbers() -> None:
    serialize_convolutions()

    def num_wrong(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((1, 2176, 21), (2176, 1, 4), (2176,))
        values, weight, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
        expected = (values.unfold(2, 4, 1) * weight).sum(-1) + bias[:, None]
        start.wait()
        with torch.backends.mkldnn.flags(enabled=True):  # other tests in this process may have done without
            found = [F.conv1d(values, weight, bias, groups=2176) for _ in range(200)]
        return sum(not torch.allclose(one, expected, atol=1e-4) for one in found)

    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(num_wrong, range(2))) == [0, 0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("gone", r"no weights for 1 of the model's \d+ tensors, such as model\.layers\.0\.\S+: they would be random"),
        ("renamed", r"no weights for 1 of the model's \d+ tensors"),
        ("reshaped", "its weights have other shapes than its config.json says"),
        ("truncated", "could not be loaded"),
        ("integers", r"model\.layers\.0\.\S+ is stored as I32, and the model has real numbers"),
    ],
)
@pytest.mark.parametrize("load", [load_model, load_to_shard])
def test_weights_that_are_not_there_are_never_random_ones(
    tiny_model: Path, tmp_path: Path, load: Callable[..., object], damage: str, message: str
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if "layers.0" in name and tensors[name].dim() == 2)
    tensor = tensors.pop(name)
    if damage == "renamed":
        tensors[f"{name}.old"] = tensor
    elif damage == "reshaped":
        tensors[name] = torch.zeros(3, 4)
    elif damage == "truncated":
        tensors[name] = tensor
    elif damage == "integers":
        tensors[name] = tensor.to(torch.int32)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(UserError, match=message):
        load(Model(path=str(tmp_path)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("file", "key", "value", "problem"),
    [
        ("config.json", "rope_parameters", "x", "could not be loaded: Validation error for field 'rope_parameters'"),
        ("config.json", "rope_parameters", {"rope_type": "yarn"}, "Missing required keys in `rope_parameters`"),
        ("config.json", "hidden_act", "os.system", "could not be loaded: there is no 'os.system'"),
        ("config.json", "dtype", "os.system", "has no attribute 'os.system'"),
        ("config.json", "num_hidden_layers", 10**9, "`num_hidden_layers: 1000000000` is not one of a model"),
        ("config.json", "num_key_value_heads", 0, "could not be loaded: integer division"),
        ("config.json", "rms_norm_eps", "x", "Field 'rms_norm_eps' expected float"),
        ("config.json", "quantization_config", "x", "could not be loaded: 'str' object has no"),
        ("generation_config.json", "eos_token_id", [2, "x"], "has the end token 'x', which is not a number"),
        ("generation_config.json", None, "[" * 100_000, "it is nested too deeply"),
        ("tokenizer_config.json", "eos_token", 5, "no tokenizer could be loaded"),
        ("tokenizer_config.json", None, "5", "no tokenizer could be loaded"),
        ("tokenizer.json", None, "{}", "no tokenizer could be loaded"),
        ("tokenizer.json", None, "[" * 100_000, "no tokenizer could be loaded from .*: it is nested too deeply"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_whatever_a_folder_says_a_model_is_it_is_loaded_or_refused_in_one_line(
    tiny_model: Path, tmp_path: Path, file: str, key: str | None, value: Any, problem: str
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    text = value if key is None else json.dumps({**json.loads((tmp_path / file).read_text()), key: value})
    (tmp_path / file).write_text(text)
    model = Model(path=str(tmp_path), dtype="float32")
    with pytest.raises(UserError, match=problem) as raised:
        end_tokens(load_model(model, torch.device("cpu")), load_tokenizer(model))
    assert "\n" not in str(raised.value)


def test_a_name_that_no_hub_could_have_is_not_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, expected in (
        ("nope", "there is no folder nope, and names on the hub are OWNER/NAME"),
        ("smollm2-135m", "there is no folder smollm2-135m, .*; did you mean smollm2-135m-instruct"),
        ("runs/nope/model", "runs/nope/model is not a folder"),
    ):
        with pytest.raises(UserError, match=expected):
            model_source(name)
    assert not any(map(is_only_path, ("gpt2", "owner/name")))
