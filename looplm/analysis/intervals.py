"""A figure with its uncertainty."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A figure and its interval."""

    value: float
    low: float
    high: float
