"""The tick: one application of the core that takes every running request one loop further, each at its own."""

from collections.abc import Sequence

from looplm.inference.choice import Emit, choose, settle
from looplm.inference.decide import Arrival, Clock, decide
from looplm.inference.memory import Memory
from looplm.inference.passes import Work, core_pass
from looplm.inference.request import Flight, Request
from looplm.inference.speculative import PRIOR_ACCEPTED, PRIOR_DRAFTED, Costs, best_draft_tokens
from looplm.model.language_model import LoopLM


def tick(lm: LoopLM, memory: Memory, requests: Sequence[Request], chunk_size: int, clock: Clock, emit: Emit) -> Work:
    """Applies the core once to the foremost positions of all `requests`, then emits what they have come to.

    Earlier positions that have not passed that loop come along, at most `chunk_size` positions of one request; one
    with more of them stays at its loop and takes the rest in the next tick.
    """
    started = clock.now()
    for request in requests:
        if not request.flights:
            begin(lm, request, started)
    segments = [request.decoding_segment(chunk_size) for request in requests]
    tokens = [[] if s.loop_idx else r.tokens(s.start, s.stop) for r, s in zip(requests, segments, strict=True)]
    changes = any(request.exit.needs == "state" for request in requests)
    work = core_pass(lm.model, memory, segments, tokens, changes=changes)
    arrivals: list[Arrival] = []
    for request, segment in zip(requests, segments, strict=True):
        request.filled[segment.loop_idx] = segment.stop
        if segment.stop == request.decoding_stop:
            request.loop_idx += 1
            going = [f for f in request.flights if not f.loop] if request.verifying else request.flights[-1:]
            arrivals += [Arrival(request, flight, request.loop_idx) for flight in going]
    readings, head_reads = decide(lm, memory, arrivals, clock)
    choose(lm, readings)
    left = [(reading.request, reading.flight) for reading in readings if reading.kind == "exit"]
    for request, flight in left:
        if not request.catches_up:
            request.filled = [flight.position + 1] * request.max_loops
    memory.cache.settle([r.places[f.position] for r, f in left], [f.loop for _, f in left])
    moved = list(dict.fromkeys(arrival.request for arrival in arrivals))
    for request in moved:
        settle(request, emit)
        if request.finish_reason is None:
            go_on(lm, request, clock)
    clock.pass_ms = (clock.now() - started) * 1000
    return work._replace(head_reads=head_reads)


def begin(lm: LoopLM, request: Request, now: float) -> None:
    """Puts the newest position of `request`, whose token is out, on its way."""
    speculation = request.speculation
    request.flights = [Flight(request.num_positions - 1, now, forced=request.forced)]
    request.loop_idx = 0
    request.verifying = speculation is None or speculation.draft_loops >= request.max_loops
    if speculation is not None and not request.verifying:
        request.draft_length = speculation.draft_tokens or adapted(lm, request, speculation.draft_loops)


def adapted(lm: LoopLM, request: Request, draft_loops: int) -> int:
    """Draft length for the share of this text's drafts that stood, and for the weights that pass and head read."""
    acceptance = (request.accepted + PRIOR_ACCEPTED) / (request.drafted + PRIOR_DRAFTED)
    core = sum(parameter.numel() for parameter in lm.model.layers.parameters())
    head = float(lm.lm_head.weight.numel())
    draft = head if request.draft_head is None else float(request.draft_head.linear.weight.numel())
    costs = Costs(core_pass=float(core), head_read=head, draft_read=draft)
    return best_draft_tokens(draft_loops, request.max_loops, acceptance, costs)


def go_on(lm: LoopLM, request: Request, clock: Clock) -> None:
    """Where a request continues after its flights have passed a loop: deeper, at a new position, or at its test."""
    if not request.flights:
        begin(lm, request, clock.now())
        return
    if request.verifying:
        return
    last = request.flights[-1]
    speculation = request.speculation
    assert speculation is not None
    if last.token is not None and request.wants_more(last.token):
        request.flights.append(Flight(last.position + 1, clock.now(), forced=last.forced[1:]))
        request.loop_idx = 0
    elif last.token is not None or last.loop or request.loop_idx == speculation.draft_loops:
        request.verifying, request.loop_idx = True, speculation.draft_loops
