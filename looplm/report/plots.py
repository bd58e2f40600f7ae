"""The report's figures as inline SVG that follows the page: text, axes and series take the page's colours.

Matplotlib draws with the placeholder colours below; in its SVG they become CSS variables of `page.css`, so a figure
turns dark with the page. Figures are small (a phone's width), and text stays text.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from looplm.report.schema import FoldModel, TextModel, TrainingPoint

MAX_LOOP_COLOURS = 8
"""Loops with a colour of their own; deeper ones share the last."""

_INK, _MUTED, _GRID, _GATE, _TWIN = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
_LOOPS = tuple(f"#0a0c{loop:02x}" for loop in range(1, MAX_LOOP_COLOURS + 1))
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _GATE: "--gate", _TWIN: "--twin"} | {
    colour: f"--loop{loop}" for loop, colour in enumerate(_LOOPS, start=1)
}
_MARKERS, _DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", "-.", ":")
_MOST_POINTS = 120

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


def loop_number(loop: int) -> int:
    """Number of the colour of `loop`, 1 to MAX_LOOP_COLOURS: what `page.css` calls `--loop1` and so on."""
    return min(loop, MAX_LOOP_COLOURS)


class _Canvas:
    """One small figure, and its SVG once drawn."""

    def __init__(self, name: str) -> None:
        self.name, self.svg = name, ""
        self.figure = Figure(figsize=(4.8, 3.3), layout="constrained")
        self.axes: Axes = self.figure.add_subplot()


@contextmanager
def _drawn(name: str) -> Iterator[_Canvas]:
    """Gives a canvas in the report's style and leaves its SVG in `canvas.svg`. `name` keeps ids apart on a page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        canvas = _Canvas(name)
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


def depth_figure(model: TextModel) -> str:
    """Bits per byte at each fixed depth with standard errors, the trained depth marked, and the twin."""
    with _drawn(f"depth {model.name}") as canvas:
        axes, points = canvas.axes, model.sweep.points
        depths = [point.num_loops for point in points]
        axes.axvline(model.sweep.trained_loops, color=_MUTED, linewidth=1, linestyle=":")
        axes.errorbar(
            depths,
            [point.bits_per_byte for point in points],
            [point.bits_per_byte_stderr for point in points],
            color=_GATE,
            marker="o",
            capsize=3,
            label="fixed depth (dotted: as trained)",
        )
        if model.twin is not None:
            twin = model.twin.sweep.points[0]
            axes.errorbar(
                [1],
                [twin.bits_per_byte],
                [twin.bits_per_byte_stderr],
                color=_TWIN,
                marker="D",
                capsize=3,
                linestyle="none",
                label="one-loop twin",
            )
            axes.axhline(twin.bits_per_byte, color=_TWIN, linewidth=1, linestyle="--")
        _loop_axis(axes, "loops (fixed depth)", len(depths))
        axes.set_ylabel("bits per byte")
        axes.legend(loc="best")
    return canvas.svg


