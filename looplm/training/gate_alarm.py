"""Says when the exit gate dies: the training loss does not show it, the exit distribution does.

    collapse    all exit probability lies on one loop
    trend       it is on the way there
    dead loop   a loop gets next to none of it, and so next to no training
    idle loop   a loop is trained, and adds no nats to the best one before it

Each speaks once an episode: again only after what it measures has clearly recovered.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

from looplm.training.stage_recipe import (
    ExpectedLossRecipe,
    GateLossRecipe,
    LastLoopRecipe,
    Objective,
    RoutingRecipe,
)
from looplm.training.telemetry_record import Record

COLLAPSED, RECOVERED = 0.02, 0.1
"""Evenness of the mean exit pdf below which the gate counts as collapsed, and above which as healed."""
TREND_RECORDS, TREND_FIT, TREND_RECOVERED = 12, 0.5, 0.7
"""A falling trend: a line through so many records that explains this share of their variance and reaches COLLAPSED
within as many steps again. It is over when the evenness is above the last of these."""
WINDOW = 20
"""Records over which a loop is judged dead or idle."""
DEAD_SHARE = 0.05
"""A loop is dead below this part of an even share 1 / R of the exit probability; alive again at twice as much."""
IDLE_NATS = 0.001
"""A loop is idle when it gains less on the best loop before it; judged in the second half of a stage alone."""


def evenness(exit_pdf: Sequence[float]) -> float:
    """Entropy of a mean exit pdf as a share of ln R: 0 when it lies on one loop, 1 when it is even.

    1 for a single loop, which has nothing to decide.
    """
    if len(exit_pdf) < 2:
        return 1.0
    return -sum(p * math.log(p) for p in exit_pdf if p > 0) / math.log(len(exit_pdf))


class GateAlarm:
    """Watches the records of one stage. `objective` decides what is advised, and what is alarming at all."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._active: set[str] = set()
        self._trend: list[tuple[int, float]] = []
        """(step, evenness) of the last records of two loops or more."""
        self._shares: dict[int, list[float]] = {}
        """By loop (1-based): its exit share as a part of an even one, in the last records it ran in."""
        self._gains: dict[int, list[float]] = {}
        """By loop: nats it gained on the best loop before it."""

    def check(self, record: Record) -> list[str]:
        """Takes a record; returns the warnings that it is time to give, each with what was measured and a remedy.

        A record of one loop, or of a step that was left out for not being finite, says nothing of the gate; and a
        stage that does not train it has nothing to be warned of.
        """
        if isinstance(self._objective, LastLoopRecipe):
            return []
        if len(record.exit_pdf) < 2 or not all(map(math.isfinite, (*record.exit_pdf, *record.loop_losses))):
            return []
        self._trend = [*self._trend, (record.step, evenness(record.exit_pdf))][-TREND_RECORDS:]
        for loop, share in enumerate(record.exit_pdf, start=1):
            self._keep(self._shares, loop, share * len(record.exit_pdf))
            if loop > 1:
                gain = min(record.loop_losses[: loop - 1]) - record.loop_losses[loop - 1]
                self._keep(self._gains, loop, gain)
        return [*self._collapse(record), *self._falling(record), *self._dead(record), *self._idle(record)]

    def _keep(self, windows: dict[int, list[float]], loop: int, value: float) -> None:
        windows[loop] = [*windows.get(loop, []), value][-WINDOW:]

    def _rises(self, name: str, alarming: bool, healed: bool) -> bool:
        """Whether the alarm `name` begins now."""
        if alarming and name not in self._active:
            self._active.add(name)
            return True
        if healed:
            self._active.discard(name)
        return False

    def _collapse(self, record: Record) -> Iterator[str]:
        even = self._trend[-1][1]
        if self._rises("collapse", even < COLLAPSED, even > RECOVERED):
            loop = max(range(len(record.exit_pdf)), key=record.exit_pdf.__getitem__) + 1
            yield f"The exit gate has collapsed onto loop {loop}: mean exit pdf {_shares(record)}. {self._remedy()}"

    def _falling(self, record: Record) -> Iterator[str]:
        now = self._trend[-1][1]
        steps, values = zip(*self._trend, strict=True)
        alarming, left = False, 0.0
        if len(steps) == TREND_RECORDS and "collapse" not in self._active:
            slope, intercept = linear_regression(steps, values)
            end, spread = intercept + slope * steps[-1], sum((value - fmean(values)) ** 2 for value in values)
            explained = slope**2 * sum((step - fmean(steps)) ** 2 for step in steps)
            left = (end - COLLAPSED) / -slope if slope < 0 else math.inf
            alarming = explained > TREND_FIT * spread and left < steps[-1] - steps[0]
        if self._rises("trend", alarming, now > TREND_RECOVERED):
            yield (
                f"The exit gate is collapsing: the entropy of the mean exit pdf fell from {values[0]:.0%} to "
                f"{now:.0%} of its maximum in {steps[-1] - steps[0]} steps, and at this pace is at nothing in "
                f"{max(1, round(left))} more; mean exit pdf {_shares(record)}. {self._remedy()}"
            )

    def _dead(self, record: Record) -> Iterator[str]:
        if "collapse" in self._active:  # which says it already
            return
        if begun := self._fallen("dead", self._shares, DEAD_SHARE):
            measured = ", ".join(f"{fmean(self._shares[loop]):.1%}" for loop in begun)
            yield (
                f"{_loops(begun)} dead: over the last {WINDOW} records {_it(begun)} got {measured} of an even share "
                f"of the exit probability; mean exit pdf {_shares(record)}. {self._revive()}"
            )

    def _idle(self, record: Record) -> Iterator[str]:
        # Stage II trains no loop, and routing trains each loop on other tokens: their losses say nothing of this.
        if not isinstance(self._objective, ExpectedLossRecipe) or 2 * record.step <= record.num_steps:
            return
        if "collapse" in self._active:
            return
        if begun := self._fallen("idle", self._gains, IDLE_NATS):
            measured = ", ".join(f"{fmean(self._gains[loop]):+.4f}" for loop in begun)
            yield (
                f"{_loops(begun)} idle: over the last {WINDOW} records {_it(begun)} gained {measured} nats per token "
                f"on the best loop before. Where held-out loss agrees, fewer loops would train as well, and cheaper."
            )

    def _fallen(self, kind: str, seen: Mapping[int, Collection[float]], bound: float) -> list[int]:
        """Loops whose mean over a full window has newly fallen below `bound`; above twice of it they are well."""
        means = {loop: fmean(values) for loop, values in seen.items()}
        return [
            loop
            for loop, mean in means.items()
            if self._rises(f"{kind} {loop}", len(seen[loop]) == WINDOW and mean < bound, mean > 2 * bound)
        ]

    def _remedy(self) -> str:
        remedy = "Try a longer warmup or a lower learning rate"
        if isinstance(self._objective, ExpectedLossRecipe):
            return f"{remedy}, or a beta above {self._objective.beta:g}."
        if isinstance(self._objective, RoutingRecipe):
            return f"{remedy}, or a gate_weight below {self._objective.gate_weight:g}."
        return f"{remedy}."

    def _revive(self) -> str:
        if isinstance(self._objective, GateLossRecipe):
            return "The gate will not choose it: where it should, look at the losses by loop, and at label_shift."
        if not isinstance(self._objective, ExpectedLossRecipe):
            return "Few tokens are first right there: a shorter phase, or fewer loops, leaves less of it."
        if self._objective.smoothing:
            return f"Smoothing {self._objective.smoothing:g} still trains it; a larger beta gives it exits."
        return f"It is hardly trained any more: try smoothing 0.05, or a beta above {self._objective.beta:g}."

    def state_dict(self) -> dict[str, Any]:
        """All it remembers, as JSON values; lists grow with the run."""
        return {
            "active": sorted(self._active),
            "trend": [list(point) for point in self._trend],
            "shares": {str(loop): values for loop, values in self._shares.items()},
            "gains": {str(loop): values for loop, values in self._gains.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave, so that a resumed run neither repeats nor forgets an alarm."""
        self._active = set(state["active"])
        self._trend = [(int(step), float(value)) for step, value in state["trend"]]
        self._shares = {int(loop): list(values) for loop, values in state["shares"].items()}
        self._gains = {int(loop): list(values) for loop, values in state["gains"].items()}


def _shares(record: Record) -> str:
    return ", ".join(f"{share:.3f}" for share in record.exit_pdf)


def _loops(loops: list[int]) -> str:
    """Subject and verb of a message about them."""
    return f"Loop {loops[0]} is" if len(loops) == 1 else f"Loops {', '.join(map(str, loops))} are"


def _it(loops: list[int]) -> str:
    return "it" if len(loops) == 1 else "they"
