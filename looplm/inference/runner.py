"""Passes of the model over requests: prefill, and the tick that applies the core once to rows at different loops.

Functions on an explicit memory. They decide exits and move `Request.filled` and `loop_idx` on; which token comes
next, and when a request ends, is the engine's business.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.inference.exit_policy import exit_loops
from looplm.inference.kv_cache import PerLoopKVCache
from looplm.inference.layout import Layout, Segment, lay_out
from looplm.inference.scheduler import Request
from looplm.model.attention import AttentionContext
from looplm.model.cache import LoopIndex
from looplm.model.gate import exit_cdf
from looplm.model.looped import LoopedTransformer
from looplm.model.rope import rope_cos_sin


@runtime_checkable
class LanguageModel(Protocol):
    """A looped transformer with its head, as `looplm.load` returns it."""

    model: LoopedTransformer
    lm_head: nn.Linear


@dataclass(frozen=True)
class SlotMemory:
    """Everything that is kept per slot and position. Buffers have one slot more, where padding is written."""

    cache: PerLoopKVCache
    tokens: Int[Tensor, "slots P"]
    states: Float[Tensor, "slots P D"]
    """What the next loop of each position reads."""
    embeds: Float[Tensor, "slots P D"] | None
    """The input embeddings, where injection brings them in again."""
    gate_logits: Float[Tensor, "R slots P"]
    cos: Float[Tensor, "P d"]
    sin: Float[Tensor, "P d"]

    @property
    def state_bytes(self) -> int:
        """Bytes of states and embeddings there is room for, beside the cache."""
        return self.states.nbytes + (self.embeds.nbytes if self.embeds is not None else 0)


def allocate(model: LoopedTransformer, num_slots: int, max_len: int, num_loops: int) -> SlotMemory:
    """Memory for `num_slots` requests of at most `max_len` positions that go up to `num_loops` deep."""
    config, weight = model.config, model.embed_tokens.weight
    device, dtype = weight.device, weight.dtype
    cache = PerLoopKVCache(
        config, num_slots=num_slots, max_len=max_len, num_loops=num_loops, dtype=dtype, device=device
    )
    shape = (num_slots + 1, max_len)
    states = torch.zeros(*shape, config.hidden_size, dtype=dtype, device=device)
    cos, sin = rope_cos_sin(torch.arange(max_len, device=device)[None], config.head_dim, config.rope_theta, dtype)
    return SlotMemory(
        cache=cache,
        tokens=torch.zeros(shape, dtype=torch.long, device=device),
        states=states,
        embeds=torch.zeros_like(states) if model.injection is not None else None,
        gate_logits=torch.zeros(num_loops, *shape, dtype=dtype, device=device),
        cos=cos[0],
        sin=sin[0],
    )


class Exits(NamedTuple):
    """The requests whose newest position has left the loop, and the work it took."""

    requests: list[Request]
    loops: list[int]
    """The loop, from 1, at which each left."""
    logits: Float[Tensor, "N V"]
    weight_passes: int
    """Applications of the core's weights."""
    token_loops: int
    """Positions times loops computed, padding not counted."""


# --- Passes -----------------------------------------------------------------------------------------------------


def context(memory: SlotMemory, layout: Layout, loop_idx: LoopIndex) -> AttentionContext:
    """What all layers of a pass over `layout` share; `loop_idx` is 0 for prelude and coda."""
    cos, sin = memory.cos[layout.positions], memory.sin[layout.positions]
    return AttentionContext(cos, sin, layout.mask(), memory.cache.view(layout, loop_idx))


def encode(model: LoopedTransformer, memory: SlotMemory, segments: Sequence[Segment]) -> None:
    """Embeds new positions, past the prelude: their states before the first loop."""
    layout = lay_out(segments, memory.tokens.device)
    tokens = memory.tokens[layout.slots[:, None], layout.positions]
    embeds = model.encode(tokens, context(memory, layout, 0))
    memory.states[layout.write_slots, layout.positions] = embeds
    if memory.embeds is not None:
        memory.embeds[layout.write_slots, layout.positions] = embeds


