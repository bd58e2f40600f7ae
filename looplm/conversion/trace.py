"""What a model computes on the way, loop by loop and layer by layer, whoever implements it.

A trace comes from a looped checkpoint, from transformers' own dense implementation, or from a file of states that
another implementation has written. Places count loops and layers from 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import LoopedConfig
from looplm.model.looped import check_num_loops

Part = Literal["embedding", "prelude", "input", "core", "norm", "gate", "coda", "hidden", "logits"]


class Place(NamedTuple):
    """Where in the computation a value stands."""

    loop: int
    """From 1; 0 before the first loop."""
    part: Part
    layer: int = 0
    """From 1; 0 for what is no layer."""

    def __str__(self) -> str:
        names = {
            "embedding": "the embedding",
            "prelude": f"layer {self.layer} of the prelude",
            "input": "the state that enters the core",
            "core": f"layer {self.layer}",
            "norm": "the norm behind the core",
            "gate": "the gate logits",
            "coda": f"layer {self.layer} of the coda",
            "hidden": "the state that the head reads",
            "logits": "the logits",
        }
        return f"loop {self.loop}, {names[self.part]}" if self.loop else names[self.part]


@dataclass(frozen=True)
class Trace:
    """Values by place, in the order in which they are computed; each (B, S, ...), on the CPU."""

    name: str
    input_ids: Tensor
    values: dict[Place, Tensor]
    num_loops: int
    attention_mask: Tensor | None = None
    """1 where values count."""


@dataclass(frozen=True)
class Layers:
    """How many layers stand before, in and behind the loop."""

    prelude: int
    core: int
    coda: int

    @classmethod
    def of(cls, config: LoopedConfig) -> "Layers":
        """Those of a looped model."""
        return cls(config.num_prelude_layers, config.num_hidden_layers, config.num_coda_layers)

    @property
    def total(self) -> int:
        """All of them."""
        return self.prelude + self.core + self.coda


@dataclass
class _Recorder:
    """Forward hooks that keep what modules return, or take in."""

    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def outputs(self, module: nn.Module) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output).detach().cpu())

        self.handles.append(module.register_forward_hook(keep))
        return kept

    def inputs(self, module: nn.Module) -> list[Tensor]:
        kept: list[Tensor] = []
        self.handles.append(
            module.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0].detach().cpu()))
        )
        return kept


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder()
    try:
        yield recorder
    finally:
        for handle in recorder.handles:
            handle.remove()


@torch.no_grad()
def trace_looped(
    model: LoopLMForCausalLM,
    input_ids: Tensor,
    num_loops: int | None = None,
    attention_mask: Tensor | None = None,
    name: str = "the looped model",
) -> Trace:
    """All that a looped model computes over token ids (B, S), at `num_loops` loops; None: as many as were trained."""
    config = model.model.config
    loops = check_num_loops(config.num_loops if num_loops is None else num_loops)
    device = model.lm_head.weight.device
    with _recording() as recorder:
        embedding = recorder.outputs(model.model.embed_tokens)
        prelude = [recorder.outputs(layer) for layer in model.model.prelude]
        entering = recorder.inputs(model.model.layers[0])
        core = [recorder.outputs(layer) for layer in model.model.layers]
        norm = recorder.outputs(model.model.norm)
        coda = [recorder.outputs(layer) for layer in model.model.coda]
        mask = None if attention_mask is None else attention_mask.to(device)
        output = model.model(input_ids.to(device), attention_mask=mask, num_loops=loops)
    values = {Place(0, "embedding"): embedding[0]}
    values |= {Place(0, "prelude", i): kept[0] for i, kept in enumerate(prelude, start=1)}
    for loop in range(loops):
        depth = loop + 1
        values[Place(depth, "input")] = entering[loop]
        values |= {Place(depth, "core", i): kept[loop] for i, kept in enumerate(core, start=1)}
        values[Place(depth, "norm")] = norm[loop]
        values[Place(depth, "gate")] = output.gate_logits[loop].cpu()
        values |= {Place(depth, "coda", i): kept[loop] for i, kept in enumerate(coda, start=1)}
        hidden = output.loop_hidden_states[loop]
        values[Place(depth, "hidden")] = hidden.cpu()
        values[Place(depth, "logits")] = model.lm_head(hidden).cpu()
    return Trace(name, input_ids, values, loops, attention_mask)


@torch.no_grad()
def trace_dense(
    model: PreTrainedModel, input_ids: Tensor, layers: Layers, loop: int = 1, name: str = "the dense model"
) -> Trace:
    """What transformers' dense model computes, under the places that a looped one with these `layers` would use.

    `loop` is the one that the last layers are compared to: 1, or the last loop of a model whose loops stand for layers
    of the dense one one after another, `layers.core` of them in each.
    """
    stack: list[nn.Module] = list(model.get_decoder().layers)  # pyright: ignore[reportCallIssue, reportArgumentType]
    core = layers.core * loop
    if len(stack) != layers.prelude + core + layers.coda:
        raise UserError(
            f"{name} has {len(stack)} layers, and the looped model stands for {layers.prelude + core + layers.coda}: "
            "they cannot be compared layer by layer."
        )
    with _recording() as recorder:
        embedding = recorder.outputs(model.get_input_embeddings())
        outputs = [recorder.outputs(layer) for layer in stack]
        entering = [recorder.inputs(stack[layers.prelude + i * layers.core]) for i in range(loop)]
        hidden = recorder.outputs(model.get_decoder().norm)  # pyright: ignore[reportCallIssue, reportArgumentType]
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    values = {Place(0, "embedding"): embedding[0]}
    values |= {Place(0, "prelude", i + 1): outputs[i][0] for i in range(layers.prelude)}
    for depth in range(1, loop + 1):
        values[Place(depth, "input")] = entering[depth - 1][0]
        first = layers.prelude + (depth - 1) * layers.core
        values |= {Place(depth, "core", i + 1): outputs[first + i][0] for i in range(layers.core)}
    behind = layers.prelude + core
    values |= {Place(loop, "coda", i + 1): outputs[behind + i][0] for i in range(layers.coda)}
    values[Place(loop, "hidden")] = hidden[0]
    values[Place(loop, "logits")] = logits.cpu()
    return Trace(name, input_ids, values, loop)


# --- States written by another implementation ---------------------------------------------------------------------

_FILE_PARTS: dict[str, Part] = {"hidden_per_step": "hidden", "gate_logits": "gate", "logits_per_step": "logits"}


def read_trace(file: Path, case: str | None = None) -> Trace:
    """States in a safetensors file: `input_ids` (B, S), and any of `layer_outputs` (R, L, B, S, D), `hidden_per_step`
    (R, B, S, D), `gate_logits` (R, B, S), `logits_per_step` (R, B, S, V), `attention_mask` (B, S).

    Names may have a prefix, "full.input_ids"; `case` picks it, by default the first one in the alphabet that comes
    with hidden states. `attention_mask` marks right or left padding, which is not compared. Raises UserError for a
    file that cannot be read or holds no such states.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}).") from None
    cases = sorted(
        name.removesuffix("input_ids")
        for name in tensors
        if name.endswith("input_ids") and f"{name.removesuffix('input_ids')}hidden_per_step" in tensors
    )
    prefix = (f"{case}." if case else cases[0]) if cases else None
    if prefix is None or prefix not in cases:
        names = ", ".join(repr(name.removesuffix(".")) for name in cases) or "none"
        raise UserError(f"{file} holds no input_ids and hidden_per_step of the case {case!r}; cases in it: {names}.")
    held = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    loops = len(held["hidden_per_step"])
    values: dict[Place, Tensor] = {}
    for loop in range(loops):
        if "layer_outputs" in held:
            layers = held["layer_outputs"][loop]
            values |= {Place(loop + 1, "core", i): layer for i, layer in enumerate(layers, start=1)}
        values |= {Place(loop + 1, part): held[key][loop] for key, part in _FILE_PARTS.items() if key in held}
    return Trace(str(file), held["input_ids"], values, loops, held.get("attention_mask"))


Tracer = Callable[[Tensor, int], Trace]
"""(token ids, number of loops) -> what one side computes."""
