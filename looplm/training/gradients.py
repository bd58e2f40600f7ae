"""How much gradient reaches the state that enters each loop and layer: where depth stops learning, it vanishes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from looplm.model.looped import LoopedTransformer


@dataclass
class StateGradients:
    """Sums over the backward passes of one step; read :meth:`norms` after the last of them."""

    num_layers: int
    device: torch.device
    _squares: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Sum of the squared gradient by (loop, layer), 0-based."""

    def add(self, loop_idx: int, layer: int, grad: Tensor) -> None:
        """Takes the gradient that one backward pass brought to a state."""
        square = grad.detach().to(torch.promote_types(grad.dtype, torch.float32)).square().sum()
        before = self._squares.get((loop_idx, layer))
        self._squares[loop_idx, layer] = square if before is None else before + square

    def norms(self, num_loops: int) -> Float[Tensor, "R L"]:
        """Norm over all tokens of the step's global batch, on the CPU; 0 where no gradient came.

        With a process group all ranks call this together and get the same.
        """
        zero = torch.zeros((), device=self.device)
        squares = torch.stack(
            [
                torch.stack([self._squares.get((loop, layer), zero) for layer in range(self.num_layers)])
                for loop in range(num_loops)
            ]
        )
        if dist.is_initialized():
            dist.all_reduce(squares)
        return squares.sqrt().cpu()


@contextmanager
def measure_state_gradients(model: LoopedTransformer) -> Iterator[StateGradients]:
    """Measures, in the backward passes within, d loss / d state for the state entering each (loop, core layer).

    What is measured is what comes back through that layer: the same state may also be read by gate, head or
    injection, and their share is not in it. Micro-batches and ranks add up, since they are different tokens of one
    loss that is divided by the tokens of all. Hooks of the layers do it, so that whatever stands in for their
    `forward` (compiled, checkpointed) stays as it is; they are removed at the end. The step's own gradients change by
    rounding alone, where the order of a sum does.
    """
    gradients = StateGradients(len(model.layers), model.embed_tokens.weight.device)
    hooks = [layer.register_forward_pre_hook(partial(_watch, gradients, i)) for i, layer in enumerate(model.layers)]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def _watch(gradients: StateGradients, layer: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Puts a node of its own between a layer and the state it reads, and watches the gradient that arrives there."""
    state, context, loop_idx, *rest = args
    if not (isinstance(state, Tensor) and state.requires_grad and torch.is_grad_enabled()):
        return None
    own = state.view_as(state)
    own.register_hook(partial(gradients.add, loop_idx, layer))
    return (own, context, loop_idx, *rest)