def core_pass(
    model: LoopedTransformer, memory: SlotMemory, segments: Sequence[Segment]
) -> tuple[Float[Tensor, "B S D"], Layout]:
    """Takes every segment through its loop, in one application of the core. Returns what gate and head read.

    States and gate logits go to the memory, keys and values to the cache.
    """
    layout = lay_out(segments, memory.tokens.device)
    at = (layout.slots[:, None], layout.positions)
    states = memory.states[at]  # (B, S, D)
    # Without injection nothing reads the embeddings.
    embeds = states if memory.embeds is None else memory.embeds[at]
    result = model.readout(model.run_core(states, layout.loop_idx, embeds, context(memory, layout, layout.loop_idx)))
    memory.states[layout.write_slots, layout.positions] = result.state
    loops = layout.loop_idx if isinstance(layout.loop_idx, int) else layout.loop_idx[:, None]
    memory.gate_logits[loops, layout.write_slots, layout.positions] = result.gate_logits
    return result.hidden, layout


def coda_pass(
    model: LoopedTransformer, memory: SlotMemory, segments: Sequence[Segment], hidden: Float[Tensor, "B S D"]
) -> Float[Tensor, "B D"]:
    """The coda over positions that are read out, one segment a row, all of one length. Returns the last column."""
    if not model.coda or not segments:
        return hidden[:, -1]
    layout = lay_out(segments, hidden.device)
    return model.run_coda(hidden, 0, context(memory, layout, 0))[:, -1]


# --- Decoding ---------------------------------------------------------------------------------------------------


def tick(lm: LanguageModel, memory: SlotMemory, requests: Sequence[Request], chunk_size: int) -> Exits:
    """Applies the core once: the newest position of every request passes its next loop, each its own.

    Earlier positions that have not passed that loop come along, at most `chunk_size` positions of one request; one
    with more of them stays at its loop and takes the rest in the next tick.
    """
    model = lm.model
    fresh = [request.pending(chunk_size) for request in requests if request.loop_idx == 0]
    if fresh:
        encode(model, memory, fresh)
    segments = [request.pending(chunk_size) for request in requests]
    hidden, layout = core_pass(model, memory, segments)
    arrived: list[tuple[Request, int]] = []  # with the row that ends in the newest position
    for request, segment, row in zip(requests, segments, layout.last_rows, strict=True):
        request.filled[segment.loop_idx] = segment.stop
        if segment.stop == request.num_positions:
            request.loop_idx += 1
            arrived.append((request, row))
    cdfs = newest_cdf(memory, [request for request, _ in arrived])
    leaving = [
        (request, row)
        for (request, row), cdf in zip(arrived, cdfs, strict=True)
        if request.exit.exits(request.loop_idx, cdf, model.config.num_loops)
    ]
    requests = [request for request, _ in leaving]
    read = coda_pass(model, memory, [newest(r) for r in requests], hidden[[row for _, row in leaving], -1:])
    loops = [request.loop_idx for request in requests]
    return Exits(requests, loops, lm.lm_head(read), 1, sum(segment.num_positions for segment in segments))


def newest(request: Request) -> Segment:
    """The newest position of `request`, for passes outside the core."""
    return Segment(request.slot, 0, request.num_positions - 1, request.num_positions)


def newest_cdf(memory: SlotMemory, requests: Sequence[Request]) -> list[float]:
    """Exit cdf of each request's newest position at the loop it has just passed."""
    if not requests:
        return []
    where = [(r.slot, r.num_positions - 1, r.loop_idx - 1) for r in requests]
    slots, positions, loop_idx = torch.tensor(where, device=memory.tokens.device).T
    cdf = exit_cdf(memory.gate_logits[:, slots, positions])  # (R, N); deeper loops than `loop_idx` are not read
    return cdf.gather(0, loop_idx[None])[0].tolist()


def feed(memory: SlotMemory, requests: Sequence[Request]) -> None:
    """Writes the newest token of each request where the next tick embeds it."""
    if requests:
        where = [(r.slot, r.num_positions - 1, r.token_ids[-1]) for r in requests]
        slots, positions, tokens = torch.tensor(where, device=memory.tokens.device).T
        memory.tokens[slots, positions] = tokens


# --- Prompts ----------------------------------------------------------------------------------------------------


