"""A figure with what it is compared to: the rows of the table that `benchmarks/gpu.py` prints."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "FAILED", ""]


@dataclass(kw_only=True, frozen=True)
class Figure:
    """One line of the table."""

    section: str
    what: str
    value: str
    """As it is printed."""
    verdict: Verdict = ""
    """Empty for a measurement that nothing has to hold for."""
    number: float | None = None
    """The same for machines."""


def checked(section: str, what: str, number: float, most: float) -> Figure:
    """A difference that must not exceed `most`; nan fails."""
    verdict: Verdict = "ok" if number <= most else "FAILED"
    return Figure(section=section, what=what, value=f"{number:.2g} (most {most:.0e})", verdict=verdict, number=number)
