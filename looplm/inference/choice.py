"""From logits to tokens: what follows a position that has left, what is drafted, what of a draft stands."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looplm.inference.decide import Reading
from looplm.inference.request import Flight, Request
from looplm.inference.sampling import all_finite, filtered_probabilities, penalised, sample_with_probs
from looplm.inference.screening import Failed, Mask, Stop
from looplm.inference.speculative import judge

Emit = Callable[[Request, Flight, int], None]
"""Takes the next token of a request's text, chosen for a flight; may finish the request."""

NOT_FINITE = "The model gave logits that are not finite: its weights are damaged, or overflow in this dtype."


def allowed(request: Request, flight: Flight, logits: Tensor) -> Tensor:
    """`logits` with what a screen forbids and with the repetition penalty."""
    if request.sampling.repetition_penalty != 1:
        logits = penalised(logits, float(request.sampling.repetition_penalty), request.history(flight))
    if isinstance(flight.verdict, Mask):
        logits = logits.index_fill(0, torch.tensor(flight.verdict.token_ids, device=logits.device), -math.inf)
    return logits


def choose(readings: Sequence[Reading]) -> None:
    """Gives flights their tokens: final ones to those that have left, drafts to the others.

    A flight that has left with untested drafts before it, and further flights beside it, is left alone: `settle`
    tests its own draft.
    """
    if not readings:
        return
    finite = all_finite(torch.stack([reading.logits for reading in readings])).tolist()
    for reading, ok in zip(readings, finite, strict=True):
        reading.flight.broken = not ok
        if not ok and reading.kind == "draft":
            # Nothing to draft from: the deeper loops decide.
            reading.request.verifying = True
    open_ones = [r for r, ok in zip(readings, finite, strict=True) if ok and r.flight.token is None]
    chosen = [r for r in open_ones if r.kind == "draft" or not r.request.verifying or len(r.request.flights) == 1]
    for reading in [r for r in chosen if r.flight.forced]:
        reading.flight.token, reading.flight.final = reading.flight.forced[0], True
    drawn = [r for r in chosen if not r.flight.forced]
    if not drawn:
        return
    logits = torch.stack([allowed(r.request, r.flight, r.logits) for r in drawn])
    params, generators = [r.request.sampling for r in drawn], [r.request.generator for r in drawn]
    tokens, probs = sample_with_probs(logits, params, generators)
    for row, (reading, token) in enumerate(zip(drawn, tokens.tolist(), strict=True)):
        reading.flight.token = token
        reading.flight.final = reading.kind == "exit"
        reading.flight.draft_probs = probs.get(row) if reading.kind == "draft" else None


def settle(request: Request, emit: Emit) -> None:
    """Emits, in order, the tokens of flights that have left, up to the first that is still on its way.

    A draft that does not stand takes all flights behind it down.
    """
    while request.flights and request.finish_reason is None:
        flight = request.flights[0]
        if isinstance(flight.verdict, Stop | Failed):
            stopped = isinstance(flight.verdict, Stop)
            request.finish_reason = "screened" if stopped else "error"
            request.error = flight.verdict.reason if isinstance(flight.verdict, Stop) else flight.verdict.message
            return
        if not flight.loop:
            return
        if flight.broken:
            request.finish_reason, request.error = "error", NOT_FINITE
            return
        token, stands = outcome(request, flight)
        emit(request, flight, token)
        request.forced = flight.forced[1:]
        if stands:
            request.flights.pop(0)
        else:
            request.truncate(flight.position + 1)
            request.flights.clear()


def outcome(request: Request, flight: Flight) -> tuple[int, bool]:
    """The token that follows `flight`, the first in line, and whether the flights behind it were fed with it."""
    assert flight.logits is not None
    if flight.final:
        assert flight.token is not None
        return flight.token, True
    if flight.forced:
        return flight.forced[0], flight.token == flight.forced[0]
    logits = allowed(request, flight, flight.logits)[None]
    if flight.token is None:
        tokens, _ = sample_with_probs(logits, [request.sampling], [request.generator])
        return int(tokens), True
    greedy = request.generator is None
    target = logits[0] if greedy else filtered_probabilities(logits, request.sampling)[0]
    instead = judge(flight.token, flight.draft_probs, target, request.generator)
    request.drafted += 1
    request.accepted += instead is None
    return (flight.token, True) if instead is None else (instead, False)
