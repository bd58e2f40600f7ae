"""Score of one task against depth and against cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from looplm.report.canvas import drawn, loop_style

if TYPE_CHECKING:
    from looplm.evaluation.task_sweep import TaskResult

Point = tuple[float, float, float]
"""Abscissa, score, standard error."""


def rule_figure(found: "Sequence[TaskResult]") -> str:
    """Score against mean loops, a line for each exit rule (Ouro, arXiv 2510.25741, Figure 5)."""
    lines: dict[str, list[Point]] = {}
    for one in found:
        if one.mean_loops is not None and one.kv_cache == "per_loop" and one.max_gen_toks == found[0].max_gen_toks:
            lines.setdefault(one.rule, []).append((one.mean_loops, one.value, one.stderr or 0.0))
    return _lines(f"rules {found[0].task}", lines, "mean loops", found[0].metric)


def cost_figure(found: "Sequence[TaskResult]") -> str:
    """Score against FLOPs a question: more loops, more answers with a majority vote, or longer answers."""
    lines: dict[str, list[Point]] = {}
    plain = [one for one in found if one.rule == "loops" and one.kv_cache == "per_loop"]
    for one in plain:
        length = "" if one.max_gen_toks is None else f", {one.max_gen_toks} tokens"
        lines.setdefault(f"loops{length}", []).append((one.flops, one.value, one.stderr or 0.0))
        votes = [
            (one.prompt_flops + score.n * one.decode_flops, score.value, score.stderr or 0.0)
            for score in one.samples
            if score.kind == "majority"
        ]
        if votes:
            lines[f"majority of n, {one.setting}"] = votes
    deepest = max((one.level for one in plain), default=0)
    longer = [(one.flops, one.value, one.stderr or 0.0) for one in plain if one.level == deepest]
    if len(longer) > 1:
        lines[f"longer answers, loops {deepest:g}"] = longer
    return _lines(f"cost {found[0].task}", lines, "FLOPs a question", found[0].metric, log=True)


def _lines(name: str, lines: dict[str, list[Point]], x_label: str, y_label: str, log: bool = False) -> str:
    with drawn(name) as canvas:
        for number, (label, points) in enumerate(lines.items(), start=1):
            x, y, errors = zip(*sorted(points), strict=True)
            canvas.axes.errorbar(x, y, errors, capsize=2, label=label, **loop_style(number, 1))
        if log:
            canvas.axes.set_xscale("log")
        canvas.axes.set_xlabel(x_label)
        canvas.axes.set_ylabel(y_label)
        if lines:
            canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg
