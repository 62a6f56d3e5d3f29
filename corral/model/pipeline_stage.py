"""One stage of a pipeline: a transformers model of which a rank keeps some consecutive layers.

The model's own forward method still runs on every stage. Layers that other stages have pass their input on, and the one
before the first own layer returns the hidden states that were received instead, whatever the forward method computed
until then: scaled embeddings, positions and masks need no code for each family. The first stage embeds tokens; the last
one has the final norm and the head. Where the two are tied, both stages hold the one parameter.

Which modules a decoder has before and after its layers is transformers' plan (`base_model_pp_plan`).
"""

from typing import Any

from torch import Tensor, nn

from corral.recipe.errors import UserError
from corral.recipe.mesh import deal_layers


class PipelineStage:
    """Cuts a model in place to one stage of its pipeline."""

    def __init__(self, model: nn.Module, causal: Any, rank: int, size: int) -> None:
        """`causal`: the transformers model in `model`. Parameters of other stages are dropped; buffers, which are
        small, stay."""
        self.received: Tensor | None = None
        """Hidden states [tokens, width] of the stage before, while this one computes."""
        self.width, self.dtype = int(causal.config.get_text_config().hidden_size), causal.dtype
        before, after = modules_around_layers(causal)
        layers = causal.get_decoder().layers
        first = {p for module in before for p in module.parameters()}
        last = {p for module in after for p in module.parameters()} | set(causal.get_output_embeddings().parameters())
        last |= set(model.parameters()) - set(causal.get_decoder().parameters())  # the head, or that of a critic
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        dealt = deal_layers(sizes, sum(p.numel() for p in first), sum(p.numel() for p in last), size)
        of_stages = [{p for index in own for p in layers[index].parameters()} for own in dealt]
        of_stages[0] |= first
        of_stages[-1] |= last
        self.holders = {
            name: tuple(stage for stage, held in enumerate(of_stages) if parameter in held)
            for name, parameter in model.named_parameters()
        }
        """Stages that hold each parameter of the whole model, by name: one, or the first and the last if it is tied."""
        if unknown := [name for name, stages in self.holders.items() if not stages]:
            raise UserError(f"train.parallel.pipeline: {unknown[0]} of {type(causal).__name__} belongs to no stage")
        is_trained = [any(parameter.requires_grad for parameter in held) for held in of_stages]
        if any(is_trained) and not all(is_trained):
            raise UserError(
                f"train.parallel.pipeline: nothing is trained in stage {is_trained.index(False)} of {size}; let "
                "`model.lora.targets` name layers of every stage, or take fewer stages"
            )
        for module in model.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = parameter if parameter in of_stages[rank] else None
        for module in before if rank > 0 else ():
            module.forward = self._no_embedding
        for module in after if rank < size - 1 else ():
            module.forward = pass_on
        for index, layer in enumerate(layers):
            if index not in dealt[rank]:
                layer.forward = self._take_received if index + 1 == dealt[rank].start else pass_on

    def _no_embedding(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """What stands for embeddings until the hidden states that were received take their place."""
        return tokens.new_zeros(*tokens.shape, self.width, dtype=self.dtype)

    def _take_received(self, *_: Any, **__: Any) -> Tensor:
        assert self.received is not None, "a stage behind the first one computes what it received"
        return self.received[None]


def pass_on(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def modules_around_layers(causal: Any) -> tuple[list[Any], list[Any]]:
    """Modules of the decoder: those that embed, before its layers, and those after them."""
    decoder = causal.get_decoder()
    names = list(getattr(decoder.config, "base_model_pp_plan", None) or ())
    if "layers" not in names:
        raise UserError(
            f"train.parallel.pipeline: transformers has no plan to deal the layers of {type(causal).__name__} over "
            "stages; leave it at 1"
        )
    modules, at = [getattr(decoder, name) for name in names], names.index("layers")
    # A dropout comes before the layers, too; and a norm after them may have no parameters, as OLMo's.
    return [module for module in modules[:at] if any(True for _ in module.parameters())], modules[at + 1 :]
