"""A model's shape, read from its `config.json` alone: how many parameters it has and what a token costs in memory."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.hub import cached_model, is_gguf
from corral.recipe.errors import UserError, first_line, one_line

PLAIN_MLP = {
    "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "fuyu", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gptj", "jais2", "nanochat", "nemotron", "opt", "persimmon", "phi", "starcoder2",
}  # fmt: skip
"""Model types whose feed-forward layer has two matrices; all others have three (gate, up, down)."""
QKV_BIAS = {"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi"}
"""Model types with a bias on queries, keys and values that their configuration does not mention."""
TIED_EMBEDDINGS = {
    "biogpt", "bloom", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "ernie4_5", "ernie4_5_moe",
    "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "gpt2", "gpt_bigcode", "gpt_neox_japanese", "granite_swa", "minicpm3", "opt", "smollm3",
    "starcoder2", "vaultgemma", "youtu", "zaya",
}  # fmt: skip
"""Model types whose head is the embedding unless their configuration says otherwise; files leave such defaults out."""
OTHER_LAYERS = {
    "bailing_hybrid", "bamba", "doge", "falcon_h1", "git", "got_ocr2", "hrm_text", "jamba", "jetmoe", "kimi_linear",
    "lfm2", "lfm2_moe", "minimax", "moshi", "moss_transcribe_diarize", "nemotron_h", "olmo_hybrid", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
    "recurrent_gemma", "zamba", "zamba2",
}  # fmt: skip
"""Model types with layers, or parts for images and sound, whose parameters or caches are not counted here."""
LAYERS = ("num_hidden_layers", "n_layer")
MAX_LAYERS, MAX_SIZE = 10_000, 2**32
"""Larger numbers are of a damaged file; a plan, or transformers, would count up to them."""
OTHER_LAYER_TYPES = {"linear_attention", "mamba"}
"""Entries of `layer_types` of which the same holds; not every file of a model type above has that key."""


class UnknownShape(UserError):
    """A configuration does not say what a decoder with attention has."""


@dataclass(frozen=True)
class ModelShape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys, and of values unless `value_dim` is set."""
    intermediate_size: int
    """Of one expert, where there are experts."""
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 0
    """0: a dense model."""
    experts_per_token: int = 0
    shared_expert_size: int = 0
    num_dense_layers: int = 0
    """Layers without experts in a model that has them."""
    dense_intermediate_size: int = 0
    mlp_matrices: int = 3
    qkv_bias: bool = False
    qk_norm: bool = False
    has_fused_layers: bool = False
    """Whether a GPU computes its layers with Corral's own kernels; see `corral/model/fused_layers.py`."""
    vision_parameters: int = 0
    """Of the part that reads images, where there is one; about."""
    value_dim: int = 0
    """Width of a head's values, where it is another than that of its keys."""
    latent_parameters: int = 0
    """Of one layer's matrices that make queries, keys and values, where they come from latent vectors."""
    layer_embeddings: int = 0
    """Parameters of embeddings that layers have of their own (Gemma 3n and 4)."""

    @classmethod
    def find(cls, path: str) -> "ModelShape | None":
        """What `read` returns; None where the shape is unknown."""
        try:
            return cls.read(path)
        except UnknownShape:
            return None

    @classmethod
    def read(cls, path: str) -> "ModelShape":
        """Of a folder, a built-in model, or a hub name whose configuration is in the hub's cache here. UnknownShape for
        other hub names, since nothing is downloaded for a plan; and for a model without attention heads, or with other
        layers beside them (Mamba, RWKV, Jamba, Qwen3-Next), whose memory is not estimated."""
        path = base_model(path)
        if path.lower() == "smollm2-135m-instruct":
            return SMOLLM2_135M
        if path.lower() == "blank-1m":
            return BLANK_1M
        if path.lower() == "blank-vision-1m":
            return BLANK_VISION_1M
        folder = model_folder(path)
        if folder is None and is_gguf(path):
            raise UnknownShape(f"{path} is converted when it is first loaded, and a plan knows its shape after that")
        if folder is None:
            raise UnknownShape(
                f"{path} is not on this machine, and a plan downloads nothing; `model.path` may be a folder with its "
                "config.json alone"
            )
        return cls.from_folder(folder)

    @classmethod
    def from_folder(cls, path: Path | str) -> "ModelShape":
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            checkpoints = sorted(file.parent.glob("checkpoints/step_*"))
            hint = f"; {path} is a run, so name its checkpoint {checkpoints[-1]}" if checkpoints else ""
            raise UserError(f"{file}: cannot be read: {error.strerror}{hint}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}: is not valid JSON: {first_line(error)}") from None
        if not isinstance(config, dict):
            raise UserError(f"{file}: is not a model's configuration")
        with one_line(f"{file}: is not a model's configuration"):
            return cls.from_config(config, str(file))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> "ModelShape":
        keys = _Keys({**config, **(config.get("text_config") or {})}, source)
        hidden, heads = keys.number("hidden_size", "n_embd", "d_model"), keys.number("num_attention_heads", "n_head")
        kind = str(keys.config.get("model_type", ""))
        if other := OTHER_LAYERS & {kind, config.get("model_type")}:
            raise UnknownShape(f"{source}: the layers of `{other.pop()}` are of kinds that are not counted")
        if types := OTHER_LAYER_TYPES.intersection(keys.config.get("layer_types") or ()):
            raise UnknownShape(f"{source}: layers of the type `{types.pop()}` are not counted")
        dense = keys.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        layers = keys.number(*LAYERS)
        experts = keys.number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
        expert_size = keys.number("moe_intermediate_size", default=dense)
        shared = keys.number("n_shared_experts", "moe_num_shared_experts", default=0) * expert_size
        if size := keys.number("intermediate_size_mlp", default=0):  # Llama 4
            dense, shared = size, expert_size
        if keys.config.get("enable_moe_block"):  # Gemma 4 has experts beside its dense feed-forward layer
            shared = dense
        kv_heads = keys.number("num_key_value_heads", "num_kv_heads", default=heads) or heads
        if keys.config.get("multi_query") and not keys.config.get("new_decoder_architecture"):
            kv_heads = 1
        head_dim, value_dim, latent = keys.number("head_dim", default=0) or hidden // heads, 0, 0
        if kv_rank := keys.number("kv_lora_rank", default=0):
            rotated, q_rank = keys.number("qk_rope_head_dim"), keys.number("q_lora_rank", default=0)
            head_dim, value_dim = keys.number("qk_nope_head_dim") + rotated, keys.number("v_head_dim")
            latent = hidden * (kv_rank + rotated) + kv_rank * heads * (head_dim - rotated + value_dim)
            latent += q_rank * (hidden + heads * head_dim) if q_rank else hidden * heads * head_dim
        per_layer = keys.number("hidden_size_per_layer_input", default=0)
        return cls(
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if latent else kv_heads,
            head_dim=head_dim,
            intermediate_size=expert_size if experts else dense,
            vocab_size=keys.number("vocab_size"),
            tie_word_embeddings=bool(
                config.get("tie_word_embeddings", keys.config.get("tie_word_embeddings", kind in TIED_EMBEDDINGS))
            ),
            num_experts=experts,
            experts_per_token=keys.number("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", default=0),
            shared_expert_size=keys.number("shared_expert_intermediate_size", default=shared),
            num_dense_layers=min(layers, _num_dense_layers(keys, layers)) if experts else 0,
            dense_intermediate_size=dense,
            mlp_matrices=2 if kind in PLAIN_MLP else 3,
            qkv_bias=bool(keys.config.get("attention_bias")) or kind in QKV_BIAS,
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            has_fused_layers=kind in ("llama", "mistral", "qwen2", "qwen3"),
            vision_parameters=_vision_parameters(config.get("vision_config"), hidden),
            value_dim=value_dim,
            latent_parameters=latent,
            layer_embeddings=layers * per_layer * keys.number("vocab_size_per_layer_input", default=0),
        )

    @property
    def attention_size(self) -> int:
        """Width of queries, keys and values together."""
        return self.num_heads * self.head_dim + self.kv_size

    @property
    def kv_size(self) -> int:
        """Width of keys and values together."""
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def output_size(self) -> int:
        """Width of what attention gives, before its last matrix."""
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def attention_parameters(self) -> int:
        """Of the matrices of one layer's attention."""
        return (self.latent_parameters or self.hidden_size * self.attention_size) + self.hidden_size * self.output_size

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, the head unless it is the same, and layers' own embeddings."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.layer_embeddings

    @property
    def num_parameters(self) -> int:
        """Exact for the Llama, Qwen and Mixtral families; others within a tenth."""
        attention = self.attention_parameters
        attention += self.attention_size * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        norms = 2 * self.hidden_size
        mlps = self.num_dense_layers * self._mlp(self.dense_intermediate_size)
        mlps += (self.num_layers - self.num_dense_layers) * self._sparse_mlp()
        text = self.embedding_parameters + self.num_layers * (attention + norms) + mlps + self.hidden_size
        return text + self.vision_parameters

    def num_adapter_parameters(self, rank: int, targets: Collection[str] | None) -> int:
        """Of LoRA adapters of the rank on linear layers and experts of these names, or on all of them. Where a name is
        none of Llama's (`c_attn`, `kv_b_proj`) it is a bound: as if all linear layers but experts were named."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": self.kv_size - keys, "o_proj": self.output_size}
        sizes = {name: hidden + width for name, width in sizes.items()}
        sizes = {name: size * self.num_layers for name, size in sizes.items()}
        num_sparse = (self.num_layers - self.num_dense_layers) * bool(self.num_experts)
        num_dense = self.num_layers - num_sparse
        mlp = num_dense * (hidden + (self.dense_intermediate_size if self.num_experts else self.intermediate_size))
        mlp += num_sparse * (hidden + self.shared_expert_size) * bool(self.shared_expert_size)
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj")[-self.mlp_matrices :] if mlp else (), mlp)
        num_matrices = num_sparse * self.num_experts
        sizes["experts.gate_up_proj"] = num_matrices * (hidden + 2 * self.intermediate_size)
        sizes["experts.down_proj"] = num_matrices * (hidden + self.intermediate_size)
        wanted = set(sizes) if targets is None else {last_name(target, sizes) for target in targets}
        if not wanted <= set(sizes):
            wanted |= {name for name in sizes if not name.startswith("experts.")}
        return rank * sum(size for name, size in sizes.items() if name in wanted)

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of the experts that a token may or may not pass through; 0 in a dense model."""
        return (self.num_layers - self.num_dense_layers) * self.num_experts * self._mlp(self.intermediate_size)

    @property
    def num_quantizable_parameters(self) -> int:
        """Parameters of the linear layers but for the head, of a model without experts."""
        return self.num_layers * (self.attention_parameters + self._mlp(self.intermediate_size))

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters with which one token is multiplied: not those of experts that it does not pass through, nor an
        embedding that is not also the head."""
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        embedding += self.layer_embeddings
        active = self.num_expert_parameters * self.experts_per_token // max(1, self.num_experts)
        return self.num_parameters - self.vision_parameters - embedding - self.num_expert_parameters + active

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token."""
        return self.num_layers * self.kv_size

    @property
    def active_intermediate_size(self) -> int:
        """Width of the feed-forward layer that one token passes through."""
        return self.intermediate_size * max(1, self.experts_per_token) + self.shared_expert_size

    def _sparse_mlp(self) -> int:
        if not self.num_experts:
            return self._mlp(self.intermediate_size)
        router = self.hidden_size * self.num_experts
        return router + self.num_experts * self._mlp(self.intermediate_size) + self._mlp(self.shared_expert_size)

    def _mlp(self, width: int) -> int:
        return self.mlp_matrices * self.hidden_size * width


