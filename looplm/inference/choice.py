"""From logits to tokens: what follows a position that has left, what is drafted, what of a draft stands."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looplm.inference.decide import Reading
from looplm.inference.request import Flight, Request
from looplm.inference.sampling import all_finite, filtered_probabilities, penalised, sample_with_probs, widened
from looplm.inference.screening import Failed, Mask, Stop
from looplm.inference.speculative import judge

Emit = Callable[[Request, Flight, int], None]
"""Takes the next token of a request's text, chosen for a flight; may finish the request."""

NOT_FINITE = "The model gave logits that are not finite: its weights are damaged, or overflow in this dtype."


def allowed(request: Request, flight: Flight, logits: Tensor) -> Tensor:
    """`logits`, (V,) and widened, with what a screen forbids and with the repetition penalty."""
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
    logits = widened(torch.stack([reading.logits for reading in readings]))
    finite = all_finite(logits).tolist()
    for reading, ok in zip(readings, finite, strict=True):
        reading.flight.broken = not ok
        if not ok and reading.kind == "draft":
            # Nothing to draft from: the deeper loops decide.
            reading.request.verifying = True
    drawn: list[int] = []
    for row, (reading, ok) in enumerate(zip(readings, finite, strict=True)):
        request, flight = reading.request, reading.flight
        untested = reading.kind == "exit" and request.verifying and len(request.flights) > 1
        if not ok or flight.token is not None or untested:
            continue
        if flight.forced:
            flight.token, flight.final = flight.forced[0], True
        else:
            drawn.append(row)
    if not drawn:
        return
    for row in drawn:
        request, flight = readings[row].request, readings[row].flight
        if request.sampling.repetition_penalty != 1 or isinstance(flight.verdict, Mask):
            logits[row] = allowed(request, flight, logits[row])
    readings, logits = [readings[row] for row in drawn], logits if len(drawn) == len(readings) else logits[drawn]
    params, generators = [r.request.sampling for r in readings], [r.request.generator for r in readings]
    tokens, probs = sample_with_probs(logits, params, generators)
    for row, (reading, token) in enumerate(zip(readings, tokens.tolist(), strict=True)):
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
    logits = allowed(request, flight, widened(flight.logits))[None]
    if flight.token is None:
        tokens, _ = sample_with_probs(logits, [request.sampling], [request.generator])
        return int(tokens), True
    greedy = request.generator is None
    target = logits[0] if greedy else filtered_probabilities(logits, request.sampling)[0]
    instead = judge(flight.token, flight.draft_probs, target, request.generator)
    request.drafted += 1
    request.accepted += instead is None
    return (flight.token, True) if instead is None else (instead, False)
