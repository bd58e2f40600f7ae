"""A study's figures as mean and spread over seeds, cell by cell."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from looplm.errors import UserError
from looplm.lab.study import Plan
from looplm.lab.study_cell import FOUND


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    std: float | None
    """Sample standard deviation; None for a single seed."""
    count: int

    def text(self) -> str:
        """As the table shows it: "1.234 ± 0.005"."""
        return shown(self.mean) if self.std is None else f"{shown(self.mean)} ± {self.std:.2g}"


@dataclass(frozen=True)
class Place:
    """One place of the grid, all its finished seeds."""

    levels: dict[str, str]
    found: list[dict[str, Any]]
    """Figures of each finished seed."""

    def spread(self, figure: str) -> Spread | list[Spread] | None:
        """A figure over seeds; entry by entry for a list. None where no seed has it."""
        values = [found[figure] for found in self.found if found.get(figure) is not None]
        if not values:
            return None
        if isinstance(values[0], list):
            return [spread_of(entries) for entries in zip(*values, strict=False)]
        return spread_of(values)

    def curve(self, figure: str) -> tuple[list[float], list[Spread]] | None:
        """A curve {x, y} over seeds, as far as all of them reach."""
        values = [found[figure] for found in self.found if figure in found]
        if not values:
            return None
        ys = [spread_of(entries) for entries in zip(*(value["y"] for value in values), strict=False)]
        return [fmean(entries) for entries in zip(*(value["x"] for value in values), strict=False)], ys


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def gather(plan: Plan, out: Path) -> list[Place]:
    """Every place of the grid with what its finished cells have found. Raises UserError when none has finished."""
    places = []
    for levels in plan.places:
        files = [out / "cells" / cell.name / FOUND for cell in plan.cells if cell.levels == levels]
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        places.append(Place(levels, found))
    if not any(place.found for place in places):
        raise UserError(f"No cell of {plan.name} has finished; their logs are in {out}/cells/*/log.txt.")
    return places


def shown(value: float) -> str:
    """Four digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1e4 and abs(value) < 1e7 else f"{value:.4g}"
