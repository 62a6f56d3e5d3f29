"""Training in one process: packed token trees, log-probs from hidden states in chunks, AdamW.

Every pack is computed as a `TokenTree`: tokens with the same history once, forward and backward. The gradient is that
of the separate sequences, to rounding, and does not depend on how they were packed.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.data.batch import Pack
from corral.model.attention import TreeAttention, forward_hidden
from corral.model.logprobs import head_logprobs
from corral.recipe.schema import Optimiser
from corral.train.base import PolicyLoss, ValueLoss
from corral.train.optimiser import MasterOptimiser, UpdateResult
from corral.train.tensors import load_tensors, save_tensors


class Prediction:
    """Which node of a pack's tree each generated token was predicted from, ready for the device."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        rows, row_of_target = np.unique(pack.sources, return_inverse=True)
        order = np.argsort(row_of_target, kind="stable")
        self.num_tokens = len(pack.flat)
        self.rows = torch.from_numpy(rows).to(device)
        """Nodes whose next token is wanted."""
        self.row_of_target = torch.from_numpy(row_of_target[order]).to(device)
        self.token_of_target = torch.from_numpy(pack.targets[order]).to(device)
        self.targets = torch.from_numpy(pack.batch.tokens[pack.flat[pack.targets[order]]]).to(device)

    def to_tokens(self, per_target: Tensor) -> Tensor:
        """[targets] -> [tokens of the pack], 0 where nothing was generated."""
        return per_target.new_zeros(self.num_tokens).index_put((self.token_of_target,), per_target)


class _Trained:
    """What policy and critic have in common: a model, its optimiser, and the guard against non-finite losses."""

    def __init__(self, model: nn.Module, optimiser: Optimiser | None, total_updates: int, recompute: bool) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device
        self.optimiser = None if optimiser is None else MasterOptimiser(model.parameters(), optimiser, total_updates)
        self.recompute = recompute
        self.poisoned = False

    def hidden(self, trunk: Any, pack: Pack) -> Tensor:
        tree = pack.tree
        tokens = torch.from_numpy(tree.tokens).to(self.device)
        positions = torch.from_numpy(tree.positions).to(self.device)
        return forward_hidden(trunk, tokens, positions, TreeAttention(tree, self.device))

    def backward(self, loss: Tensor) -> float:
        assert self.optimiser is not None, "a frozen model is not trained"
        share = loss.item()
        if math.isfinite(share):
            self.optimiser.backward(loss)
        else:
            self.poisoned = True
        return share

    def step(self) -> UpdateResult:
        assert self.optimiser is not None, "a frozen model is not trained"
        if self.poisoned:
            self.poisoned = False
            self.optimiser.zero_gradients()
            return UpdateResult(math.nan, self.optimiser.learning_rate(self.optimiser.updates), skipped=True)
        return self.optimiser.step()

    def save(self, folder: Path) -> None:
        """Optimiser state; the model's own files are written by `corral.train.checkpoint`."""
        assert self.optimiser is not None
        tensors, numbers = self.optimiser.state()
        save_tensors(tensors, folder / "optimiser.safetensors")
        (folder / "optimiser.json").write_text(json.dumps(numbers))

    def load(self, folder: Path) -> None:
        assert self.optimiser is not None
        numbers = json.loads((folder / "optimiser.json").read_text())
        self.optimiser.load_state(load_tensors(folder / "optimiser.safetensors"), numbers)


class NativePolicy(_Trained):
    """The actor, or with `optimiser=None` the frozen reference."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        logits_chunk: int,
        optimiser: Optimiser | None = None,
        total_updates: int = 0,
        recompute: bool = False,
    ) -> None:
        super().__init__(model, optimiser, total_updates, recompute)
        self.temperature, self.logits_chunk = temperature, logits_chunk

    def logprobs(self, packs: Iterable[Pack]) -> Iterator[tuple[Tensor, Tensor]]:
        for pack in packs:
            with torch.no_grad():
                scored = self._logprobs(pack)
            yield scored

    def forward_backward(self, pack: Pack, loss: PolicyLoss) -> float:
        with recomputing(self.model, self.recompute):
            return self.backward(loss(*self._logprobs(pack)))

    def _logprobs(self, pack: Pack) -> tuple[Tensor, Tensor]:
        prediction = Prediction(pack, self.device)
        head = self.model.get_output_embeddings()
        logprobs, entropy = head_logprobs(
            self.hidden(self.model, pack)[prediction.rows],
            head.weight,
            getattr(head, "bias", None),
            prediction.row_of_target,
            prediction.targets,
            temperature=self.temperature,
            chunk=self.logits_chunk,
        )
        return prediction.to_tokens(logprobs), prediction.to_tokens(entropy[prediction.row_of_target])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()


class NativeCritic(_Trained):
    """A model with one number for each state: how much reward is to come."""

    def __init__(self, model: "ValueModel", optimiser: Optimiser, total_updates: int, recompute: bool = False) -> None:
        super().__init__(model, optimiser, total_updates, recompute)

    def values(self, packs: Iterable[Pack]) -> Iterator[Tensor]:
        for pack in packs:
            with torch.no_grad():
                values = self._values(pack)
            yield values

    def forward_backward(self, pack: Pack, loss: ValueLoss) -> float:
        with recomputing(self.model.trunk, self.recompute):
            return self.backward(loss(self._values(pack)))

    def _values(self, pack: Pack) -> Tensor:
        prediction = Prediction(pack, self.device)
        values = self.model.head(self.hidden(self.model.trunk, pack)[prediction.rows].float())[:, 0]
        return prediction.to_tokens(values[prediction.row_of_target])


class ValueModel(nn.Module):
    """A causal model's trunk with a value head that starts at zero: the first values are 0, not noise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk = model
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(model.parameters()).device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().requires_grad_(False)


class recomputing:
    """Activations are computed again in the backward pass, where asked."""

    def __init__(self, model: Any, enabled: bool) -> None:
        self.model, self.enabled = model, enabled

    def __enter__(self) -> None:
        if self.enabled:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self.model.gradient_checkpointing_disable()
            self.model.eval()
