"""Low-rank adapters (LoRA, Hu et al. 2021): a model whose own weights are frozen, and small matrices beside them that
are trained. A linear layer computes W x + s B A x, with A [rank, inputs] and B [outputs, rank].

The adapters are two more parameters of the linear layer itself, which keeps its name and its weight: fused layers,
tensor parallelism, FSDP, weight transfer and the engine work with such a model as with any other. PEFT wraps a layer in
another one instead, which renames every weight below it. Files are in PEFT's layout, and the function is PEFT's.

Experts of a mixture are one tensor for each kind of matrix; their adapters are A [experts, rank, inputs] and B
[experts, outputs, rank], parameters of the module that has the experts. PEFT keeps them as matrices
(`target_parameters`), and adds B A to the weights in each forward pass; here rows of tokens are multiplied with the
adapters of their experts.

Adapters are never merged into the weights that the native engine decodes with: in bfloat16 the sum is rounded, so its
log-probs would be those of another model than the trainer's.
"""

import json
import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.model.experts import compute_experts, expert_matrices, grouped_linear
from corral.recipe.errors import UserError
from corral.recipe.schema import Lora, Quantization

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
QUANTIZATION = "quantization.json"
"""Says how the weights were rounded beside which an adapter was trained. PEFT has no place for it."""
PEFT_PREFIX = "base_model.model."
ADAPTERS = ("lora_A", "lora_B")
UNSUPPORTED = (
    "alora_invocation_tokens", "alpha_pattern", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save", "rank_pattern",
    "trainable_token_indices", "use_dora", "use_qalora",
)  # fmt: skip
"""Keys of PEFT's LoRA configuration under which it computes something else."""

EXPERTS_OF_OLD = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Ends of names that PEFT takes for experts as transformers 4 had them, in a mixture, though they be shared experts or
dense layers. It finds these by their weights (`target_parameters`)."""
ROW_ALIGNMENT = 16
"""Bytes of which a row is a multiple in torch's grouped matrix product."""
EXPERT_ADAPTER = re.compile(r"(?P<module>.+)\.(?P<matrix>\w+)_(?P<adapter>lora_[AB])")
"""Name of an adapter of experts: `model.layers.0.mlp.experts.down_proj_lora_A`."""

_is_disabled: ContextVar[bool] = ContextVar("adapters_disabled", default=False)
"""Of this thread alone: an engine in another thread decodes with the same layers, and its adapters stay on."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Made out of a plain one by `add_adapters`."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        return add_adapter_outputs(super().forward(input), input, [self])


class LoraExperts(nn.Module):
    """The experts of a layer, some of whose matrices have adapters. Made out of plain ones by `add_adapters`: each
    family's class has one of its own (`lora_experts_class`)."""

    lora_matrices: tuple[str, ...]
    """Names of the tensors that have adapters."""
    lora_scale: float
    is_transposed: bool
    """Whether the family keeps matrices as [inputs, outputs]."""

    def forward(self, tokens: Tensor, experts_of_token: Tensor, weights: Tensor) -> Tensor:
        if _is_disabled.get():
            plain: Tensor = super().forward(tokens, experts_of_token, weights)
            return plain
        project = partial(self._project, self.adapters())
        return compute_experts(self, project, tokens, experts_of_token, weights)

    def adapters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """A and B, by the name of their tensor."""
        return {name: (getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")) for name in self.lora_matrices}

    def _project(self, adapters: dict[str, Any], name: str, rows: Tensor, ends: Tensor) -> Tensor:
        weight = getattr(self, name)
        outputs = grouped_linear(rows, weight.transpose(1, 2) if self.is_transposed else weight, ends)
        if name not in adapters:
            return outputs
        a, b = adapters[name]
        short = -a.shape[1] % (ROW_ALIGNMENT // a.element_size())
        if short:
            a, b = F.pad(a, (0, 0, 0, short)), F.pad(b, (0, short))
        return outputs + grouped_linear(self.lora_scale * grouped_linear(rows, a, ends), b, ends)


@cache
def lora_experts_class(plain: Any) -> type[nn.Module]:
    return type(f"Lora{plain.__name__}", (LoraExperts, plain), {})


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
        end = start + len(linear.lora_B if isinstance(linear, LoraLinear) else linear.weight)
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
    targets = AdapterTargets.of(model, lora)
    model.requires_grad_(False)
    model.lora, model.lora_targets, model.lora_quantization = lora, targets, None
    for name in targets.linears:
        linear = model.get_submodule(name)
        set_class(linear, LoraLinear)
        shape = linear.out_features, linear.in_features
        linear.lora_A, linear.lora_B = new_adapter(name, lora.rank, linear.weight, shape)
        linear.lora_scale, linear.lora_dropout = scale_of(lora), lora.dropout
    for name in targets.matrices:
        module_name, _, matrix = name.rpartition(".")
        experts = model.get_submodule(module_name)
        check_experts(lora, module_name, experts)
        if not isinstance(experts, LoraExperts):
            family: Any = type(experts)
            set_class(experts, lora_experts_class(family))
            experts.lora_matrices, experts.lora_scale = (), scale_of(lora)
        experts.lora_matrices += (matrix,)
        weight = getattr(experts, matrix)
        shape = weight.shape[-2:] if not experts.is_transposed else weight.shape[:-3:-1]
        a, b = new_adapter(name, lora.rank, weight, shape, experts.num_experts)
        setattr(experts, f"{matrix}_lora_A", a)
        setattr(experts, f"{matrix}_lora_B", b)


def new_adapter(
    name: str, rank: int, like: Tensor, shape: tuple[int, int], num_experts: int | None = None
) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of a matrix of this shape (outputs, inputs), or of one for each expert."""
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    a = torch.empty(rank * (num_experts or 1), num_inputs)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    b = torch.zeros(num_outputs, rank)
    if num_experts is not None:
        a, b = a.unflatten(0, (num_experts, rank)), torch.zeros(num_experts, num_outputs, rank)
    device = "cpu" if like.is_meta else like.device
    return nn.Parameter(a.to(device, like.dtype)), nn.Parameter(b.to(device, like.dtype))


def scale_of(lora: Lora) -> float:
    """s: alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023)."""
    return lora.resolved_alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


@dataclass(frozen=True)
class AdapterTargets:
    """Names of what has adapters, in the model's order."""

    linears: list[str]
    matrices: list[str]
    """Tensors of experts: `model.layers.0.mlp.experts.down_proj`."""
    linear_ends: list[str]
    """The ends of their names, where no other layer has such an end; else the names."""
    matrix_ends: list[str]
    in_mixture: bool
    """Whether the model has experts."""

    @classmethod
    def of(cls, model: Any, lora: Lora) -> "AdapterTargets":
        """`all-linear`: all linear layers and experts of the language model, without its head. Other names are matched
        as PEFT does it: a whole name, or its end behind a dot; that of experts with their module, as
        `experts.down_proj`, where linear layers are called the same. UserError for a name that is not there."""
        head, decoder = model.get_output_embeddings(), set(model.get_decoder().modules())
        modules = dict(model.named_modules())
        all_linears = [name for name, module in modules.items() if type(module) is nn.Linear]
        all_matrices = [f"{name}.{matrix}" for name, module in modules.items() for matrix in expert_matrices(module)]
        if lora.targets == "all-linear":
            linears = [name for name in all_linears if modules[name] in decoder and modules[name] is not head]
            matrices = [name for name in all_matrices if modules[name.rpartition(".")[0]] in decoder]
            if not linears and not matrices:
                raise UserError(f"model.lora: {type(model).__name__} has no linear layers for adapters")
        else:
            linears = [name for name in all_linears if is_called(name, lora.targets)]
            if of_head := [name for name in linears if modules[name] is head]:
                raise UserError(f"model.lora.targets: {of_head[0]} is the model's head, and adapters are not for it")
            of_experts = [end for end in lora.targets if "." in end or not any(is_called(n, [end]) for n in linears)]
            matrices = [name for name in all_matrices if is_called(name, of_experts)]
            for end in lora.targets:
                if not any(is_called(name, [end]) for name in (*linears, *matrices)):
                    ends = {last_parts(name, 1) for name in all_linears} | {
                        last_parts(name, 2) for name in all_matrices
                    }
                    there = ", ".join(sorted(ends))
                    raise UserError(f"model.lora.targets: no linear layer is called {end}; there are {there}")
        return cls(
            linears,
            matrices,
            shortest_ends(linears, all_linears, 1),
            shortest_ends(matrices, all_matrices, 2),
            in_mixture=bool(all_matrices),
        )


def is_called(name: str, ends: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def last_parts(name: str, num_parts: int) -> str:
    return ".".join(name.split(".")[-num_parts:])


def shortest_ends(names: Collection[str], among: Iterable[str], num_parts: int) -> list[str]:
    """The last parts of the names where these are the only ones with such ends, else the names."""
    ends = {last_parts(name, num_parts) for name in names}
    return sorted(ends if {name for name in among if is_called(name, ends)} == set(names) else names)


def check_experts(lora: Lora, name: str, experts: nn.Module) -> None:
    """UserError for experts that cannot have adapters."""
    if not hasattr(experts, "_apply_gate"):  # which transformers gives to all that it computes by groups
        raise UserError(
            f"model.lora.targets: experts of the kind {type(experts).__name__} cannot have adapters; name the layers "
            "that get some"
        )
    if lora.dropout:
        raise UserError(
            f"model.lora.dropout: adapters of experts ({name}) have none, nor have PEFT's; leave it out, or let "
            "`model.lora.targets` name linear layers only"
        )


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLinear | LoraExperts) for module in model.modules())


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


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight that has an adapter."""

    adapters: tuple[str, str]
    """Names of A and B."""
    scale: float
    is_transposed: bool = False


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """Weights that have adapters, by name."""
    found: dict[str, AdaptedWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            found[f"{name}.weight"] = AdaptedWeight((f"{name}.lora_A", f"{name}.lora_B"), module.lora_scale)
        elif isinstance(module, LoraExperts):
            for matrix in module.lora_matrices:
                both = f"{name}.{matrix}_lora_A", f"{name}.{matrix}_lora_B"
                found[f"{name}.{matrix}"] = AdaptedWeight(both, module.lora_scale, module.is_transposed)
    return found


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, is_transposed: bool = False) -> Tensor:
    """W + s B A, summed in float32."""
    product = b.float() @ a.float()
    return torch.add(weight.float(), product.mT if is_transposed else product, alpha=scale).to(weight.dtype)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Adds the adapters to the weights, and leaves plain layers behind."""
    parameters = dict(model.named_parameters())
    for name, adapted in adapted_weights(model).items():
        a, b = (parameters[adapter] for adapter in adapted.adapters)
        parameters[name].copy_(merged_weight(parameters[name], a, b, adapted.scale, adapted.is_transposed))
        for adapter in adapted.adapters:
            module, _, own = adapter.rpartition(".")
            delattr(model.get_submodule(module), own)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            set_class(layer, nn.Linear)
        elif isinstance(layer, LoraExperts):
            set_class(layer, type(layer).__bases__[1])


def set_class(module: Any, new: type[nn.Module]) -> None:
    module.__class__ = new


# --- PEFT's files


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter in PEFT's layout."""

    path: Path
    base: str
    """Name or folder of the model that it belongs to."""
    lora: Lora
    quantization: Quantization | None = None
    """How the weights were rounded beside which Corral trained it."""
    encoded_from: torch.dtype | None = None
    """The dtype of those weights before."""

    @classmethod
    def find(cls, path: str) -> "AdapterFolder | None":
        """None where the path is not a folder with an adapter. UserError for adapters of a kind that is not LoRA."""
        folder = Path(path).expanduser()
        if not (folder / ADAPTER_CONFIG).is_file():
            return None
        try:
            config = json.loads((folder / ADAPTER_CONFIG).read_text())
            adapter = cls(folder, str(config["base_model_name_or_path"]), lora_of(config, folder))
            if not (folder / QUANTIZATION).is_file():
                return adapter
            rounding = json.loads((folder / QUANTIZATION).read_text())
            dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[rounding["dtype"]]
            return replace(adapter, quantization=Quantization(bits=rounding["bits"]), encoded_from=dtype)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / ADAPTER_CONFIG} is not a configuration of PEFT: {error!r}") from error

    def load_into(self, model: Any) -> None:
        """Fills the model's adapters. All tensors of the folder must find their place, and all adapters a tensor."""
        from safetensors.torch import load_file

        stored = load_file(self.path / f"{ADAPTER_STEM}.safetensors")
        own = {name: p for name, p in model.named_parameters() if name.endswith(ADAPTERS)}
        wanted = {peft: own[name] for name, peft in peft_names(own).items()}
        if odd := stored.keys() ^ wanted.keys():
            where = "a tensor that the model has no place for" if min(odd) in stored else "no tensor"
            raise UserError(f"{self.path} does not fit the model: it has {where}: {min(odd)}")
        for name, parameter in wanted.items():
            if stored[name].shape != (shape := as_peft(name, parameter).shape):
                raise UserError(
                    f"{self.path} does not fit the model: {name} is {list(stored[name].shape)}, not {list(shape)}"
                )
            parameter.data.copy_(from_peft(name, stored[name], parameter.shape))


