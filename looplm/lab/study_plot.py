"""A study's plot: its panels side by side, mean and standard deviation over seeds, as one SVG."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from looplm.lab.study import Panel, Plan
from looplm.lab.study_figures import Place, Spread, unshown

_COLOURS = ("#1f6f8b", "#c2562d", "#5a8f3d", "#7b5ea7", "#b8860b", "#555555", "#c04f7d", "#2f4b9b")
_MOST_INSIDE = 6  # lines whose legend finds room among them
_MARKERS, _DASHES = "os^DvPX*", ("-", "--", "-.", ":")


def draw(plan: Plan, places: Sequence[Place]) -> str:
    """The plot as SVG text; the same results give the same text."""
    panels = plan.study.plot
    figure = Figure(figsize=(4.4 * len(panels), 3.4), layout="constrained")
    figure.suptitle(f"{plan.study.title} ({plan.preset})", fontsize=10)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, plan, panel, [place for place in places if place.found])
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "looplm"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)


def _draw_panel(axes: Axes, plan: Plan, panel: Panel, places: Sequence[Place]) -> None:
    axes.set_ylabel(panel.label or panel.figure.replace("_", " "), fontsize=8)
    axes.set_yscale(panel.scale)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    if problem := unshown(panel.figure, panel.kinds, places):
        axes.text(0.5, 0.5, problem, transform=axes.transAxes, ha="center", fontsize=7, wrap=True)
    elif panel.against is not None:
        _draw_against(axes, plan, panel, panel.against, places)
    else:
        _draw_lines(axes, panel, plan, places)
    if count := len(axes.get_legend_handles_labels()[0]):
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if count > _MOST_INSIDE else {}
        axes.legend(fontsize=6.5, frameon=False, **beside)


def _draw_against(axes: Axes, plan: Plan, panel: Panel, axis: str, places: Sequence[Place]) -> None:
    """A scalar over the levels of one axis, a line for each place in the others."""
    levels = list(dict.fromkeys(place.levels[axis] for place in places))
    lines: dict[str, list[tuple[int, Spread]]] = {}
    for place in places:
        spread = place.spread(panel.figure)
        if isinstance(spread, Spread):
            rest = " ".join(level for name, level in place.levels.items() if name != axis)
            lines.setdefault(rest, []).append((levels.index(place.levels[axis]), spread))
    for number, (name, points) in enumerate(lines.items()):
        # Lines of many seeds lie side by side, not on each other.
        aside = 0.06 * (number - (len(lines) - 1) / 2)
        axes.errorbar([x + aside for x, _ in points], [y.mean for _, y in points], [y.std or 0.0 for _, y in points],
                      label=name or None, capsize=2, linewidth=1.2, markersize=4, **_style(number))  # fmt: skip
    axes.set_xticks(range(len(levels)), levels)
    axes.set_xlabel(panel.over or axis, fontsize=8)


def _draw_lines(axes: Axes, panel: Panel, plan: Plan, places: Sequence[Place]) -> None:
    """A list over its index or a curve over its steps, a line for each place, or for each level of `panel.per`."""
    per = list(plan.axes) if panel.per is None else panel.per
    groups: dict[str, list[dict[str, Any]]] = {}
    for place in places:
        groups.setdefault(" ".join(place.levels[axis] for axis in per), []).extend(place.found)
    for number, (name, found) in enumerate(groups.items()):
        line = _line(Place({}, found), panel.figure)
        if line is None:
            continue
        x, spreads = line
        mean, std = [y.mean for y in spreads], [y.std or 0.0 for y in spreads]
        style: dict[str, Any] = _style(number) | ({"marker": ""} if len(x) > 16 else {})
        axes.plot(x, mean, label=name, linewidth=1.2, markersize=3.5, **style)
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # loops, levels and steps are counted
    axes.set_xlabel(panel.over or "", fontsize=8)


def _line(place: Place, figure: str) -> tuple[list[float], list[Spread]] | None:
    spread = place.spread(figure)
    if spread is None:
        return place.curve(figure)
    if isinstance(spread, list):
        return [float(i) for i in range(1, len(spread) + 1)], spread
    return [1.0], [spread]


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
    }
