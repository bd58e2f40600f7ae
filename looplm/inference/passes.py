"""Passes of the model over positions of several requests, on an explicit memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.inference.layout import Layout, Segment, lay_out
from looplm.inference.memory import Memory
from looplm.inference.native_block import reads_in_place
from looplm.inference.native_pass import NativeTransformer
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer

LONGEST_RUN = 32
"""Positions of one request in a pass, up to which each is a row of its own to the kernels that read in place. Keys of
longer runs are brought together once for all."""


class Work(NamedTuple):
    """What some passes have taken."""

    weight_passes: int = 0
    """Applications of the core's weights, however many rows each carried."""
    token_loops: int = 0
    """Positions times loops computed, padding not counted."""
    head_reads: int = 0
    """Rows that the LM head has read."""

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def _layout(model: LoopedTransformer, memory: Memory, segments: Sequence[Segment]) -> tuple[Layout, bool]:
    """The layout of a pass, and whether kernels read in place: they want every position as a row, and no long runs."""
    in_place = reads_in_place(model) and all(segment.num_positions <= LONGEST_RUN for segment in segments)
    return lay_out(segments, memory.device, 1 if in_place else None), in_place


def encode(model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], tokens: Sequence[list[int]]) -> None:
    """Embeds new positions, past the prelude: their states before the first loop. `tokens` are those of `segments`."""
    layout, in_place = _layout(model, memory, segments)
    width = layout.positions.shape[1]
    rows: list[list[int]] = []
    for piece, segment, ids in by_piece(layout, segments, tokens):
        own = ids[piece.start - segment.start : piece.stop - segment.start]
        rows.append([0] * (width - len(own)) + own)
    context, at = memory.context(layout, 0, in_place=in_place)
    embeds = model.encode(torch.tensor(rows, device=memory.device), context)
    memory.states[at] = embeds
    if memory.embeds is not None:
        memory.embeds[at] = embeds


def by_piece(
    layout: Layout, segments: Sequence[Segment], tokens: Sequence[list[int]]
) -> Iterator[tuple[Segment, Segment, list[int]]]:
    """Each piece of `layout` with the segment it is of, and the tokens of that segment."""
    first = 0
    for last, segment, ids in zip(layout.last_rows, segments, tokens, strict=True):
        for piece in layout.pieces[first : last + 1]:
            yield piece, segment, ids
        first = last + 1


def core_pass(
    model: LoopedTransformer,
    memory: Memory,
    segments: Sequence[Segment],
    tokens: Sequence[list[int]],
    *,
    changes: bool,
) -> Work:
    """Takes every segment through its loop, in one application of the core.

    tokens: those of segments that begin with loop 1, which are embedded first; none for the others.
    States, hidden states and gate logits go to the memory, keys and values to the cache; with `changes` also how far
    the hidden state has moved.
    """
    single = all(segment.num_positions <= LONGEST_RUN for segment in segments)
    native = model if isinstance(model, NativeTransformer) and single and not changes else None
    if native is not None and not native.takes(memory, segments):
        native = None
    fresh = [(segment, ids) for segment, ids in zip(segments, tokens, strict=True) if ids]
    if fresh and (model.prelude or native is None):
        encode(model, memory, [segment for segment, _ in fresh], [ids for _, ids in fresh])
        tokens = [[]] * len(segments)
    if native is not None:
        native.run(memory, segments, tokens)
    else:
        _run_core(model, memory, segments, changes)
    return Work(1, sum(segment.num_positions for segment in segments))


def _run_core(model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], changes: bool) -> None:
    layout, in_place = _layout(model, memory, segments)
    loop_idx = layout.loop_idx
    context, at = memory.context(layout, loop_idx, in_place=in_place)
    states = memory.states[at]  # (B, S, D)
    # Without injection nothing reads the embeddings.
    embeds = states if memory.embeds is None else memory.embeds[at]
    result = model.readout(model.run_core(states, loop_idx, embeds, context))
    loops = loop_idx if isinstance(loop_idx, int) else loop_idx[:, None]
    if changes:
        before = memory.hidden[at].to(memory.changes.dtype)
        memory.changes[loops, at] = (result.hidden.to(before.dtype) - before).norm(dim=-1)
    memory.states[at] = result.state
    if memory.hidden is not memory.states:
        memory.hidden[at] = result.hidden
    memory.gate_logits[loops, at] = result.gate_logits.to(memory.gate_logits.dtype)


def coda_pass(
    model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], hidden: Float[Tensor, "B S D"]
) -> Float[Tensor, "B S D"]:
    """The coda over positions that are read out, one segment a row, all of one length."""
    if not model.coda or not segments:
        return hidden
    layout = lay_out(segments, memory.device)
    context, _ = memory.context(layout, 0, in_place=reads_in_place(model))
    return model.run_coda(hidden, 0, context)


def read(
    lm: LoopLM, memory: Memory, positions: Sequence[tuple[int, int]], hidden: Float[Tensor, "N D"]
) -> Float[Tensor, "N V"]:
    """Logits after single positions, given as (slot, position), through the coda where there is one."""
    if not lm.model.coda:
        return lm.lm_head(hidden)
    segments = [Segment(slot, 0, position, position + 1) for slot, position in positions]
    return lm.lm_head(coda_pass(lm.model, memory, segments, hidden[:, None])[:, 0])
