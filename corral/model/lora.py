"""Low-rank adapters (LoRA, Hu et al. 2021): a model whose own weights are frozen, and small matrices beside them that
are trained. A linear layer computes W x + s B A x, with A [rank, inputs] and B [outputs, rank].

The adapters are two more parameters of the linear layer itself, which keeps its name and its weight: fused layers,
tensor parallelism, FSDP, weight transfer and the engine work with such a model as with any other. PEFT wraps a layer in
another one instead, which renames every weight below it. Files are in PEFT's layout, and the function is PEFT's.

Adapters are never merged into the weights that the native engine decodes with: in bfloat16 the sum is rounded, so its
log-probs would be those of another model than the trainer's.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.recipe.errors import UserError
from corral.recipe.schema import Lora

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
PEFT_PREFIX = "base_model.model."
ADAPTERS = ("lora_A", "lora_B")
UNSUPPORTED = (
    "alora_invocation_tokens", "alpha_pattern", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_dora", "use_qalora",
)  # fmt: skip
"""Keys of PEFT's LoRA configuration under which it computes something else."""

_is_disabled: ContextVar[bool] = ContextVar("adapters_disabled", default=False)
"""Of this thread alone: an engine in another thread decodes with the same layers, and its adapters stay on."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Made out of a plain one by `add_adapters`."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        return add_adapter_outputs(F.linear(input, self.weight, self.bias), input, [self])


def add_adapter_outputs(outputs: Tensor, inputs: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """Adds what the adapters compute to the outputs of linear layers with the same input, which lie beside each other.

    With gradients it is two matrix products for all of them, the second with the B matrices on a block diagonal. An
    engine adds in place, layer by layer, and makes no matrix out of the parameters in each step.
    """
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
    if not adapted or _is_disabled.get():
        return outputs
    flat, rows = outputs.reshape(-1, outputs.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
    scale = adapted[0].lora_scale
    if torch.is_grad_enabled():
        dropped = F.dropout(rows, adapted[0].lora_dropout)
        low = F.linear(dropped, torch.cat([linear.lora_A for linear in adapted]))
        blocks = [
            linear.lora_B if isinstance(linear, LoraLinear) else outputs.new_zeros(len(linear.weight), 0)
            for linear in linears
        ]
        b = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        return torch.addmm(flat, low, b.T, alpha=scale).view_as(outputs)
    start = 0
    for linear in linears:
        end = start + len(linear.weight)
        if isinstance(linear, LoraLinear):
            flat[:, start:end].addmm_(F.linear(rows, linear.lora_A), linear.lora_B.T, alpha=scale)
        start = end
    return flat.view_as(outputs)


@contextmanager
def adapters_disabled() -> Iterator[None]:
    """Within it, models compute without their adapters: as the reference, which then needs no memory."""
    token = _is_disabled.set(True)
    try:
        yield
    finally:
        _is_disabled.reset(token)


# --- making a model with adapters


def add_adapters(model: Any, lora: Lora) -> None:
    """Freezes the model and gives its target layers adapters that compute 0: A is random, B zero, as in PEFT. Equal on
    all ranks and engines: the random numbers are a function of the layer's name."""
    targets = target_layers(model, lora)
    model.requires_grad_(False)
    model.lora = lora
    for name, linear in targets.items():
        like = linear.weight
        device = "cpu" if like.is_meta else like.device
        a = torch.empty(lora.rank, linear.in_features)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        set_class(linear, LoraLinear)
        linear.lora_A = nn.Parameter(a.to(device, like.dtype))
        linear.lora_B = nn.Parameter(torch.zeros(linear.out_features, lora.rank, dtype=like.dtype, device=device))
        linear.lora_scale, linear.lora_dropout = scale_of(lora), lora.dropout


def scale_of(lora: Lora) -> float:
    """s: alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023)."""
    return lora.resolved_alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def target_layers(model: Any, lora: Lora) -> dict[str, Any]:
    """The layers that get an adapter, by name. `all-linear`: those of the language model, without its head. Names are
    matched as PEFT does it: a whole name, or its end behind a dot."""
    linears = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, LoraLinear)}
    if lora.targets == "all-linear":
        head, decoder = model.get_output_embeddings(), set(model.get_decoder().modules())
        chosen = {name: module for name, module in linears.items() if module is not head and module in decoder}
        if not chosen:
            raise UserError(f"model.lora: {type(model).__name__} has no linear layers for adapters")
        return chosen
    found: dict[str, Any] = {}
    for target in lora.targets:
        own = {name: module for name, module in linears.items() if f".{name}".endswith(f".{target}")}
        if not own:
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise UserError(f"model.lora.targets: no linear layer is called {target}; there are {', '.join(ends)}")
        found |= own
    return {name: module for name, module in linears.items() if name in found}


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLinear) for module in model.modules())


