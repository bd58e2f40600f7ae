"""The figures of a trained model's report."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from looplm.report.canvas import GATE, INK, LOOPS, MUTED, TWIN, drawn, loop_axis, loop_number, loop_style
from looplm.report.schema import FoldModel, TextModel, TrainingPoint

_MOST_POINTS = 120


def depth_figure(model: TextModel) -> str:
    """Bits per byte at each fixed depth with standard errors, the trained depth marked, and the twin."""
    with drawn(f"depth {model.name}") as canvas:
        axes, points = canvas.axes, model.sweep.points
        depths = [point.num_loops for point in points]
        axes.axvline(model.sweep.trained_loops, color=MUTED, linewidth=1, linestyle=":")
        axes.errorbar(
            depths,
            [point.bits_per_byte for point in points],
            [point.bits_per_byte_stderr for point in points],
            color=GATE,
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
                color=TWIN,
                marker="D",
                capsize=3,
                linestyle="none",
                label="one-loop twin",
            )
            axes.axhline(twin.bits_per_byte, color=TWIN, linewidth=1, linestyle="--")
        loop_axis(axes, "loops (fixed depth)", len(depths))
        axes.set_ylabel("bits per byte")
        axes.legend(loc="best")
    return canvas.svg


def loss_figure(name: str, training: Sequence[TrainingPoint]) -> str:
    """Training loss of each loop over optimizer steps."""
    with drawn(f"loss {name}") as canvas:
        steps, losses = _thinned(training, [point.loss_nats for point in training])
        for loop, curve in enumerate(losses.T, start=1):
            canvas.axes.plot(steps, curve, label=f"loop {loop}", **loop_style(loop, len(steps)))
        canvas.axes.set_xlabel("optimizer step")
        canvas.axes.set_ylabel("cross entropy, nats per token")
        # The first steps, at ln V, would flatten everything that follows.
        low, high = losses[len(losses) // 20 :].min(), losses[len(losses) // 20 :].max()
        canvas.axes.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
        canvas.axes.legend(loc="upper right", ncols=2)
    return canvas.svg


def exit_pdf_figure(name: str, training: Sequence[TrainingPoint]) -> str:
    """Mean exit distribution over optimizer steps, stacked: the area of a loop is its share."""
    with drawn(f"pdf {name}") as canvas:
        steps, pdf = _thinned(training, [point.exit_pdf for point in training])
        colours = [LOOPS[loop_number(loop) - 1] for loop in range(1, pdf.shape[1] + 1)]
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
    with drawn(f"quality {model.name}") as canvas:
        axes, gaps = canvas.axes, model.quality.gaps
        fixed = model.sweep.points[: len(model.gate.mean_exit_pdf)]
        axes.plot(
            [point.num_loops for point in fixed],
            [point.bits_per_byte for point in fixed],
            color=TWIN,
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
            color=GATE,
            alpha=0.2,
            linewidth=0,
            label="95% interval of the gap",
        )
        axes.plot(depth, [gap.bits_per_byte for gap in gaps], color=GATE, label="exit gate, threshold 0 to 1")
        loop_axis(axes, "mean loops (claimed depth)", len(fixed))
        axes.set_ylabel("bits per byte")
        axes.legend(loc="best")
    return canvas.svg


def work_figure(model: TextModel) -> str:
    """Weight passes and token-loops for each token over the threshold."""
    with drawn(f"work {model.name}") as canvas:
        points = sorted({point.threshold: point for point in (*model.curve, *model.thresholds)}.items())
        thresholds = [threshold for threshold, _ in points]
        passes = [point.weight_passes_per_token for _, point in points]
        computed = [point.token_loops_per_token for _, point in points]
        canvas.axes.plot(thresholds, computed, color=TWIN, linestyle="--", label="token-loops (computed)")
        canvas.axes.plot(thresholds, passes, color=GATE, label="weight passes = claimed depth")
        canvas.axes.set_xlabel("exit threshold on the cdf")
        canvas.axes.set_ylabel("loops per token")
        canvas.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.axes.legend(loc="best")
    return canvas.svg


def fold_depth_figure(fold: FoldModel) -> str:
    """Expected depth of the gate by k."""
    with drawn("fold depth") as canvas:
        ks = [group.group for group in fold.groups]
        canvas.axes.bar(ks, [group.expected_loops for group in fold.groups], color=GATE, alpha=0.6, width=0.6)
        canvas.axes.errorbar(
            ks,
            [group.expected_loops for group in fold.groups],
            [group.expected_loops_std for group in fold.groups],
            color=INK,
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


def _thinned(training: Sequence[TrainingPoint], rows: Sequence[tuple[float, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (P,) and values (P, R), neighbouring steps averaged until at most _MOST_POINTS are left."""
    groups = np.array_split(np.arange(len(training)), min(len(training), _MOST_POINTS))
    steps, values = np.array([point.step for point in training], dtype=float), np.array(rows, dtype=float)
    return np.array([steps[g].mean() for g in groups]), np.stack([values[g].mean(0) for g in groups])
