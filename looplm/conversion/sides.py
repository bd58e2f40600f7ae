"""The two sides of `looplm parity`: looped checkpoints, dense models as transformers runs them, or files of states.

A side is opened from its config, run only when both are known to fit together, and freed before the other is run.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from looplm.conversion.checked import own_tokenizer
from looplm.conversion.dense_source import DenseSource, dense_tokenizer, open_dense, reference_model
from looplm.conversion.parity import TOLERANCE, Comparison, compare
from looplm.conversion.parity_text import MAX_TOKENS, parity_ids
from looplm.conversion.trace import Layers, Trace, read_trace, trace_dense, trace_looped
from looplm.errors import UserError
from looplm.hf.checkpoint import CONFIG, find_checkpoint, local_path, read_config, read_json
from looplm.hf.load import check_device, check_dtype, load
from looplm.model.config import LoopedConfig
from looplm.model.looped import check_num_loops


@dataclass(frozen=True)
class LoopedSide:
    """A looped checkpoint."""

    name: str
    path: Path
    config: LoopedConfig


@dataclass(frozen=True)
class DenseSide:
    """A dense checkpoint."""

    name: str
    source: DenseSource


@dataclass(frozen=True)
class StatesSide:
    """States that another implementation has written."""

    name: str
    trace: Trace


Side = LoopedSide | DenseSide | StatesSide


@dataclass(frozen=True)
class ParityReport:
    """What :func:`compare_sources` has found."""

    comparison: Comparison
    num_tokens: int
    ids_from: str
    """"text", "random ids" or "the file of states"."""
    layers_compared: bool
    """False where the two have other numbers of layers: only what a loop leaves behind is compared then."""


def compare_sources(
    a: str | Path,
    b: str | Path,
    *,
    num_loops: int | None = None,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    case: str | None = None,
) -> ParityReport:
    """Runs two models on the same token ids and compares them at every place both have.

    A side is a looped checkpoint, a dense one (run by transformers, against one loop of the other side), or a
    safetensors file of states (:func:`~looplm.conversion.trace.read_trace`), which also gives the ids. `num_loops` is
    the depth both run at; None for the smaller of those they were trained for, or that of the states. `dtype` is that
    of the computation, None for float32. Raises UserError when a side cannot be read or the two do not fit together.
    """
    kept, place = check_dtype(dtype) or torch.float32, check_device(device)
    sides = (open_side(a, case), open_side(b, case))
    ids, mask, ids_from = common_ids(sides, text, max_tokens)
    looped = [side.config for side in sides if isinstance(side, LoopedSide)]
    depth = common_depth(sides, num_loops)
    layers = [Layers.of(config) for config in looped]
    aligned = len({*layers}) <= 1
    traces = [run_side(side, ids, mask, depth, looped, kept, place) for side in sides]
    if not aligned:
        traces = [without_layers(trace) for trace in traces]
    return ParityReport(compare(traces[0], traces[1], tolerance), ids.numel(), ids_from, aligned)


def open_side(source: str | Path, case: str | None) -> Side:
    """What `source` is, from its name and config. Raises UserError for what can be none of the three."""
    path = local_path(source)
    if path.is_file() and path.suffix == ".safetensors":
        return StatesSide(str(source), read_trace(path, case))
    if path.is_file():
        return DenseSide(str(source), open_dense(path))
    directory = find_checkpoint(source)
    if read_json(directory / CONFIG).get("model_type") in ("looplm", "ouro"):
        return LoopedSide(str(source), directory, read_config(directory / CONFIG).to_model_config())
    return DenseSide(str(source), open_dense(directory))


def common_ids(sides: tuple[Side, Side], text: Path | None, max_tokens: int) -> tuple[Tensor, Tensor | None, str]:
    """Token ids (B, S) and padding mask that both sides run on, and where they come from."""
    for side in sides:
        if isinstance(side, StatesSide):
            if text is not None:
                raise UserError(f"{side.name} brings its own token ids; leave the text out.")
            return side.trace.input_ids, side.trace.attention_mask, "the file of states"
    shapes = [side.config if isinstance(side, LoopedSide) else side.source.shape for side in sides]  # pyright: ignore
    smaller = min(shapes, key=lambda shape: (shape.max_position_embeddings, shape.vocab_size))
    for side in sides:
        tokenizer = own_tokenizer(side.path) if isinstance(side, LoopedSide) else dense_tokenizer(side.source)  # pyright: ignore
        if tokenizer is not None:
            return parity_ids(smaller, tokenizer, text, max_tokens), None, "text"
    return parity_ids(smaller, None, text, max_tokens), None, "random ids"


def common_depth(sides: tuple[Side, Side], num_loops: int | None) -> int:
    """The number of loops that looped sides run. Raises UserError for one that the other side does not have."""
    fixed = [side.trace.num_loops for side in sides if isinstance(side, StatesSide)]
    looped = [side.config for side in sides if isinstance(side, LoopedSide)]
    dense = [side for side in sides if isinstance(side, DenseSide)]
    if num_loops is not None:
        check_num_loops(num_loops)
        if fixed and num_loops > min(fixed):
            raise UserError(f"num_loops is {num_loops}, and the file of states has {min(fixed)} loops.")
        if dense and num_loops != 1:
            raise UserError(f"num_loops is {num_loops}; a dense model has one. Leave the option out.")
        return num_loops
    if len(dense) == 1 and looped:
        return dense_depth(looped[0], dense[0].source.shape.num_hidden_layers)
    return 1 if dense else min(fixed or [config.num_loops for config in looped])


def dense_depth(config: LoopedConfig, num_layers: int) -> int:
    """At how many loops a looped model passes the `num_layers` of a dense one: 1, or R where layers were tied."""
    for depth in (1, config.num_loops):
        if config.effective_depth(depth) == num_layers:
            return depth
    raise UserError(
        f"The dense model has {num_layers} layers; the looped one passes {config.effective_depth(1)} at one loop and "
        f"{config.effective_depth()} at {config.num_loops}: neither can be compared with it layer by layer."
    )


def run_side(
    side: Side,
    ids: Tensor,
    mask: Tensor | None,
    depth: int,
    looped: list[LoopedConfig],
    dtype: torch.dtype,
    device: torch.device,
) -> Trace:
    """What one side computes. The weights are freed before the function returns."""
    if isinstance(side, StatesSide):
        return side.trace
    if isinstance(side, LoopedSide):
        return trace_looped(load(side.path, dtype, device), ids, depth, mask, side.name)
    if mask is not None:
        raise UserError(f"{side.name} is dense, and padded states are compared with looped checkpoints only.")
    model = reference_model(side.source, dtype, dtype).to(device)  # pyright: ignore[reportCallIssue, reportArgumentType]
    layers = Layers.of(looped[0]) if looped else Layers(0, side.source.shape.num_hidden_layers, 0)
    trace = trace_dense(model, ids, layers, depth, side.name)
    del model
    gc.collect()
    return trace


def without_layers(trace: Trace) -> Trace:
    """The trace without the places whose numbers mean other layers in a model with more or fewer of them."""
    kept = {place: value for place, value in trace.values.items() if not place.layer}
    return Trace(trace.name, trace.input_ids, kept, trace.num_loops, trace.attention_mask)
