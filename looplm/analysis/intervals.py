"""A figure with its uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import stdev


@dataclass(frozen=True)
class Interval:
    """A figure and its interval."""

    value: float
    low: float
    high: float


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; 0 of a single one, which tells nothing."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