SMOLLM2_135M = ModelShape(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
    has_fused_layers=True,
)
BLANK_1M = ModelShape(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=384,
    vocab_size=259,
    tie_word_embeddings=True,
)
BLANK_VISION_1M = replace(BLANK_1M, num_layers=3, vocab_size=263, qkv_bias=True, vision_parameters=213_000)


def base_model(path: str) -> str:
    """The model that an adapter in PEFT's layout belongs to, such as of a checkpoint with `model.lora`; any other path
    as it is."""
    file = Path(path).expanduser() / "adapter_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):  # no adapter, or what loading will complain of
        return path
    return found if isinstance(found, str) else path


def model_folder(path: str) -> Path | None:
    """The folder that a recipe names, or that of a hub name in the hub's cache; None where neither is on this
    machine."""
    return written if (written := Path(path).expanduser()).is_dir() else cached_model(path)


@dataclass(frozen=True)
class _Keys:
    config: Mapping[str, Any]
    source: str

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the names that has a value; families call the same thing differently."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
                value = max(value)  # one for each layer, or each kind of layer
            if isinstance(value, int) and not isinstance(value, bool):
                largest = MAX_LAYERS if name in LAYERS else MAX_SIZE
                if not (default is None) <= value <= largest:
                    raise UserError(f"{self.source}: `{name}: {value}` is not one of a model")
                return value
        if default is None:
            raise UnknownShape(f"{self.source}: has no {' or '.join(names)}, so the model's shape is unknown")
        return default


