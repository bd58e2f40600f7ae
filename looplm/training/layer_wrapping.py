"""Compilation and activation checkpointing, put around a model's layers or its core from outside.

Both are attributes of the instances (`layer.forward`, `model.run_core`): parameter names stay as they are, and hooks,
FSDP2's among them, stay outside of what is compiled or run twice. A layer is compiled alone, so that one graph serves
every loop and every depth.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.stage_recipe import ActivationCheckpointing


def wrap_layers(model: LoopLMForCausalLM, compiled: bool, activation_checkpointing: ActivationCheckpointing) -> None:
    """Wraps the layers anew; `wrap_layers(model, False, "none")` leaves the model bare.

    activation_checkpointing: what the backward pass runs again instead of keeping its activations. "layer" keeps the
        input of every layer at every loop; "loop" keeps that of every loop, and of each prelude and coda layer, and
        holds all of one loop while it goes back through that; "both" keeps what "loop" keeps, and of the loop that it
        goes back through the input of every layer, so that each is run three times.
    """
    bare = model.model
    outer = [*bare.prelude, *bare.coda]
    for layer in (*outer, *bare.layers):
        unwrap_forward(layer)
        if compiled:
            layer.forward = torch.compile(layer.forward)
    bare.__dict__.pop("run_core", None)
    if activation_checkpointing in ("loop", "both"):
        bare.run_core = partial(_recomputed, bare.run_core)  # pyright: ignore[reportAttributeAccessIssue]
    everything = [*outer, *bare.layers]
    recomputed = {"none": [], "layer": everything, "loop": outer, "both": everything}[activation_checkpointing]
    for layer in recomputed:
        layer.forward = partial(_recomputed, layer.forward)


def unwrap_forward(module: nn.Module) -> None:
    """Back to the forward of the class."""
    module.__dict__.pop("forward", None)


def _recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """`function` under torch's checkpoint; as it is where no backward pass can follow."""
    if not torch.is_grad_enabled():
        return function(*args)
    # Nothing in a layer draws random numbers, so no random state need be kept.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