def loss_figure(name: str, training: Sequence[TrainingPoint]) -> str:
    """Training loss of each loop over optimizer steps."""
    with _drawn(f"loss {name}") as canvas:
        steps, losses = _thinned(training, [point.loss_nats for point in training])
        for loop, curve in enumerate(losses.T, start=1):
            canvas.axes.plot(steps, curve, label=f"loop {loop}", **_loop_style(loop, len(steps)))
        canvas.axes.set_xlabel("optimizer step")
        canvas.axes.set_ylabel("cross entropy, nats per token")
        # The first steps, at ln V, would flatten everything that follows.
        low, high = losses[len(losses) // 20 :].min(), losses[len(losses) // 20 :].max()
        canvas.axes.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
        canvas.axes.legend(loc="upper right", ncols=2)
    return canvas.svg


def exit_pdf_figure(name: str, training: Sequence[TrainingPoint]) -> str:
    """Mean exit distribution over optimizer steps, stacked: the area of a loop is its share."""
    with _drawn(f"pdf {name}") as canvas:
        steps, pdf = _thinned(training, [point.exit_pdf for point in training])
        colours = [_LOOPS[loop_number(loop) - 1] for loop in range(1, pdf.shape[1] + 1)]
        canvas.axes.stackplot(steps, pdf.T, colors=colours, alpha=0.75)
        bottom = np.concatenate((np.zeros(1), pdf[-1].cumsum()))
        for loop, (low, high) in enumerate(zip(bottom, bottom[1:], strict=False), start=1):
            if high - low > 0.05:
                canvas.axes.annotate(
                    f"loop {loop}", (1.01, (low + high) / 2), xycoords="axes fraction", va="center", fontsize=9.5
                )
        canvas.axes.set_xlabel("optimizer step")
        canvas.axes.set_ylabel("mean exit probability")
        canvas.axes.set_ylim(0, 1)
        canvas.axes.margins(x=0)
    return canvas.svg


def quality_figure(model: TextModel) -> str:
    """The gate's depth-quality curve, the line between fixed depths, and the bootstrap interval around the curve."""
    with _drawn(f"quality {model.name}") as canvas:
        axes, gaps = canvas.axes, model.quality.gaps
        fixed = model.sweep.points[: len(model.gate.mean_exit_pdf)]
        axes.plot(
            [point.num_loops for point in fixed],
            [point.bits_per_byte for point in fixed],
            color=_TWIN,
            marker="s",
            linestyle="--",
            label="fixed depths, and the line between",
        )
        depth = [gap.mean_loops for gap in gaps]
        # The interval is that of the gain, drawn from the line: where it stays below the line, the gate wins.
        axes.fill_between(
            depth,
            [gap.line_bits_per_byte - gap.gain_bits_per_byte.high for gap in gaps],
            [gap.line_bits_per_byte - gap.gain_bits_per_byte.low for gap in gaps],
            color=_GATE,
            alpha=0.2,
            linewidth=0,
            label="95% interval of the gap",
        )
        axes.plot(depth, [gap.bits_per_byte for gap in gaps], color=_GATE, label="exit gate, threshold 0 to 1")
        _loop_axis(axes, "mean loops (claimed depth)", len(fixed))
        axes.set_ylabel("bits per byte")
        axes.legend(loc="best")
    return canvas.svg


def work_figure(model: TextModel) -> str:
    """Weight passes and token-loops for each token over the threshold."""
    with _drawn(f"work {model.name}") as canvas:
        points = sorted({point.threshold: point for point in (*model.curve, *model.thresholds)}.items())
        thresholds = [threshold for threshold, _ in points]
        passes = [point.weight_passes_per_token for _, point in points]
        computed = [point.token_loops_per_token for _, point in points]
        canvas.axes.plot(thresholds, computed, color=_TWIN, linestyle="--", label="token-loops (computed)")
        canvas.axes.plot(thresholds, passes, color=_GATE, label="weight passes = claimed depth")
        canvas.axes.set_xlabel("exit threshold on the cdf")
        canvas.axes.set_ylabel("loops per token")
        canvas.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.axes.legend(loc="best")
    return canvas.svg


def fold_depth_figure(fold: FoldModel) -> str:
    """Expected depth of the gate by k."""
    with _drawn("fold depth") as canvas:
        ks = [group.group for group in fold.groups]
        canvas.axes.bar(ks, [group.expected_loops for group in fold.groups], color=_GATE, alpha=0.6, width=0.6)
        canvas.axes.errorbar(
            ks,
            [group.expected_loops for group in fold.groups],
            [group.expected_loops_std for group in fold.groups],
            color=_INK,
            linestyle="none",
            linewidth=1.2,
            capsize=3,
        )
        canvas.axes.set_ylim(0, fold.trained_loops + 0.25)
        canvas.axes.set_xlabel("k (operations in the expression)")
        canvas.axes.set_ylabel("expected loops (bar: spread)")
        canvas.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas.svg


def _loop_axis(axes: Axes, label: str, num_loops: int) -> None:
    axes.set_xlabel(label)
    axes.set_xticks(range(1, num_loops + 1))
    axes.set_xlim(0.75, num_loops + 0.25)


def _loop_style(loop: int, num_points: int) -> dict[str, Any]:
    """Colour, dash and marker of a loop's line: never the colour alone."""
    return {
        "color": _LOOPS[loop_number(loop) - 1],
        "linestyle": _DASHES[(loop - 1) % len(_DASHES)],
        "marker": _MARKERS[(loop - 1) % len(_MARKERS)],
        "markevery": (0.02 * loop, 0.17) if num_points > 6 else 1,
    }


def _thinned(training: Sequence[TrainingPoint], rows: Sequence[tuple[float, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (P,) and values (P, R), neighbouring steps averaged until at most _MOST_POINTS are left."""
    groups = np.array_split(np.arange(len(training)), min(len(training), _MOST_POINTS))
    steps, values = np.array([point.step for point in training], dtype=float), np.array(rows, dtype=float)
    return np.array([steps[g].mean() for g in groups]), np.stack([values[g].mean(0) for g in groups])
