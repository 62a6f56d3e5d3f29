"""Every family against plain transformers: trainer, gradients and engine, or the line that refuses it."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_families import (
    MECHANISMS,
    VARIANTS,
    causal_types,
    compare_folder,
    compare_trainer,
    config_of,
    tiny_family_config,
    tiny_family_model,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from corral.model import families
from corral.model.attention import ATTENTION_NAME, register, window_problem
from corral.model.families import ENCODERS, FAMILIES, FAST_TYPES, check_length, checked_plan, choose_path, find_path
from corral.model.model_check import check_model
from corral.model.model_loading import load_model
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.schema import Model
from corral.rollout.general_core import cache_is_right
from corral.rollout.native_engine import NativeEngine

QUICK = ["llama", "gemma2-window8", "deepseek_v3-v<qk", "qwen3_moe", "mamba"]
"""What a newcomer's tests compare; the slow ones compare all."""
NOT_BUILT = {
    # Parts of other models, models of sound, and configurations that cannot be made tiny or need other packages.
    "blt", "dbrx", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody", "reformer",
}  # fmt: skip
COMPARED = {*QUICK, *MECHANISMS.values()}
GENERAL_VARIANTS = {"phimoe-window20", "qwen2_moe-window20"}
REFUSED = {
    **dict.fromkeys(ENCODERS, "is an encoder"),
    "cpmant": "not a causal model",
    "prophetnet": "not a causal model",
    "xlnet": "not a causal model",
    **dict.fromkeys(("emu3", "mllama"), "is not a causal language model of transformers"),
    "phi3-longrope": "other rotary frequencies",
    "mistral-window0": "by its mask, layer 0 attends to the last 1 tokens, and asks attention for all tokens before",
    "mistral-window-5": "by its mask, layer 0 attends to the last 1 tokens, and asks attention for the last -5",
    "llama-dynamic-over": "the model has 8 positions",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def save(name: str, folder: Path) -> None:
    tiny_family_model(config_of(name)).save_pretrained(folder)


def check_right_or_refused(name: str, folder: Path) -> None:
    save(name, folder)
    if name in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name]):
            compare_folder(folder)
    else:
        found = compare_folder(folder)
        is_fast = config_of(name).model_type in FAST_TYPES and name not in GENERAL_VARIANTS
        assert found.path.kind == ("fast" if is_fast else "general")
        assert found.is_right, found


@pytest.mark.parametrize("name", QUICK)
def test_log_probs_and_gradients_are_those_of_transformers(name: str, folder: Path) -> None:
    check_right_or_refused(name, folder)