def transferred_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What an engine that has the model gets after an update: its adapters where it has some, else everything."""
    parameters = dict(model.named_parameters())
    return ((name, parameters[name]) for name in transferred_names(model, parameters))


def transferred_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The same of names, which may be those of a model whose parameters are on other ranks."""
    only_adapters = has_adapters(model)
    return [name for name in names if not only_adapters or name.endswith(ADAPTERS)]


def bit_sums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The sum of each tensor's bits, read as numbers: to compare what was sent with what arrived."""
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    named = {name: t.contiguous().view(views[t.element_size()]).sum(dtype=torch.int64) for name, t in tensors}
    return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True)) if named else {}


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, summed in float32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Adds the adapters to the weights, and leaves plain layers behind."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.weight.copy_(merged_weight(module.weight, module.lora_A, module.lora_B, module.lora_scale))
            del module.lora_A, module.lora_B
            set_class(module, nn.Linear)


def set_class(module: Any, new: type[nn.Linear]) -> None:
    module.__class__ = new


# --- PEFT's files


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter in PEFT's layout."""

    path: Path
    base: str
    """Name or folder of the model that it belongs to."""
    lora: Lora

    @classmethod
    def find(cls, path: str) -> "AdapterFolder | None":
        """None where the path is not a folder with an adapter. UserError for adapters of a kind that is not LoRA."""
        folder = Path(path).expanduser()
        if not (folder / ADAPTER_CONFIG).is_file():
            return None
        try:
            config = json.loads((folder / ADAPTER_CONFIG).read_text())
            return cls(folder, str(config["base_model_name_or_path"]), lora_of(config, folder))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / ADAPTER_CONFIG} is not a configuration of PEFT: {error!r}") from error

    def load_into(self, model: Any) -> None:
        """Fills the model's adapters. All tensors of the folder must find their place, and all adapters a tensor."""
        from safetensors.torch import load_file

        stored = load_file(self.path / f"{ADAPTER_STEM}.safetensors")
        wanted = {peft_name(name): p for name, p in model.named_parameters() if name.endswith(ADAPTERS)}
        if odd := stored.keys() ^ wanted.keys():
            where = "a tensor that the model has no place for" if min(odd) in stored else "no tensor"
            raise UserError(f"{self.path} does not fit the model: it has {where}: {min(odd)}")
        for name, parameter in wanted.items():
            if stored[name].shape != parameter.shape:
                raise UserError(
                    f"{self.path} does not fit the model: {name} is {list(stored[name].shape)}, not "
                    f"{list(parameter.shape)}"
                )
            parameter.data.copy_(stored[name])


def lora_of(config: dict[str, Any], folder: Path) -> Lora:
    """The recipe's form of a PEFT configuration. What Corral does not compute is refused."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} has an adapter of the kind {config.get('peft_type')}; only LORA is supported")
    for key in UNSUPPORTED:
        if config.get(key) not in (None, False, "none", [], {}):
            raise UserError(f"{folder} has an adapter with `{key}: {config[key]}`, which Corral does not compute")
    targets = config["target_modules"]
    return Lora(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=targets if targets == "all-linear" else list(targets),
        dropout=config.get("lora_dropout", 0.0),
        rslora=config.get("use_rslora", False),
    )


def peft_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.lora_A` as PEFT calls it."""
    return f"{PEFT_PREFIX}{name}.weight"


def write_adapter_config(model: Any, folder: Path) -> None:
    """Writes what PEFT needs to load the adapter: `PeftModel.from_pretrained(model, folder)`."""
    lora: Lora = model.lora
    folder.mkdir(parents=True, exist_ok=True)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    ends = {name.rpartition(".")[2] for name in adapted}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_end = {name for name in linears if name.rpartition(".")[2] in ends}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config._name_or_path,
        "r": lora.rank,
        "lora_alpha": lora.resolved_alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        # Ends of names are shorter, where they mean the same layers.
        "target_modules": sorted(ends if by_end == adapted else adapted),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
