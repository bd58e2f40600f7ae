"""Figures as inline SVG that follows the page: text, axes and series take the page's colours.

Matplotlib draws with the placeholder colours below; in its SVG they become CSS variables of `page.css`, so a figure
turns dark with the page. Figures are small (a phone's width), and text stays text.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MAX_LOOP_COLOURS = 8
"""Loops with a colour of their own; deeper ones share the last."""

INK, MUTED, GRID, GATE, TWIN = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
LOOPS = tuple(f"#0a0c{loop:02x}" for loop in range(1, MAX_LOOP_COLOURS + 1))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", GATE: "--gate", TWIN: "--twin"} | {
    colour: f"--loop{loop}" for loop, colour in enumerate(LOOPS, start=1)
}
_MARKERS, _DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", "-.", ":")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


def loop_number(loop: int) -> int:
    """Number of the colour of `loop`, 1 to MAX_LOOP_COLOURS: what `page.css` calls `--loop1` and so on."""
    return min(loop, MAX_LOOP_COLOURS)


class Canvas:
    """One small figure, and its SVG once drawn."""

    def __init__(self, name: str) -> None:
        self.name, self.svg = name, ""
        self.figure = Figure(figsize=(4.8, 3.3), layout="constrained")
        self.axes: Axes = self.figure.add_subplot()


@contextmanager
def drawn(name: str) -> Iterator[Canvas]:
    """Gives a canvas in the report's style and leaves its SVG in `canvas.svg`. `name` keeps ids apart on a page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        canvas = Canvas(name)
        yield canvas
        buffer = io.StringIO()
        canvas.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        canvas.svg = _inline(buffer.getvalue())


def _inline(svg: str) -> str:
    """Strips what only a standalone file needs, and hands the colours over to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Matplotlib numbers its groups from 1 in every figure; only ids that something points to are kept.
    used = set(re.findall(r"#([A-Za-z][\w-]*)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match.group(0) if match.group(1) in used else "", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.strip()


def loop_axis(axes: Axes, label: str, num_loops: int) -> None:
    """Makes the x axis one of loops 1 to `num_loops`."""
    axes.set_xlabel(label)
    axes.set_xticks(range(1, num_loops + 1))
    axes.set_xlim(0.75, num_loops + 0.25)


def loop_style(loop: int, num_points: int) -> dict[str, Any]:
    """Colour, dash and marker of a loop's line: never the colour alone."""
    return {
        "color": LOOPS[loop_number(loop) - 1],
        "linestyle": _DASHES[(loop - 1) % len(_DASHES)],
        "marker": _MARKERS[(loop - 1) % len(_MARKERS)],
        "markevery": (0.02 * loop, 0.17) if num_points > 6 else 1,
    }
