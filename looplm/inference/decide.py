"""What happens to positions that have just passed a loop: who leaves, who is drafted from, who is screened.

The one place where exit policies meet the running engine; `choice` then picks tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from looplm.inference.exit_policy import Signals, compare_logits
from looplm.inference.memory import Memory
from looplm.inference.passes import read
from looplm.inference.request import Flight, Request
from looplm.inference.screening import Redirect, apply_screen
from looplm.inference.speculative import DraftHead
from looplm.model.gate import exit_cdf_of_one
from looplm.model.language_model import LoopLM


@dataclass
class Clock:
    """Time as deadlines see it."""

    now: Callable[[], float] = time.perf_counter
    """Seconds."""
    pass_ms: float = 0.0
    """What the latest pass has taken."""


class Arrival(NamedTuple):
    """A flight that has just passed `loop` loops."""

    request: Request
    flight: Flight
    loop: int


class Reading(NamedTuple):
    """A flight whose logits decide what comes next."""

    request: Request
    flight: Flight
    logits: Tensor
    """(V,)"""
    kind: Literal["exit", "draft"]


def decide(lm: LoopLM, memory: Memory, arrivals: Sequence[Arrival], clock: Clock) -> tuple[list[Reading], int]:
    """Marks the flights that leave; returns what was read for tokens to be chosen, and the rows the head has read."""
    if not arrivals:
        return [], 0
    trained = lm.model.config.num_loops
    signals = gather_signals(memory, arrivals, clock, trained)
    logits: dict[int, Tensor] = {}
    probed = [i for i, a in enumerate(arrivals) if a.request.exit.needs == "logits"]
    _read_into(logits, lm, memory, arrivals, probed)
    for i in probed:
        signals[i] = compare(arrivals[i].flight, logits[i], signals[i])
    leaves = [
        bool(a.flight.forced) or bool(a.request.exit.exits(signal, trained))
        for a, signal in zip(arrivals, signals, strict=True)
    ]
    drafts = [not leave and drafts_now(a) for a, leave in zip(arrivals, leaves, strict=True)]
    seen = [i for i, a in enumerate(arrivals) if screens_now(a, leaves[i] or drafts[i])]
    wanted = [i for i in range(len(arrivals)) if (leaves[i] or drafts[i] or i in seen) and i not in logits]
    briefly = [i for i in wanted if arrivals[i].request.draft_head is not None and not leaves[i] and i not in seen]
    wanted = [i for i in wanted if i not in briefly]
    _read_into(logits, lm, memory, arrivals, wanted)
    _read_briefly(logits, memory, arrivals, briefly)
    for i in seen:
        apply_screen(arrivals[i].request, arrivals[i].flight, arrivals[i].loop, logits[i])
        if isinstance(arrivals[i].flight.verdict, Redirect):
            leaves[i] = True
    readings: list[Reading] = []
    for i, a in enumerate(arrivals):
        if leaves[i]:
            a.flight.loop, a.flight.logits, a.flight.previous = a.loop, logits[i], None
            readings.append(Reading(a.request, a.flight, logits[i], "exit"))
        elif drafts[i]:
            readings.append(Reading(a.request, a.flight, logits[i], "draft"))
    return readings, len(probed) + len(wanted)


def _read_into(
    logits: dict[int, Tensor], lm: LoopLM, memory: Memory, arrivals: Sequence[Arrival], which: list[int]
) -> None:
    if which:
        chosen = [arrivals[i] for i in which]
        places = [a.request.places[a.flight.position] for a in chosen]
        positions = [(a.request.slot, a.flight.position) for a in chosen]
        hidden = memory.hidden[places[0] : places[0] + 1] if len(places) == 1 else memory.hidden[places]
        logits.update(zip(which, read(lm, memory, positions, hidden), strict=True))


def _read_briefly(logits: dict[int, Tensor], memory: Memory, arrivals: Sequence[Arrival], which: list[int]) -> None:
    """Reads drafts with the heads of a part of the vocabulary that their requests have."""
    by_head: dict[DraftHead, list[int]] = {}
    for i in which:
        head = arrivals[i].request.draft_head
        assert head is not None
        by_head.setdefault(head, []).append(i)
        arrivals[i].request.draft_reads += 1
    for head, some in by_head.items():
        places = [arrivals[i].request.places[arrivals[i].flight.position] for i in some]
        hidden = memory.hidden[torch.tensor(places, device=memory.device)]
        logits.update(zip(some, head(hidden), strict=True))


def gather_signals(memory: Memory, arrivals: Sequence[Arrival], clock: Clock, trained: int) -> list[Signals]:
    """What gate, state and clock say of each arrival. Reads the device only for policies that need it."""
    needs = {a.request.exit.needs for a in arrivals}
    if needs == {"nothing"}:
        return [Signals(a.loop) for a in arrivals]
    cdfs = changes = [float("inf")] * len(arrivals)
    places = [a.request.places[a.flight.position] for a in arrivals]
    if "gate" in needs:
        # A view of one column is there in a third of the time of an index.
        one = memory.gate_logits[:, places[0] : places[0] + 1] if len(places) == 1 else None
        passed = (memory.gate_logits[:, places] if one is None else one).T.tolist()
        cdfs = [
            exit_cdf_of_one(gate_logits[: a.loop]) if a.loop < trained else 1.0
            for gate_logits, a in zip(passed, arrivals, strict=True)
        ]
    if "state" in needs:
        changes = memory.changes[[a.loop - 1 for a in arrivals], places].tolist()
    if "clock" in needs and memory.device.type == "cuda":
        torch.cuda.synchronize(memory.device)
    now = clock.now() if "clock" in needs else 0.0
    return [
        Signals(
            a.loop,
            cdf=cdf,
            change=change if a.loop > 1 else float("inf"),
            elapsed_ms=(now - a.flight.started) * 1000,
            pass_ms=clock.pass_ms,
        )
        for a, cdf, change in zip(arrivals, cdfs, changes, strict=True)
    ]


def compare(flight: Flight, logits: Tensor, signals: Signals) -> Signals:
    """`signals` with how `logits` differ from those of the loop before, which they replace in `flight`."""
    if flight.previous is not None:
        divergence, same = compare_logits(flight.previous, logits)
        flight.stable = flight.stable + 1 if same else 0
        signals = signals._replace(divergence=divergence.item(), stable=flight.stable)
    flight.previous = logits
    return signals


def drafts_now(arrival: Arrival) -> bool:
    """Whether a token is drafted from this loop, for a flight that does not leave."""
    request, flight, loop = arrival
    return not request.verifying and flight is request.flights[-1] and request.draws_draft(loop)


def screens_now(arrival: Arrival, tokens_follow: bool) -> bool:
    """Whether the screen has to look now: at its own loop, or before a token is chosen if that comes first."""
    screen, flight = arrival.request.screen, arrival.flight
    if screen is None or flight.screened or flight.forced:  # what a screen has put there it does not judge
        return False
    return tokens_follow or arrival.loop >= screen.loops
