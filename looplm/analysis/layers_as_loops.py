"""A dense model beside a looped one: every few of its layers are taken for a loop, and looked into as one.

A dense model of 12 layers, three of them a loop, then has four loops, which end after the same share of its work as
the four loops of a looped model. Its layers were never trained to be read early, though: what its head says of an
early layer may be wrong where a linear probe finds the answer.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.model.attention import AttentionContext
from looplm.model.cache import LoopIndex
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer, Readout


class LayersAsLoops(LoopedTransformer):
    """The layers and weights of the one-loop model `core`, with `layers_per_loop` layers to a loop.

    What goes on from loop to loop is what the last layer returned, before any norm, as in `core` itself. What is read
    out, and the coda, are those of `core`; its gate knows nothing of these loops. Raises UserError for a model of
    several loops, and for layers that do not divide into such parts.
    """

    def __init__(self, core: LoopedTransformer, layers_per_loop: int) -> None:
        nn.Module.__init__(self)  # no new weights: everything is the core's
        config, num_layers = core.config, core.config.num_hidden_layers
        if config.num_loops != 1:
            raise UserError(
                f"This model has {config.num_loops} loops of its own; layers are taken for loops where there is one."
            )
        if layers_per_loop < 1 or num_layers % layers_per_loop:
            raise UserError(
                f"{num_layers} layers do not divide into loops of {layers_per_loop}; give a number that divides them."
            )
        self.core, self.layers, self.core_exit_norm = core, core.layers, nn.Identity()
        self.config = replace(
            config, num_hidden_layers=layers_per_loop, num_loops=num_layers // layers_per_loop, loop_state="raw"
        )

    def encode(self, input_ids: Int[Tensor, "B S"], context: AttentionContext) -> Float[Tensor, "B S D"]:
        """As the core does."""
        return self.core.encode(input_ids, context)

    def context(
        self, input_ids: Int[Tensor, "B S"], attention_mask: Int[Tensor, "B S"] | None = None, *rest: None
    ) -> AttentionContext:
        """As the core does."""
        return self.core.context(input_ids, attention_mask)

    def run_core(
        self,
        state: Float[Tensor, "B S D"],
        loop_idx: LoopIndex,
        embeds: Float[Tensor, "B S D"],
        context: AttentionContext,
    ) -> Float[Tensor, "B S D"]:
        """The next `layers_per_loop` layers. Raises UserError beyond the last layer."""
        del embeds
        assert isinstance(loop_idx, int)
        if loop_idx >= self.config.num_loops:
            raise UserError(f"A dense model ends with its layers: there is no loop after {self.config.num_loops}.")
        size = self.config.num_hidden_layers
        for i in range(loop_idx * size, (loop_idx + 1) * size):
            state = self.layers[i](state, context, 0, self.core.lora[i](0) if self.core.lora is not None else {})
        return state

    def readout(self, raw: Float[Tensor, "B S D"]) -> Readout:
        """What the head would read if the model ended here."""
        return self.core.readout(self.core.core_exit_norm(raw))._replace(state=raw)

    def run_coda(
        self, hidden: Float[Tensor, "B S D"], loop_idx: LoopIndex, context: AttentionContext
    ) -> Float[Tensor, "B S D"]:
        """The coda, as after a single loop."""
        del loop_idx
        return self.core.run_coda(hidden, 0, context)


@dataclass(frozen=True)
class View:
    """A model that :mod:`looplm.analysis` can look into."""

    model: LoopedTransformer
    lm_head: nn.Linear


def layers_as_loops(model: LoopLM, layers_per_loop: int) -> View:
    """`model` with every `layers_per_loop` layers taken for a loop; see :class:`LayersAsLoops`."""
    return View(LayersAsLoops(model.model, layers_per_loop).eval(), model.lm_head)
