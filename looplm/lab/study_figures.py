"""A study's figures: of what kind each is, and their mean and spread over seeds, place by place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

Kind = Literal["number", "list", "curve", "record"]

GENERAL: dict[str, Kind] = {
    **dict.fromkeys(
        ("seed", "num_layers", "num_loops", "num_parameters", "core_parameters", "num_tokens", "training_flops",
         "flops_per_token", "seconds", "train_loss", "exit_entropy", "expected_loops", "first_loop_share",
         "num_spikes", "num_skipped", "peak_grad_norm", "oscillation", "gradient_decades", "held_out_loss",
         "bits_per_byte", "best_loop", "beyond_training", "accuracy", "frontier_accuracy_area",
         "frontier_loss_area"), "number"),
    **dict.fromkeys(
        ("train_loss_by_loop", "gain_by_loop", "exit_pdf", "state_gradients", "held_out_by_loop",
         "bits_per_byte_by_loop", "accuracy_by_loop"), "list"),
    **dict.fromkeys(("loss_curve", "first_loop_share_curve", "frontier_accuracy", "frontier_loss"), "curve"),
    **dict.fromkeys(("scaling", "warnings"), "record"),
}  # fmt: skip
"""Figures that a cell may have without a `measure` of its study (docs/lab.md)."""

IN_A_TABLE: tuple[Kind, ...] = ("number", "list")


def kind_of(value: Any) -> Kind:
    """A number, a list of numbers, a curve {x, y}; anything else is a record, which is only kept."""
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, list) and all(isinstance(entry, int | float) for entry in value):
        return "list"
    if (
        isinstance(value, dict)
        and set(value) == {"x", "y"}
        and all(kind_of(line) == "list" for line in value.values())
    ):
        return "curve"
    return "record"


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    std: float | None
    """Sample standard deviation; None for a single seed, and where not all are finite."""
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

    def values(self, figure: str) -> list[Any]:
        """A figure of every seed that has it."""
        return [found[figure] for found in self.found if found.get(figure) is not None]

    def spread(self, figure: str) -> Spread | list[Spread] | None:
        """A figure over seeds; entry by entry for a list. None where no seed has it, or it is neither."""
        values = self.values(figure)
        kinds = {kind_of(value) for value in values}
        if kinds == {"number"}:
            return spread_of(values)
        return [spread_of(entries) for entries in zip(*values, strict=False)] if kinds == {"list"} else None

    def curve(self, figure: str) -> tuple[list[float], list[Spread]] | None:
        """A curve {x, y} over seeds, as far as all of them reach. None where there is none."""
        values = self.values(figure)
        if {kind_of(value) for value in values} != {"curve"}:
            return None
        ys = [spread_of(entries) for entries in zip(*(value["y"] for value in values), strict=False)]
        return [fmean(entries) for entries in zip(*(value["x"] for value in values), strict=False)], ys


def unshown(figure: str, kinds: Sequence[Kind], places: Sequence[Place]) -> str | None:
    """Why a figure cannot be shown as one of `kinds`; None where it can."""
    has = {kind_of(value) for place in places for value in place.values(figure)}
    if not has:
        return f"no cell has the figure {figure}"
    return None if has & set(kinds) else f"the figure {figure} is no {' or '.join(kinds)}"


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def shown(value: float) -> str:
    """Four digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1e4 and abs(value) < 1e7 else f"{value:.4g}"