@pytest.mark.parametrize("name", sorted(GENERAL_VARIANTS))
def test_a_window_that_attention_is_not_asked_for_is_noticed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is longer than the sequences that are compared when a model is loaded."""
    monkeypatch.setattr(families, "WINDOW_OF_MASK", {})
    save(name, folder)
    with pytest.raises(UserError, match="layer 0 attends to the last 20 tokens, and asks attention for all"):
        load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))


def test_a_model_whose_own_forward_pass_fails_is_refused_in_one_line(folder: Path) -> None:
    tiny_family_model(tiny_family_config("gpt_oss", sliding_window=None)).save_pretrained(folder)
    with pytest.raises(UserError, match="transformers' own forward pass fails: Could not find a `sliding_window`"):
        load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAST_TYPES))
def test_attention_is_asked_for_the_windows_of_masks(name: str) -> None:
    register()
    for window in (20, 4000):
        changes = {"sliding_window": window, "use_sliding_window": True}
        known = {key: value for key, value in changes.items() if hasattr(config_of(name), key)}
        config = tiny_family_config(name, **known)
        problem = window_problem(tiny_family_model(config, attention=ATTENTION_NAME))
        assert (problem is None) == (choose_path(config, name).kind == "fast"), problem


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("name", [name for name in MECHANISMS.values() if name not in QUICK])
def test_an_architecture_of_each_mechanism_is_right_or_refused(name: str, folder: Path) -> None:
    check_right_or_refused(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in [*causal_types(), *VARIANTS] if name not in COMPARED | NOT_BUILT])
def test_every_other_architecture_is_right_or_refused(name: str, folder: Path) -> None:
    check_right_or_refused(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-window8", "gpt_oss-window8", "qwen3_moe"])
def test_the_general_path_is_right_where_there_is_a_fast_one(name: str, folder: Path) -> None:
    save(name, folder)
    found = compare_folder(folder, implementation="general")
    assert found.path.kind == "general"
    assert found.is_right, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_state_space_models_are_decoded_with_their_cache(name: str, folder: Path) -> None:
    save(name, folder)
    model = Model(path=str(folder), dtype="float32")
    assert cache_is_right(load_model(model, torch.device("cpu")))


@pytest.mark.slow
def test_every_configuration_of_transformers_has_a_path_or_a_refusal(tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    for model_type, config_class in CONFIG_MAPPING.items():
        try:
            config = config_class()
        except Exception:  # those that have no defaults, or need another package
            continue
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        try:
            path = find_path(Model(path=str(tmp_path)))
            assert path is not None, model_type
            kinds[path.kind] += 1
        except UserError:
            kinds["refused"] += 1
    assert kinds["fast"] >= len(FAST_TYPES) - 5
    assert kinds["general"] > 50
    assert kinds["refused"] > 200


def test_a_family_is_declared_once_and_known_to_transformers() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    assert set(types) <= set(causal_types())


def test_every_family_of_the_fast_path_is_in_the_table_of_what_was_compared() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()
    compared = dict(re.findall(r"^\| ([^ |]+) \| (fast|general|refused|not compared)", page, re.MULTILINE))
    assert {name for name in FAST_TYPES if compared.get(name) != "fast"} == set()
    assert not FAST_TYPES.keys() & NOT_BUILT


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("bert", {}, "is an encoder"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized weights (gptq)"),
        ("llama", {"is_encoder_decoder": True}, "is an encoder-decoder"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(name: str, changes: dict[str, object], line: str) -> None:
    config = config_of(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(UserError) as refused:
        choose_path(config, "its/name")
    assert line in str(refused.value)
    assert "its/name" in str(refused.value)


def test_sequences_that_would_change_their_rotary_frequencies_are_refused() -> None:
    config = config_of("phi3-longrope")
    check_length(config, 8)
    with pytest.raises(UserError, match="other rotary frequencies"):
        check_length(config, 9)


def test_a_family_that_was_declared_wrongly_is_found_when_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid whose layers swallow the attention context: what version 0.6 trained on without a word."""
    save("qwen3_5_text", folder)
    monkeypatch.setitem(FAST_TYPES, "qwen3_5_text", FAMILIES[0])
    monkeypatch.setattr("corral.model.families.LAYER_TYPES", {"full_attention", "linear_attention"})
    with pytest.raises(UserError, match=r"packed sequences give other log-probs .* nats in the mean"):
        load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))
    monkeypatch.setattr("corral.model.model_loading.check_model", lambda *_: None)
    wrong = load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert compare_trainer(wrong, plain)[0] > 0.5
    engine = NativeEngine(wrong, None, max_sequences=4, max_prefill_tokens=64, max_length=64)
    with pytest.raises(UserError, match="decoding two sequences together gives other log-probs"):
        engine.check("its/name")
    engine.close()


def test_a_model_whose_tokens_see_what_is_behind_them_is_refused() -> None:
    config = config_of("bert")
    config.is_decoder = True
    model = tiny_family_model(config)
    model.config.is_decoder = False
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = False
    with pytest.raises(UserError, match="not a causal model"):
        check_model(model)


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ("tensor: 2", "`train.parallel.tensor: 2` does not divide the model's 9 attention heads"),
        ("tensor: 3, expert: 2", "`train.parallel.expert: 2`: the model has no experts"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_before_it_is_loaded(
    tmp_path: Path, parallel: str, problem: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"name: one\nmodel: {{path: SmolLM2-135M-Instruct}}\ndata: {{train: {{path: arithmetic:addition}}}}\n"
        f"cluster: {{devices_per_node: 6}}\ntrain: {{parallel: {{{parallel}}}}}\nschedule: {{steps: 1}}\n"
    )
    with pytest.raises(RecipeError) as error:
        checked_plan(load_recipe(tmp_path / "recipe.yaml"))
    assert problem in str(error.value)
