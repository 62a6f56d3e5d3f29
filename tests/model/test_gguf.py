"""A GGUF file as a model. The file is written with the `gguf` package, which also says what its numbers are."""

import asyncio
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tiny_families import VOCABULARY, compare_engine, compare_trainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from corral.model.builtin_models import BLANK_CHAT_TEMPLATE, needs_conversion
from corral.model.families import find_path
from corral.model.model_loading import load_model, load_tokenizer
from corral.recipe.errors import UserError
from corral.recipe.schema import Model
from corral.recipe.shape import ModelShape, UnknownShape

CPU = torch.device("cpu")
TOKENS = ["<|pad|>", "<|start|>", "<|end|>", *sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+=Ġ")), "ab"]
CONFIG = Qwen2Config(
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{
        f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}"
        for layer in range(CONFIG.num_hidden_layers)
        for ours, theirs in {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items()
    },
}
TYPES = {"token_embd.weight": gguf.GGMLQuantizationType.Q4_0, "output.weight": gguf.GGMLQuantizationType.Q8_0}
"""The embedding and the head are quantized differently, as in Qwen's own files."""


def write_gguf(file: Path, without: str = "") -> dict[str, torch.Tensor]:
    """Writes a small Qwen2, and returns the weights that the file stands for. `without`: a tensor that is left out."""
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    tokens = TOKENS + [f"<unused{number}>" for number in range(CONFIG.vocab_size - len(TOKENS))]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * (len(tokens) - len(TOKENS)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(BLANK_CHAT_TEMPLATE)
    stored = {}
    for name, weight in Qwen2ForCausalLM(CONFIG).state_dict().items():
        stem, _, end = name.rpartition(".")
        theirs, values = f"{NAMES[stem]}.{end}", (weight * 20 if weight.ndim == 2 else weight).numpy()
        kind = TYPES.get(theirs, gguf.GGMLQuantizationType.Q5_0)
        if weight.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        written = quantize(values, kind)
        stored[name] = torch.from_numpy(np.array(dequantize(written, kind))).reshape(weight.shape)
        if theirs != without:
            writer.add_tensor(theirs, written, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "tiny.gguf"


def test_trainer_and_engine_compute_what_the_file_says(file: Path) -> None:
    stored = write_gguf(file)
    model = Model(path=str(file), dtype="float32")
    assert needs_conversion(model.path)
    with pytest.raises(UnknownShape, match="converted when it is first loaded"):
        ModelShape.read(model.path)
    ours = load_model(model, CPU)
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    plain = Qwen2ForCausalLM(CONFIG).eval()
    plain.load_state_dict(stored)
    assert max(compare_trainer(ours, plain)) < 1e-5
    assert asyncio.run(compare_engine(ours, plain, paged=False)) < 1e-5
    assert not needs_conversion(model.path)
    shape, path = ModelShape.read(model.path), find_path(model)
    assert (shape.num_layers, shape.num_kv_heads, shape.tie_word_embeddings) == (2, 2, False)
    assert path is not None
    assert path.kind == "fast"


def test_its_tokenizer_has_the_template_and_the_end_token(file: Path) -> None:
    write_gguf(file)
    tokenizer = load_tokenizer(Model(path=str(file)))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)
    assert text == "<|start|>user\n1+2=<|end|>\n"
    assert tokenizer.encode("1+2=<|end|>") == [TOKENS.index(token) for token in ("1", "+", "2", "=", "<|end|>")]
    assert tokenizer.eos_token == "<|end|>"


def test_a_changed_file_is_converted_again(file: Path) -> None:
    stored = write_gguf(file)
    load_model(Model(path=str(file)), CPU)
    with file.open("r+b") as opened:  # the last value of the last tensor
        opened.seek(-1, 2)
        opened.write(b"\x7f")
    assert needs_conversion(str(file))
    assert len(stored) == len(load_model(Model(path=str(file)), CPU).state_dict())


@pytest.mark.parametrize("without", ["blk.1.attn_q.bias", "output_norm.weight"])
def test_a_file_that_lacks_a_tensor_is_refused(file: Path, without: str) -> None:
    write_gguf(file, without)
    with pytest.raises(UserError, match=r"lacks 1 tensors of the model, such as (model|lm_head)"):
        load_model(Model(path=str(file)), CPU)
    assert needs_conversion(str(file))


def test_a_damaged_file_and_one_that_is_not_there_are_one_line(file: Path) -> None:
    with pytest.raises(UserError, match=r"^model.path: there is no file .*tiny.gguf$"):
        load_model(Model(path=str(file)), CPU)
    write_gguf(file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:40], b"no such format" * 99, b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"^model.path: .*tiny.gguf could not be converted: .*$"):
            load_model(Model(path=str(file)), CPU)
