"""Judged answers: tables, and a section with plots of harm by depth."""

from collections import Counter
from collections.abc import Mapping, Sequence

from looplm.evaluation.bootstrap import Interval
from looplm.evaluation.harm import ALL, HarmScore
from looplm.evaluation.judge import Judgment
from looplm.evaluation.judge_scores import ScoreSummary
from looplm.evaluation.rubrics import HIGHEST, LOWEST
from looplm.report.canvas import drawn, loop_style
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

COLUMNS = (f"Mean, {LOWEST} to {HIGHEST}", f"Share of {HIGHEST}", "Scored", "Missing")
"""Of every table of summaries."""


def judge_cells(summaries: Mapping[str, ScoreSummary], grouped_by: str) -> Cells:
    """A row for each group of answers."""
    rows = tuple((name, *summary_cells(one)) for name, one in summaries.items())
    return Cells("Judged answers, with 95 % intervals", (grouped_by, *COLUMNS), rows)


def harm_cells(scores: Sequence[HarmScore]) -> Cells:
    """A row for each way of decoding, depth and category."""
    rows = tuple((one.decoding, one.setting, one.category, *summary_cells(one.summary)) for one in scores)
    return Cells(
        "Harm by depth and category, with 95 % intervals", ("Decoding", "Setting", "Category", *COLUMNS), rows
    )


def summary_cells(summary: ScoreSummary) -> tuple[str, str, str, str]:
    """Mean, share of the highest score, how many were scored, and how many are missing."""
    mean, rate = summary.mean, summary.highest_rate
    return (
        "" if mean is None else f"{mean.value:.2f} ({mean.low:.2f} to {mean.high:.2f})",
        "" if rate is None else f"{rate.value:.1%} ({rate.low:.1%} to {rate.high:.1%})",
        str(summary.num_scored),
        str(summary.num_missing),
    )


def missing_note(judgments: Sequence[Judgment]) -> str:
    """How many judgments are missing, and why; empty where none is."""
    reasons = Counter(one.said for one in judgments if one.score is None)
    if not reasons:
        return ""
    named = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(3))
    return f"{reasons.total()} of {len(judgments)} are missing and in no figure ({named}). Run again to ask for them."


def harm_section(scores: Sequence[HarmScore]) -> str:
    """Plots over all categories, and the table."""
    return "\n".join(
        [
            '<h2 id="harm">Harm by depth</h2>',
            f"<p>A judge scores every answer from {LOWEST}, which declines, to {HIGHEST}, which does in full what a "
            "harmful request asks for. Bars are 95 % intervals over prompts. All depths answer the same prompts, so "
            "that overlapping bars do not refute a difference between two of them; a rate of 0 is no proof of safety: "
            "see how far its interval reaches. Missing judgments are in no figure.</p>",
            '<div class="figures">',
            figure(harm_figure(scores, rate=False), "Mean score of all prompts."),
            figure(harm_figure(scores, rate=True), f"Share of answers with the score {HIGHEST}."),
            "</div>",
            table(harm_cells(scores)),
        ]
    )


def harm_figure(scores: Sequence[HarmScore], *, rate: bool) -> str:
    """The mean score, or the share of the highest, of all prompts at each setting; a line for each decoding."""
    with drawn(f"harm {'rate' if rate else 'mean'}") as canvas:
        whole = [one for one in scores if one.category == ALL]
        settings = list(dict.fromkeys(one.setting for one in whole))
        for number, decoding in enumerate(dict.fromkeys(one.decoding for one in whole), start=1):
            points: list[tuple[int, Interval]] = []
            for one in whole:
                shown = one.summary.highest_rate if rate else one.summary.mean
                if one.decoding == decoding and shown is not None:
                    points.append((settings.index(one.setting), shown))
            values = [point.value for _, point in points]
            below = [max(0.0, point.value - point.low) for _, point in points]
            above = [max(0.0, point.high - point.value) for _, point in points]
            canvas.axes.errorbar(
                [x for x, _ in points], values, (below, above), capsize=2, label=decoding, **loop_style(number, 1)
            )
        canvas.axes.set_xticks(range(len(settings)), [name.removeprefix("loops ") for name in settings])
        canvas.axes.set_xlabel("loops")
        canvas.axes.set_ylabel(f"share of {HIGHEST}" if rate else "mean score")
        canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg
