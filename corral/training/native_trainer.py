"""The native trainer: packed token trees, log-probs from hidden states in chunks, AdamW, on one process or on many.

Every pack is computed as a `TokenTree`: tokens with the same prefix once, forward and backward. The gradient is that of
the separate sequences, to rounding, and does not depend on how they were packed, nor on how the model and the packs are
sharded over processes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from corral.data.batch import Batch, Pack, Trajectory
from corral.kernels.host_to_device import on_device
from corral.model.attention import AttentionContext, TreeAttention, forward_hidden
from corral.model.experts import holds_experts
from corral.model.families import check_parallel
from corral.model.fused_layers import unfuse
from corral.model.general_forward import (
    SequenceForward,
    is_general,
    logprobs_of_logits,
    rows_by_sequence,
    sequence_hidden,
    sequence_logits,
    sequences_with_rows,
)
from corral.model.logprobs import OutputHead
from corral.model.lora import (
    ADAPTERS,
    adapted_weights,
    adapters_disabled,
    has_adapters,
    merged_weight,
    transferred_names,
)
from corral.model.model_check import check_model, difference_on_stage, probe_sequences, raise_if_packing_differs
from corral.model.model_parallel import ContextParallelAttention, distribute_tree, reduce_from_group
from corral.model.router_balance import RouterBalance
from corral.recipe.errors import RunError, UserError, one_line
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import LOGITS_CHUNK, GradientCheckpointing, Optimizer
from corral.training.activations import LayerActivations
from corral.training.optimizer import MasterOptimizer, UpdateResult
from corral.training.pipeline_schedule import PipelineSchedule
from corral.training.process_mesh import ProcessMesh
from corral.training.sharding import OwnRows, ShardedModel, check_offload, local_tensor
from corral.training.tensor_files import (
    DeferredWrites,
    TensorFiles,
    all_write,
    run_on_all_ranks,
    write_adapters,
    write_pretrained,
    write_tensors,
)

Result = TypeVar("Result")
MicroBatch = tuple[Pack | None, Callable[..., Tensor] | None]
"""A pack, and its contribution to the loss as a function of what the model computes of it."""

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
OPTIMIZER_KEYS = (*MOMENTS, "master")
"""What a checkpoint may hold of a parameter besides its weights."""


class _NativeTrainer:
    """What policy and critic have in common: a model on its mesh, its optimizer, the guard against losses that are not
    finite, and the optimizer's files."""

    def __init__(
        self,
        model: nn.Module,
        causal: Any,
        optimizer: Optimizer | None,
        total_updates: int,
        *,
        gradient_checkpointing: GradientCheckpointing,
        mesh: ProcessMesh | None,
        offload: Sequence[str],
        max_tokens: int | None,
        in_float32: Sequence[nn.Module] = (),
        with_router_loss: bool = False,
    ) -> None:
        """`causal`: the transformers model in `model`; modules beside it compute `in_float32`. Without an `optimizer`
        the model is frozen. A pack with more distinct tokens than `max_tokens` is computed in parts."""
        self.model: Any = model
        self.causal = causal
        self.mesh = mesh or ProcessMesh.build(MeshShape(), next(model.parameters()).device)
        check_offload(self.mesh, offload)
        if is_general(causal):
            check_parallel(type(causal).__name__, self.mesh.groups.keys(), hasattr(causal, "vision"))
        self.balance: RouterBalance | None = None
        if with_router_loss and is_general(causal):
            raise UserError("train.router_aux_loss_coef: models of the general path have no such loss; set it to 0")
        num_experts = {module.num_experts for module in causal.modules() if holds_experts(module)}
        if with_router_loss or (len(num_experts) == 1 and optimizer is not None and not is_general(causal)):
            self.balance = RouterBalance(causal, with_router_loss)
        if self.mesh.groups.keys() & {"tensor", "expert"}:
            unfuse(causal)  # these replace modules within the layers, which fused layers do not call
        self.sharded = ShardedModel(
            model,
            causal,
            self.mesh,
            trained=optimizer is not None,
            offload="parameters" in offload,
            in_float32=in_float32,
        )
        self.layout = self.sharded.layout
        self.pipeline = None if self.sharded.stage is None else PipelineSchedule(self.mesh, self.sharded.stage)
        if self.mesh.is_sharded:  # a whole one was checked when it was loaded
            self._check()
        self.optimizer: MasterOptimizer | None = None
        if optimizer is not None:
            self.optimizer = MasterOptimizer(
                model.named_parameters(), optimizer, total_updates, layout=self.layout, on_host="optimizer" in offload
            )
        self.max_tokens = max_tokens
        own_tokens = None if max_tokens is None else -(-max_tokens // self.mesh.size_of("context"))
        offloads = "activations" in offload
        self.activations = LayerActivations(causal, gradient_checkpointing, offload=offloads, max_tokens=own_tokens)
        self.has_bad_loss = False
        """Whether a loss since the last update was not finite."""
        self.saving = DeferredWrites(0)
        """What of the last checkpoint may still be copied."""

    def _check(self) -> None:
        """Compares the sharded model with its own plain forward pass; all ranks compute the same."""
        if self.sharded.exchange is not None:
            self.sharded.exchange.max_tokens = sum(len(sequence) for sequence in probe_sequences(self.causal))
        with torch.no_grad():
            if self.pipeline is None:
                self.sharded(lambda: check_model(self.causal))
            else:
                found = difference_on_stage(
                    self.causal, self.mesh.device, self.mesh.is_last_stage, self._through_stages
                )
                total = self.mesh.sum_numbers(torch.tensor(found, dtype=torch.float64), "pipeline")
                raise_if_packing_differs(self.causal, float(total), self.dtype)

    def _through_stages(self, num_tokens: int, compute: Callable[[], Tensor]) -> Tensor:
        """What this stage computes, without gradient, of the hidden states of the one before it."""
        assert self.pipeline is not None
        return self.pipeline.compute(num_tokens, partial(self._on_stage, compute))

    def _on_stage(self, compute: Callable[[], Result], received: Tensor | None) -> Result:
        """What this rank computes of its part of the model; `received`: of the pipeline stage before it."""
        if self.sharded.stage is not None:
            self.sharded.stage.received = received
        try:
            return self.sharded(compute)
        finally:
            if self.sharded.stage is not None:
                self.sharded.stage.received = None

    @property
    def dtype(self) -> torch.dtype:
        # Not that of the parameters: sharded ones that are trained are float32 whatever the model computes in.
        return self.layout.dtype

    @property
    def whole_model(self) -> Any | None:
        return None if self.mesh.is_sharded else self.model

    def _outputs(self, prediction: "PackPrediction") -> tuple[Tensor, ...]:
        """What the loss is a function of, [tokens of the pack] each."""
        raise NotImplementedError

    def _predict(self, pack: Pack | None) -> "PackPrediction":
        prediction = PackPrediction(pack or placeholder_pack(), self.mesh)
        if self.max_tokens is not None and pack is not None:
            prediction.is_long = pack.tree.num_nodes > self.max_tokens
        if self.sharded.exchange is not None:
            prediction.max_nodes = self.mesh.max(prediction.num_nodes, "expert")
            prediction.is_long = self.mesh.max(int(prediction.is_long), "expert") > 0
        if pack is None:
            prediction.num_own = 0
        return prediction

    def _forward(self, prediction: "PackPrediction", received: Tensor | None = None) -> tuple[Tensor, ...]:
        """The outputs for a pack, or on a pipeline stage before the last one its hidden states; all ranks that hold a
        part of one copy of the model compute at the same time."""
        self._announce(prediction)
        self.activations.begin()
        outputs = self._outputs if self.mesh.is_last_stage else self._hidden_states
        recording: AbstractContextManager[None] = nullcontext()
        if self.balance is not None and torch.is_grad_enabled():
            recording = self.balance.recording(prediction.num_own)
        with recording:
            return self._on_stage(partial(outputs, prediction), received)

    def take_expert_counts(self) -> list[list[int]]:
        groups = (self.mesh.groups[name] for name in ("context", "pipeline") if name in self.mesh.groups)
        return [] if self.balance is None else self.balance.take_counts(self.mesh.device, groups)

    def _announce(self, prediction: "PackPrediction") -> None:
        """Tells layers of which pack a pass is, and those with experts how many tokens other ranks have: with gradient
        checkpointing the backward pass computes them again, and a pipeline has other packs in between."""
        self.activations.is_long = prediction.is_long
        if self.sharded.exchange is not None:
            self.sharded.exchange.max_tokens = prediction.max_nodes

    def _hidden_states(self, prediction: "PackPrediction") -> tuple[Tensor]:
        # A copy: it is a view, and FSDP's hooks do not survive changes in place of one.
        return (prediction.hidden_of_nodes(self.causal).clone(),)

    def _compute(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        """The first output of each pack, without gradient; empty for None, and where there are none because later
        pipeline stages have them."""
        for pack in packs:
            result = torch.empty(0, device=self.mesh.device)
            if pack is not None or self.mesh.is_sharded:
                with torch.no_grad(), self.activations.applied():
                    computed = self._compute_one(self._predict(pack))
                result = computed if pack is not None and self.mesh.is_last_stage else result
            yield result

    def _compute_one(self, prediction: "PackPrediction") -> Tensor:
        if self.pipeline is None:
            return self._forward(prediction)[0]
        return self.pipeline.compute(prediction.num_nodes, lambda received: self._forward(prediction, received)[0])

    def forward_backward(self, micro_batches: Sequence["MicroBatch"]) -> float:
        with self.activations.applied():
            if self.pipeline is not None:
                return self._train_pipeline(self.pipeline, micro_batches)
            computed = [one for one in micro_batches if one[0] is not None or self.mesh.is_sharded]
            return sum(self._backward(self._loss(self._predict(one[0]), one)) for one in computed)

    def _train_pipeline(self, pipeline: PipelineSchedule, micro_batches: Sequence["MicroBatch"]) -> float:
        predictions = {index: self._predict(pack) for index, (pack, _) in enumerate(micro_batches)}
        num_tokens = [prediction.num_nodes for prediction in predictions.values()]
        contributions = []

        def forward(index: int, received: Tensor | None) -> Tensor:
            if self.mesh.is_last_stage:
                return self._loss(predictions[index], micro_batches[index], received)
            return self._forward(predictions[index], received)[0]

        def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
            self._announce(predictions.pop(index))  # it has attention masks on the device, which nobody needs any more
            if gradient is None:
                contributions.append(self._backward(output))
            else:
                output.backward(gradient)

        pipeline.train(num_tokens, forward, backward)
        return sum(contributions)

    def _loss(self, prediction: "PackPrediction", micro_batch: "MicroBatch", received: Tensor | None = None) -> Tensor:
        """A micro-batch's contribution to the loss; without a pack, 0."""
        pack, loss = micro_batch
        outputs = self._forward(prediction, received)
        if pack is None:
            return 0.0 * sum(outputs[1:], outputs[0]).sum()
        assert loss is not None, "a pack has a loss"
        return loss(*outputs)

    def _backward(self, loss: Tensor) -> float:
        """A loss that is not finite spoils the update. Its backward pass is computed all the same where other ranks
        wait for the gradients; and on a GPU, which would have to wait until the host knows the loss."""
        assert self.optimizer is not None, "a frozen model is not trained"
        copy = HostCopy(loss.detach())
        if loss.is_cuda or self.mesh.is_sharded or math.isfinite(copy.value):
            self.optimizer.backward(loss)
        self.has_bad_loss |= not math.isfinite(copy.value)
        return copy.value

    def step(self, scale: float = 1.0) -> UpdateResult:
        assert self.optimizer is not None, "a frozen model is not trained"
        self.saving.wait_for_copies()
        if self.mesh.any(self.has_bad_loss):
            self.has_bad_loss = False
            return self.optimizer.skip()
        return self.optimizer.step(scale)

    def zero_grad(self) -> None:
        assert self.optimizer is not None, "a frozen model is not trained"
        self.has_bad_loss = False
        self.optimizer.zero_grad()

    def copy_from(self, copy: int) -> None:
        assert self.optimizer is not None, "a frozen model is what it was loaded as"
        self.saving.wait_for_copies()
        self.has_bad_loss = False
        self.optimizer.copy_from(copy, self.mesh)

    def weights(self, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        if merged:
            yield from self._merged_weights()
            return
        parameters = dict(self.model.named_parameters())
        for name in transferred_names(self.model, self.layout.parameters):
            yield name, self.layout.gather_weight(name, parameters.get(name))

    def _merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.model.named_parameters())
        adapted = adapted_weights(self.model)
        for name in self.layout.parameters:
            if name.endswith(ADAPTERS):
                continue
            weight = self.layout.gather_weight(name, parameters.get(name))
            if name in adapted:
                a, b = (self.layout.gather_weight(one, parameters.get(one)) for one in adapted[name].adapters)
                weight = merged_weight(weight, a, b, adapted[name].scale, adapted[name].is_transposed)
            yield name, weight

    @torch.no_grad()
    def _check_finite(self, consequence: str) -> None:
        """Raises, on all ranks, where a trained weight is not a finite number: such a model is not to be kept."""
        trained = {name: local_tensor(p) for name, p in self.model.named_parameters() if p.requires_grad}
        largest = torch._foreach_norm([one for one in trained.values() if one.numel()], float("inf"))
        is_finite = torch.stack([norm.float() for norm in largest]).isfinite() if largest else torch.ones(1).bool()
        if self.mesh.any(not bool(is_finite.all())):
            bad = [name for name, weight in trained.items() if not bool(weight.isfinite().all())]
            own = f", here {len(bad)} of {len(trained)} tensors, such as {bad[0]}" if bad else ", on another device"
            raise RunError(f"weights are not finite{own}: {consequence}")

    @contextmanager
    def _deferring(self, deferred: DeferredWrites | None) -> Iterator[None]:
        """What is taken by `deferred` within it is copied from its end on, until the next update waits for that."""
        if deferred is None:
            yield
            return
        assert self.optimizer is not None
        states = (tensor for master in self.optimizer.masters for tensor in self.optimizer.state_of(master).values())
        kept = [*map(local_tensor, self.model.parameters()), *states]
        deferred.unchanged = {tensor.untyped_storage().data_ptr() for tensor in kept}
        yield
        self.saving = deferred
        deferred.start_copies()

    def _save_optimizer(
        self, folder: Path, writers: Sequence[int] | None, deferred: DeferredWrites | None = None
    ) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        states = {master.name: optimizer.state_of(master) for master in optimizer.masters}
        keys = self.mesh.merged({name: list(state) for name, state in states.items()}, "pipeline")
        dtypes = {"exp_avg": optimizer.state_dtype, "exp_avg_sq": optimizer.state_dtype}
        kinds = {
            (name, key): (dtypes.get(key, torch.float32), torch.Size() if key == "step" else self.layout[name].shape)
            for name in self.layout.parameters
            for key in OPTIMIZER_KEYS  # in this order on all ranks: states that were loaded are in any
            if key in keys.get(name, ())
        }

        put = self.layout.to_write if all_write(self.mesh, writers) else self.layout.gather

        def tensors() -> Iterator[tuple[str, Tensor | OwnRows]]:
            for (name, key), (dtype, shape) in kinds.items():
                local = states[name][key] if name in states else None
                if key == "step":
                    yield f"{name}.{key}", self.layout.from_stage(name, local, shape, dtype)
                else:
                    yield f"{name}.{key}", put(name, local, dtype)

        by_name = {f"{name}.{key}": kind for (name, key), kind in kinds.items()}
        write_tensors(folder, "optimizer", by_name, tensors(), self.mesh, writers, deferred)
        is_first = self.mesh.rank == (0 if writers is None else writers[0])
        text = json.dumps(optimizer.counters())

        def write() -> None:
            if is_first:
                (folder / "optimizer.json").write_text(text)

        run_on_all_ranks(self.mesh, write)

    def _load_optimizer(self, folder: Path) -> None:
        with one_line(f"the optimizer in {folder} cannot be read"):
            self._load_states(folder)

    def _load_states(self, folder: Path) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        files = TensorFiles(folder, "optimizer")
        unknown = files.names - {f"{name}.{key}" for name in self.layout.trained for key in OPTIMIZER_KEYS}
        if unknown:
            raise UserError(f"{folder} is the optimizer of another model: this one has no {min(unknown)}")
        for master in optimizer.masters:
            found = {key: files[name] for key in OPTIMIZER_KEYS if (name := f"{master.name}.{key}") in files.names}
            parts = {key: self._own_part(folder, master.name, key, tensor) for key, tensor in found.items()}
            if 0 < len(found.keys() - {"master"}) < len(MOMENTS):
                raise UserError(f"{folder} has only a part of the states of {master.name}")
            optimizer.load_state(master, parts)
        optimizer.load_counters(json.loads((folder / "optimizer.json").read_text()))

    def _own_part(self, folder: Path, name: str, key: str, whole: Tensor) -> Tensor:
        """This rank's part of a state, or of a weight of the critic. A kernel would go beyond one of another shape."""
        shape = torch.Size() if key == "step" else self.layout.kinds[name][1]
        if whole.shape != shape:
            what = f"{name}.{key} is {list(whole.shape)}, not {list(shape)}"
            raise UserError(f"{folder} is of another model: {what}")
        part = whole if key == "step" else self.layout.shard(name, whole)
        if not part.is_floating_point() or not part.isfinite().all():
            raise UserError(f"{folder}: {name}.{key} has numbers that are not finite; go on from another checkpoint")
        return part


class NativePolicyTrainer(_NativeTrainer):
    """The actor, or with `optimizer=None` the frozen reference."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        logits_chunk: int | None = None,
        optimizer: Optimizer | None = None,
        total_updates: int = 0,
        gradient_checkpointing: GradientCheckpointing = False,
        mesh: ProcessMesh | None = None,
        offload: Sequence[str] = (),
        max_tokens: int | None = None,
        with_router_loss: bool = False,
    ) -> None:
        super().__init__(
            model,
            model,
            optimizer,
            total_updates,
            gradient_checkpointing=gradient_checkpointing,
            mesh=mesh,
            offload=offload,
            max_tokens=max_tokens,
            with_router_loss=with_router_loss,
        )
        self.temperature = temperature
        self.logits_chunk = logits_chunk or LOGITS_CHUNK[self.mesh.device.type]

    def compute_logprobs(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        return self._compute(packs)

    def compute_reference_logprobs(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        assert has_adapters(self.model), "the reference is the model without its adapters"
        for pack in packs:
            with adapters_disabled():  # not while the caller has the result
                (logprobs,) = self._compute([pack])
            yield logprobs

    def router_loss(self) -> Tensor:
        assert self.balance is not None
        return self.balance.loss(self.mesh.groups.get("context"))

    def _outputs(self, prediction: "PackPrediction") -> tuple[Tensor, ...]:
        """(log-probs, entropy)"""
        of_target = prediction.row_of_target, prediction.targets
        if is_general(self.model):
            logits = prediction.by_sequence(partial(sequence_logits, self.model, images=prediction.images))
            logprobs, entropy = logprobs_of_logits(logits, *of_target, self.temperature)
        else:
            head = OutputHead.of_model(self.model)
            hidden = prediction.hidden(self.model)
            logprobs, entropy = head.logprobs(hidden, *of_target, temperature=self.temperature, chunk=self.logits_chunk)
        return prediction.to_tokens(logprobs), prediction.to_tokens(entropy[prediction.row_of_target])

    def save(self, folder: Path, writers: Sequence[int] | None = None, deferred: DeferredWrites | None = None) -> None:
        """Writes the model in Hugging Face layout, or its adapters in PEFT's, and the optimizer into `actor/`."""
        self._check_finite("no checkpoint is made of them")
        write = write_adapters if has_adapters(self.model) else write_pretrained
        with self._deferring(deferred):
            write(self.model, self.layout, folder, writers, deferred)
            self._save_optimizer(folder / "actor", writers, deferred)

    def load(self, folder: Path) -> None:
        self.saving.wait_for_copies()
        self._check_finite(f"{folder} is damaged; go on from another checkpoint")
        self._load_optimizer(folder / "actor")


class NativeValueTrainer(_NativeTrainer):
    """The critic: a model with one number for each state, the reward that is expected from there on."""

    def __init__(
        self,
        model: "ValueModel",
        optimizer: Optimizer,
        total_updates: int,
        gradient_checkpointing: GradientCheckpointing = False,
        mesh: ProcessMesh | None = None,
        offload: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            model,
            model.trunk,
            optimizer,
            total_updates,
            gradient_checkpointing=gradient_checkpointing,
            mesh=mesh,
            offload=offload,
            max_tokens=max_tokens,
            in_float32=[model.head],
        )

    def compute_values(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        return self._compute(packs)

    def _outputs(self, prediction: "PackPrediction") -> tuple[Tensor, ...]:
        if is_general(self.causal):
            hidden = prediction.by_sequence(partial(sequence_hidden, self.causal, images=prediction.images))
        else:
            hidden = prediction.hidden(self.causal)
        values = self.model.head(hidden.float())[:, 0]
        return (prediction.to_tokens(values[prediction.row_of_target]),)

    def save(self, folder: Path, writers: Sequence[int] | None = None, deferred: DeferredWrites | None = None) -> None:
        """Writes model and optimizer into `critic/`."""
        self._check_finite("no checkpoint is made of them")
        parameters = dict(self.model.named_parameters())
        kinds = {name: self.layout.kinds[name] for name in self.layout.trained}
        tensors = ((name, self.layout.gather_weight(name, parameters.get(name))) for name in kinds)
        with self._deferring(deferred):
            write_tensors(folder / "critic", "model", kinds, tensors, self.mesh, writers, deferred)
            self._save_optimizer(folder / "critic", writers, deferred)

    def load(self, folder: Path) -> None:
        files = TensorFiles(folder / "critic", "model")
        self.saving.wait_for_copies()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                local_tensor(parameter).copy_(self._own_part(folder / "critic", name, "weight", files[name]))
        self._load_optimizer(folder / "critic")


class ValueModel(nn.Module):
    """A causal model's trunk with a value head that starts at zero: the first values are 0, not noise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk = model
        width = model.config.get_text_config().hidden_size
        device = next(model.parameters()).device
        self.head = nn.Linear(width, 1, device="cpu" if device.type == "meta" else device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().requires_grad_(False)


class PackPrediction:
    """What a rank computes of a pack: its nodes of the token tree, and the generated tokens predicted from them."""

    def __init__(self, pack: Pack, mesh: ProcessMesh) -> None:
        self.device, self.group = mesh.device, mesh.groups.get("context")
        self.num_tokens, self.images = len(pack.flat), pack.batch.images
        self.tree, self.nodes = pack.tree, np.arange(pack.tree.num_nodes)
        sources, targets = pack.sources, pack.targets
        self.attention: AttentionContext
        if self.group is None:
            self.attention = TreeAttention(self.tree, self.device)
        else:
            distributed = distribute_tree(pack.tree, self.group.size())
            self.tree, self.nodes = distributed.tree, distributed.nodes(self.group.rank())
            self.attention = ContextParallelAttention(distributed, self.device, self.group)
            index = np.searchsorted(self.nodes, sources).clip(max=len(self.nodes) - 1)
            own = self.nodes[index] == sources
            sources, targets = index[own], targets[own]
        self.num_own = int((self.nodes < pack.tree.num_nodes).sum())
        """Number of nodes that this rank computes, without padding, which is behind them."""
        rows, row_of_target = np.unique(sources, return_inverse=True)
        if self.group is not None and not len(rows):
            rows = np.zeros(1, np.int64)  # there is nothing to predict here, but every rank takes part in the backward
        order = np.argsort(row_of_target, kind="stable")
        self.nodes_of_rows, self.rows = rows, on_device(rows, self.device)
        """Nodes whose next token is predicted."""
        self.mesh = mesh
        self.row_of_target = on_device(row_of_target[order], self.device)
        self.token_of_target = on_device(targets[order], self.device)
        self.targets = on_device(pack.batch.tokens[pack.flat[targets[order]]], self.device)

        self.is_long = False
        """Whether the pack has more tokens than a micro-batch should."""
        self.max_nodes = 0
        """Most nodes that a rank of the expert group computes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that this rank computes."""
        return len(self.nodes)

    def hidden(self, causal: Any) -> Tensor:
        """[rows, width], the last hidden states of a transformers model."""
        return self.hidden_of_nodes(causal).index_select(0, self.rows)

    def hidden_of_nodes(self, causal: Any) -> Tensor:
        """[nodes, width]"""
        tokens = on_device(self.tree.tokens[self.nodes], self.device)
        positions = on_device(self.tree.positions[self.nodes], self.device)
        return forward_hidden(causal, tokens, positions, self.attention)

    def by_sequence(self, forward: SequenceForward) -> Tensor:
        """[rows, width], what a model of the general path computes, one sequence after the other."""
        sequences = sequences_with_rows(self.tree, self.nodes_of_rows)
        num_calls = self.mesh.max(len(sequences)) if self.mesh.is_sharded else len(sequences)
        return rows_by_sequence(self.tree, sequences, forward, self.device, num_calls)

    def to_tokens(self, per_target: Tensor) -> Tensor:
        """[targets] -> [tokens of the pack], 0 where nothing was generated; equal on all ranks of a context group."""
        tokens = per_target.new_zeros(self.num_tokens).index_put((self.token_of_target,), per_target)
        return tokens if self.group is None else reduce_from_group(tokens, self.group)


@cache
def placeholder_pack() -> Pack:
    """The smallest pack, for a rank that has none: others need it to gather parameters and to sum gradients."""
    return Pack(Batch.of([Trajectory.from_tokens([0, 0])]), (0,))


class HostCopy:
    """A number on its way from the device. Its own event is waited for, so that kernels launched after the copy (the
    backward pass) do not delay it."""

    def __init__(self, number: Tensor) -> None:
        self.number = number
        self.copied: torch.cuda.Event | None = None
        if number.is_cuda:
            self.number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self.copied = torch.cuda.current_stream(number.device).record_event()

    @property
    def value(self) -> float:
        if self.copied is not None:
            self.copied.synchronize()
        return self.number.item()
