"""Passes of the model over positions of several requests, on an explicit memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.inference.layout import Layout, Segment, lay_out
from looplm.inference.memory import Memory
from looplm.model.attention import AttentionContext
from looplm.model.looped import LoopedTransformer


@runtime_checkable
class LanguageModel(Protocol):
    """A looped transformer with its head, as `looplm.load` returns it."""

    model: LoopedTransformer
    lm_head: nn.Linear


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


def encode(model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], tokens: Sequence[list[int]]) -> None:
    """Embeds new positions, past the prelude: their states before the first loop. `tokens` are those of `segments`."""
    layout = lay_out(segments, memory.device)
    width = layout.positions.shape[1]
    rows: list[list[int]] = []
    for piece, segment, ids in by_piece(layout, segments, tokens):
        own = ids[piece.start - segment.start : piece.stop - segment.start]
        rows.append([0] * (width - len(own)) + own)
    places = memory.places(layout)
    context = AttentionContext(*memory.rope(layout.positions), layout.mask(), memory.cache.view(places, 0))
    embeds = model.encode(torch.tensor(rows, device=memory.device), context)
    memory.states[places.write] = embeds
    if memory.embeds is not None:
        memory.embeds[places.write] = embeds


def by_piece(
    layout: Layout, segments: Sequence[Segment], tokens: Sequence[list[int]]
) -> Iterator[tuple[Segment, Segment, list[int]]]:
    """Each piece of `layout` with the segment it is of, and the tokens of that segment."""
    first = 0
    for last, segment, ids in zip(layout.last_rows, segments, tokens, strict=True):
        for piece in layout.pieces[first : last + 1]:
            yield piece, segment, ids
        first = last + 1


def core_pass(model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], *, changes: bool) -> Work:
    """Takes every segment through its loop, in one application of the core.

    States, hidden states and gate logits go to the memory, keys and values to the cache; with `changes` also how far
    the hidden state has moved.
    """
    layout = lay_out(segments, memory.device)
    places = memory.places(layout)
    at, loop_idx = places.write, layout.loop_idx
    states = memory.states[at]  # (B, S, D)
    # Without injection nothing reads the embeddings.
    embeds = states if memory.embeds is None else memory.embeds[at]
    context = AttentionContext(*memory.rope(layout.positions), layout.mask(), memory.cache.view(places, loop_idx))
    result = model.readout(model.run_core(states, loop_idx, embeds, context))
    loops = loop_idx if isinstance(loop_idx, int) else loop_idx[:, None]
    if changes:
        before = memory.hidden[at].to(memory.changes.dtype)
        memory.changes[loops, at] = (result.hidden.to(before.dtype) - before).norm(dim=-1)
    memory.states[at] = result.state
    if memory.hidden is not memory.states:
        memory.hidden[at] = result.hidden
    memory.gate_logits[loops, at] = result.gate_logits.to(memory.gate_logits.dtype)
    return Work(1, sum(segment.num_positions for segment in segments))


def coda_pass(
    model: LoopedTransformer, memory: Memory, segments: Sequence[Segment], hidden: Float[Tensor, "B S D"]
) -> Float[Tensor, "B S D"]:
    """The coda over positions that are read out, one segment a row, all of one length."""
    if not model.coda or not segments:
        return hidden
    layout = lay_out(segments, memory.device)
    view = memory.cache.view(memory.places(layout), 0)
    return model.run_coda(hidden, 0, AttentionContext(*memory.rope(layout.positions), layout.mask(), view))


def read(
    lm: LanguageModel, memory: Memory, positions: Sequence[tuple[int, int]], hidden: Float[Tensor, "N D"]
) -> Float[Tensor, "N V"]:
    """Logits after single positions, given as (slot, position), through the coda where there is one."""
    segments = [Segment(slot, 0, position, position + 1) for slot, position in positions]
    return lm.lm_head(coda_pass(lm.model, memory, segments, hidden[:, None])[:, 0])