def lora_of(config: dict[str, Any], folder: Path) -> Lora:
    """The recipe's form of a PEFT configuration. What Corral does not compute is refused."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} has an adapter of the kind {config.get('peft_type')}; only LORA is supported")
    for key in UNSUPPORTED:
        if config.get(key) not in (None, False, "none", [], {}):
            raise UserError(f"{folder} has an adapter with `{key}: {config[key]}`, which Corral does not compute")
    targets = config["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":  # a regular expression
        targets = stored_layers(folder)
    if parameters := config.get("target_parameters") or []:
        if targets == "all-linear":
            raise UserError(f"{folder} has an adapter of all linear layers and of parameters; name the layers")
        # The weight of a linear layer, or a tensor of experts; its name alone could be that of linear layers, too.
        names = (name.removesuffix(".weight") if "." in name else f"experts.{name}" for name in parameters)
        targets = [*(targets or ()), *names]
    return Lora(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=targets if targets == "all-linear" else list(targets),
        dropout=config.get("lora_dropout", 0.0),
        rslora=config.get("use_rslora", False),
    )


def stored_layers(folder: Path) -> list[str]:
    """Names of the layers that an adapter in PEFT's layout has tensors for."""
    from safetensors import safe_open

    with safe_open(folder / f"{ADAPTER_STEM}.safetensors", framework="pt") as file:
        names = {name.rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    return sorted(name.removeprefix(PEFT_PREFIX) for name in names)


def peft_names(names: Iterable[str]) -> dict[str, str]:
    """PEFT's names of adapters: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. It wraps experts once
    for each of their matrices that has an adapter, so those of all but the last one are below a `base_layer`. `names`:
    those of all adapters, in the model's order."""
    names, matrices = list(names), dict[str, list[str]]()
    matches = {name: match for name in names if (match := EXPERT_ADAPTER.fullmatch(name))}
    for match in matches.values():
        own = matrices.setdefault(match["module"], [])
        own.extend([match["matrix"]] if match["matrix"] not in own else [])
    found = {name: f"{PEFT_PREFIX}{name}.weight" for name in names}
    for name, match in matches.items():
        own = matrices[match["module"]]
        below = ".base_layer" * (len(own) - 1 - own.index(match["matrix"]))
        found[name] = f"{PEFT_PREFIX}{match['module']}{below}.{match['adapter']}.weight"
    return found


def as_peft(name: str, adapter: Tensor) -> Tensor:
    """An adapter in PEFT's form. Those of experts are a matrix there: A has the experts' rows one after the other, the
    columns of B are those of rank 0 of all experts, of rank 1, and so on."""
    if adapter.dim() == 2:
        return adapter
    return adapter.flatten(0, 1) if "lora_A" in name else adapter.permute(1, 2, 0).flatten(1)


def from_peft(name: str, stored: Tensor, shape: torch.Size) -> Tensor:
    """The reverse of `as_peft`."""
    if len(shape) == 2:
        return stored
    return stored.view(shape) if "lora_A" in name else stored.unflatten(1, (-1, shape[0])).permute(2, 0, 1)


def write_adapter_config(model: Any, folder: Path) -> None:
    """Writes what PEFT needs to load the adapter: `PeftModel.from_pretrained(model, folder)`."""
    lora: Lora = model.lora
    targets: AdapterTargets = model.lora_targets
    folder.mkdir(parents=True, exist_ok=True)
    by_weight: list[str] = []
    if targets.in_mixture and not lora.dropout:
        by_weight = [end for end in targets.linear_ends if last_parts(end, 1) in EXPERTS_OF_OLD]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config._name_or_path,
        "r": lora.rank,
        "lora_alpha": lora.resolved_alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": [end for end in targets.linear_ends if end not in by_weight],
        "target_parameters": [*targets.matrix_ends, *(f"{end}.weight" for end in by_weight)] or None,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if (quantization := model.lora_quantization) is not None:
        rounding = {"bits": quantization.bits, "dtype": str(model.encoded_from).removeprefix("torch.")}
        (folder / QUANTIZATION).write_text(json.dumps(rounding) + "\n")
