"""Which phase of the quickstart runs, and how long it will take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from looplm.quickstart.plan import Plan
from looplm.report.schema import Phase
from looplm.training.telemetry_view import clock


@dataclass
class Progress:
    """Says which phase runs, how long it should take and how much is left; keeps the time each took."""

    console: Console
    expected: dict[str, float]
    """Phase -> seconds expected, in order."""
    phases: list[Phase] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase. Expectations that come out wrong stretch those still to come."""
        done = sum(p.seconds for p in self.phases)
        planned = sum(list(self.expected.values())[: len(self.phases)])
        pace = done / planned if planned else 1.0
        left = pace * sum(list(self.expected.values())[len(self.phases) :])
        number = f"{len(self.phases) + 1}/{len(self.expected)}"
        self.console.rule(f"[bold]{number} {name}[/bold]  (about {clock(left)} left in all)", align="left")
        began = time.monotonic()
        yield
        self.phases.append(Phase(name=name, seconds=time.monotonic() - began))


def expected_seconds(plan: Plan, smoke: bool) -> dict[str, float]:
    """Phases in order and what each should take on two CPU cores."""
    text = plan.text_seconds
    shipped, prepare, gate, measuring, fold, report = (8, 3, 3, 3, 6, 6) if smoke else (20, 15, 20, 15, 120, 10)
    return {
        "The shipped checkpoint": shipped,
        "Preparing text": prepare,
        "Training": text,
        "One-loop twin": text / 4,
        "Training the gate": gate,
        "Measuring": measuring,
        "Folding digits": fold,
        "Report": report,
    }