def _num_dense_layers(keys: _Keys, layers: int) -> int:
    """DeepSeek starts with some; Qwen lists them, or makes every n-th layer sparse, as Llama 4."""
    listed = keys.config.get("mlp_only_layers") or []
    every = keys.number("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    first = keys.number("first_k_dense_replace", "moe_layer_start_index", default=0)
    return max(first, len(listed), layers - layers // max(1, every))


def _vision_parameters(config: Any, hidden: int) -> int:
    """Of a vision transformer as Qwen has it, which merges four patches into a token, behind its last layer and in
    Qwen3-VL behind others (`deepstack_visual_indexes`); 0 where the configuration is not of that kind."""
    keys = _Keys(config if isinstance(config, dict) else {}, "vision_config")
    width, depth = keys.number("embed_dim", "hidden_size", default=0), keys.number("depth", default=0)
    mlp = keys.number("intermediate_size", default=4 * width)
    matrices = 3 if keys.config.get("hidden_act") == "silu" else 2
    num_mergers = 1 + len(keys.config.get("deepstack_visual_indexes") or ())
    return depth * (4 * width * width + matrices * width * mlp) + num_mergers * 4 * width * (4 * width + hidden)


def last_name(target: str, names: Collection[str]) -> str:
    """What an entry of `model.lora.targets` is called in each layer: `experts.down_proj` of experts, if only they are
    called so, else `down_proj`."""
    last = target.rpartition(".")[2]
    return f"experts.{last}" if "experts" in target.split(".") or last not in names else last