def prefill(lm: LanguageModel, memory: SlotMemory, requests: Sequence[Request], chunk_size: int) -> Exits:
    """Takes new prompts through every loop their policies may reach: the loop outside, chunks of the prompt inside.

    The first token of each is read out at the loop its policy chooses for the last prompt position; with a coda,
    every prompt position is read out at its own.
    """
    model, trained_loops = lm.model, lm.model.config.num_loops
    for request in requests:
        prompt = torch.tensor(request.prompt_token_ids, device=memory.tokens.device)
        memory.tokens[request.slot, : len(prompt)] = prompt
    for segments in prompt_chunks(requests, 0, chunk_size):
        encode(model, memory, segments)
    by_slot = {request.slot: request for request in requests}
    readouts = {request.slot: empty_readout(model, memory, request) for request in requests}
    weight_passes = token_loops = 0
    for loop_idx in range(max(request.max_loops for request in requests)):
        deep_enough = [request for request in requests if loop_idx < request.max_loops]
        for segments in prompt_chunks(deep_enough, loop_idx, chunk_size):
            hidden, layout = core_pass(model, memory, segments)
            weight_passes += 1
            token_loops += sum(segment.num_positions for segment in segments)
            for i, segment in enumerate(segments):
                request = by_slot[segment.slot]
                keep_exits(memory, request, segment, columns(hidden, layout, i), readouts[segment.slot], trained_loops)
    loops: list[int] = []
    for request in requests:
        gate_logits = memory.gate_logits[: request.max_loops, request.slot, request.num_positions - 1]
        loops.append(int(exit_loops(request.exit, gate_logits, trained_loops)))
        request.filled = [request.num_positions] * request.max_loops
    read = torch.cat([coda_over_prompt(model, memory, r, readouts[r.slot], chunk_size) for r in requests])
    return Exits(list(requests), loops, lm.lm_head(read), weight_passes, token_loops)


def prompt_chunks(requests: Sequence[Request], loop_idx: int, chunk_size: int) -> Iterator[list[Segment]]:
    """The prompts of `requests` in order, `chunk_size` positions of each at a time."""
    lengths = [len(request.prompt_token_ids) for request in requests]
    for start in range(0, max(lengths), chunk_size):
        yield [
            Segment(request.slot, loop_idx, start, min(start + chunk_size, length))
            for request, length in zip(requests, lengths, strict=True)
            if start < length
        ]


def empty_readout(model: LoopedTransformer, memory: SlotMemory, request: Request) -> Float[Tensor, "S D"]:
    """Room for the states to be read out: the last prompt position's, or every one's where a coda reads them."""
    return memory.states.new_zeros(request.num_positions if model.coda else 1, model.config.hidden_size)


def columns(hidden: Float[Tensor, "B S D"], layout: Layout, index: int) -> Float[Tensor, "N D"]:
    """What a pass has left for the positions of segment `index`, without padding."""
    first = layout.last_rows[index - 1] + 1 if index else 0
    rows = range(first, layout.last_rows[index] + 1)
    return torch.cat([hidden[row, -layout.pieces[row].num_positions :] for row in rows])


def keep_exits(
    memory: SlotMemory,
    request: Request,
    segment: Segment,
    hidden: Float[Tensor, "N D"],
    readout: Float[Tensor, "S D"],
    trained_loops: int,
) -> None:
    """Copies to `readout`, which stands for the last positions of the prompt, those of `segment` that leave now."""
    first = request.num_positions - len(readout)
    start = max(segment.start, first)
    if start < segment.stop:
        # Loops not yet run are in `gate_logits` with stale values, which no decision up to this loop reads.
        gate_logits = memory.gate_logits[: request.max_loops, segment.slot, start : segment.stop]
        leave = exit_loops(request.exit, gate_logits, trained_loops) == segment.loop_idx + 1
        readout[start - first : segment.stop - first][leave] = hidden[start - segment.start :][leave]


def coda_over_prompt(
    model: LoopedTransformer, memory: SlotMemory, request: Request, readout: Float[Tensor, "S D"], chunk_size: int
) -> Float[Tensor, "1 D"]:
    """The coda over the states of `readout`, in chunks; what the head reads at the last prompt position."""
    first, end = request.num_positions - len(readout), request.num_positions
    segments = [Segment(request.slot, 0, at, min(at + chunk_size, end)) for at in range(first, end, chunk_size)]
    chunks = [readout[s.start - first : s.stop - first][None] for s in segments]
    return [coda_pass(model, memory, [s], chunk) for s, chunk in zip(segments, chunks, strict=True)][-1]
