"""Prompts: every part goes through all loops, the loop outside and chunks of the part inside.

One call is one pass over chunks of one or more prompts, each at its own loop, so that running requests are held up by
no more than that. Loop r of a part reads the loop-r keys of the part itself and, of earlier parts, what the cache
strategy keeps. The first token is read out at the loop that the policy chooses for the last prompt position; with a
coda, every prompt position is read out at its own.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from looplm.inference.choice import Emit, choose, settle
from looplm.inference.decide import Arrival, Clock, Reading, compare, decide, gather_signals
from looplm.inference.exit_policy import Signals, decides_per_position
from looplm.inference.kv_cache import SHARED
from looplm.inference.layout import Segment
from looplm.inference.memory import Memory
from looplm.inference.passes import Work, coda_pass, core_pass, read
from looplm.inference.request import Flight, Request
from looplm.inference.sampling import token_logprobs
from looplm.inference.screening import apply_screen
from looplm.model.gate import exit_cdf
from looplm.model.language_model import LoopLM

HEAD_ROWS = 64
"""Prompt positions that the LM head reads at a time for their log-probabilities."""


def prefill(
    lm: LoopLM, memory: Memory, requests: Sequence[Request], chunk_size: int, clock: Clock, emit: Emit
) -> Work:
    """One pass over the prompts of `requests`, at most `chunk_size` positions of them in order.

    A request whose prompt is in afterwards (`prefilling` is False) has its first token out.
    """
    segments = chunks(requests, chunk_size)
    taking = list(requests[: len(segments)])
    for request in taking:
        if not request.flights:
            request.flights = [Flight(len(request.prompt_token_ids) - 1, clock.now())]
    tokens = [[] if s.loop_idx else r.tokens(s.start, s.stop) for r, s in zip(taking, segments, strict=True)]
    changes = any(request.exit.needs == "state" for request in taking)
    work = core_pass(lm.model, memory, segments, tokens, changes=changes)
    arrivals: list[Arrival] = []
    for request, segment in zip(taking, segments, strict=True):
        work += read_out(lm, memory, request, segment)
        request.filled[segment.loop_idx] = segment.stop
        if segment.stop == request.part_stop:
            request.loop_idx += 1
            if request.part == len(request.parts) - 1 and not request.flights[0].loop:
                arrivals.append(Arrival(request, request.flights[0], request.loop_idx))
    at_head = [a for a in arrivals if not lm.model.coda and (a.loop == a.request.max_loops or not _waits(a.request))]
    readings, head_reads = decide(lm, memory, at_head, clock)
    if lm.model.coda:
        note_exits(memory, arrivals, clock, lm.model.config.num_loops)
    for request in taking:
        if request.loop_idx == request.max_loops:
            end_part(memory, request)
    in_now = [request for request in taking if not request.prefilling]
    for request in in_now:
        if lm.model.coda:
            reading, reads = read_prompt(lm, memory, request, chunk_size)
            readings.append(reading)
            head_reads += reads
    choose(lm, readings)
    for request in in_now:
        if request.family is not None:
            request.family.logits, request.family.loop = request.flights[0].logits, request.flights[0].loop
        settle(request, emit)
    return work + Work(head_reads=head_reads)


def _waits(request: Request) -> bool:
    """Whether a prompt is read out at the last loop only: there is no time to be saved on one."""
    return request.exit.needs == "clock"


def chunks(requests: Sequence[Request], chunk_size: int) -> list[Segment]:
    """What to run next of each prompt, in order, until `chunk_size` positions are together."""
    segments: list[Segment] = []
    left = chunk_size
    for request in requests:
        if left <= 0:
            break
        start = request.filled[request.loop_idx]
        segments.append(Segment(request.slot, request.loop_idx, start, min(start + left, request.part_stop)))
        left -= segments[-1].num_positions
    return segments


def end_part(memory: Memory, request: Request) -> None:
    """A part has passed all loops: its keys become what later positions read, and others may use them."""
    start = sum(len(part) for part in request.parts[: request.part])
    stop = request.part_stop
    if memory.cache.strategy in SHARED:
        places = request.places[start:stop]
        memory.cache.settle(places, [request.max_loops] * len(places))
    request.part += 1
    request.loop_idx = 0


# --- Reading prompts out ----------------------------------------------------------------------------------------


def leaving(
    memory: Memory, request: Request, places: Int[Tensor, " N"], loop: int, trained: int
) -> Bool[Tensor, " N"]:
    """Which prompt positions, at `places`, are read out at `loop`, which they have just passed."""
    if not decides_per_position(request.exit):
        return torch.full_like(places, loop == request.max_loops, dtype=torch.bool)
    cdf = exit_cdf(memory.gate_logits[:, places]).double()
    earlier = now = torch.zeros_like(places, dtype=torch.bool)
    for passed in range(1, loop + 1):
        earlier = earlier | now
        change = memory.changes[passed - 1, places] if passed > 1 else float("inf")
        now = torch.zeros_like(earlier) | request.exit.exits(Signals(passed, cdf[passed - 1], change), trained)
    return now & ~earlier


def read_out(lm: LoopLM, memory: Memory, request: Request, segment: Segment) -> Work:
    """Takes down the positions of `segment` that leave now: for the coda, or for their log-probabilities."""
    if memory.readouts is None and not request.sampling.prompt_logprobs:
        return Work()
    places = torch.tensor(request.places[segment.start : segment.stop], device=memory.device)
    leaves = leaving(memory, request, places, segment.loop_idx + 1, lm.model.config.num_loops)
    places = places[leaves]
    if memory.readouts is not None:
        memory.readouts[places] = memory.hidden[places]
        return Work()
    positions = [segment.start + i for i, leave in enumerate(leaves.tolist()) if leave]
    return score(lm, request, positions, memory.hidden[places])


def score(lm: LoopLM, request: Request, positions: Sequence[int], hidden: Tensor) -> Work:
    """Log-probabilities of the prompt tokens that follow `positions`, whose readouts are `hidden`, (N, D)."""
    prompt = request.prompt_token_ids
    if not request.prompt_logprobs:
        request.prompt_logprobs = [0.0] * (len(prompt) - 1)
    rows = [(row, position) for row, position in enumerate(positions) if position + 1 < len(prompt)]
    for first in range(0, len(rows), HEAD_ROWS):
        some = rows[first : first + HEAD_ROWS]
        targets = torch.tensor([prompt[position + 1] for _, position in some], device=hidden.device)
        logprobs = token_logprobs(lm.lm_head(hidden[[row for row, _ in some]]), targets)
        for (_, position), logprob in zip(some, logprobs.tolist(), strict=True):
            request.prompt_logprobs[position] = logprob
    return Work(head_reads=len(rows))


def note_exits(memory: Memory, arrivals: Sequence[Arrival], clock: Clock, trained: int) -> None:
    """With a coda the last prompt position is read later; here only the loop it leaves at is decided.

    Where the distribution decides that loop, the hidden states of all loops are kept until the coda can read them.
    """
    for arrival, signals in zip(arrivals, gather_signals(memory, arrivals, clock, trained), strict=True):
        request, flight, loop = arrival
        if request.exit.needs == "logits":
            flight.hiddens.append(memory.hidden[request.places[flight.position]].clone())
        elif loop == request.max_loops or (not _waits(request) and request.exit.exits(signals, trained)):
            flight.loop = loop


def read_prompt(lm: LoopLM, memory: Memory, request: Request, chunk_size: int) -> tuple[Reading, int]:
    """The coda over a prompt, in chunks, and the logits after its last position; with the rows that the head read."""
    assert memory.readouts is not None
    flight, stop = request.flights[0], len(request.prompt_token_ids)
    logits, reads = None, 0
    by_logits = request.exit.needs == "logits"
    for first in range(request.reused, stop - by_logits, chunk_size):
        segment = Segment(request.slot, 0, first, min(first + chunk_size, stop - by_logits))
        places = torch.tensor(request.places[segment.start : segment.stop], device=memory.device)
        hidden = coda_pass(lm.model, memory, [segment], memory.readouts[places][None])[0]
        if request.sampling.prompt_logprobs:
            reads += score(lm, request, range(segment.start, segment.stop), hidden).head_reads
        if segment.stop == stop:
            logits, reads = lm.lm_head(hidden[-1]), reads + 1
    if by_logits:
        for loop, hidden in enumerate(flight.hiddens, start=1):
            logits, reads = read(lm, memory, [(request.slot, flight.position)], hidden[None])[0], reads + 1
            flight.loop = loop
            if request.exit.exits(compare(flight, logits, Signals(loop)), lm.model.config.num_loops):
                break
    assert logits is not None
    flight.logits, flight.previous, flight.hiddens = logits, None, []
    if request.screen is not None:
        apply_screen(request, flight, flight.loop, logits)
    return Reading(request, flight, logits, "exit"), reads
