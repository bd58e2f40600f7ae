"""From logits to tokens: what follows a position that has left, what is drafted, what of a draft stands."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looplm.inference.decide import Reading
from looplm.inference.packed import PackedModel
from looplm.inference.request import Flight, Request
from looplm.inference.sampling import all_finite, filtered_probabilities, penalised, sample_with_probs, widened
from looplm.inference.screening import Failed, Mask, Stop
from looplm.inference.speculative import judge
from looplm.model.language_model import LoopLM

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


def likeliest(lm: LoopLM, logits: Tensor) -> list[int]:
    """The first of the largest logits of every row, (N, V); -1 where one of them is not finite."""
    if isinstance(lm, PackedModel) and lm.kernels is not None:
        return lm.kernels.best(logits)
    wide = widened(logits)
    finite = all_finite(wide).tolist()
    return [best if ok else -1 for best, ok in zip(wide.argmax(-1).tolist(), finite, strict=True)]


def takes_likeliest(request: Request, flight: Flight) -> bool:
    """Whether what follows is simply the likeliest token of the model."""
    free = request.sampling.repetition_penalty == 1 and not isinstance(flight.verdict, Mask)
    return free and request.sampling.temperature == 0


def choose(lm: LoopLM, readings: Sequence[Reading]) -> None:
    """Gives flights their tokens: final ones to those that have left, drafts to the others.

    A flight that has left with untested drafts before it, and further flights beside it, is left alone: `settle`
    tests its own draft.
    """
    if not readings:
        return
    alone = len(readings) == 1
    best = likeliest(lm, readings[0].logits[None] if alone else torch.stack([r.logits for r in readings]))
    drawn: list[Reading] = []
    for reading, token in zip(readings, best, strict=True):
        request, flight = reading.request, reading.flight
        flight.likeliest = token
        if token < 0 and reading.kind == "draft":
            # Nothing to draft from: the deeper loops decide.
            request.verifying = True
        untested = reading.kind == "exit" and request.verifying and len(request.flights) > 1
        if token < 0 or flight.token is not None or untested:
            continue
        flight.final = reading.kind == "exit" or bool(flight.forced)
        if flight.forced:
            flight.token = flight.forced[0]
        elif takes_likeliest(request, flight):
            flight.token, flight.draft_probs = token, None
        else:
            drawn.append(reading)
    if not drawn:
        return
    logits = torch.stack([allowed(r.request, r.flight, widened(r.logits)) for r in drawn])
    params, generators = [r.request.sampling for r in drawn], [r.request.generator for r in drawn]
    tokens, probs = sample_with_probs(logits, params, generators)
    for row, (reading, token) in enumerate(zip(drawn, tokens.tolist(), strict=True)):
        reading.flight.token = token
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
        if flight.likeliest < 0:
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
    if flight.token is not None and takes_likeliest(request, flight):
        request.drafted += 1
        request.accepted += flight.token == flight.likeliest
        return flight.likeliest, flight.token == flight.likeliest
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
