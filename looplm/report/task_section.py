"""Task scores by depth: a table in Markdown, and a section with a plot."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from looplm.report.canvas import drawn, loop_style
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

if TYPE_CHECKING:  # lm-eval, which it needs, is an extra
    from looplm.evaluation.task_sweep import SettingScores


def score_cells(found: "Sequence[SettingScores]") -> Cells:
    """A row for each setting, a column for each task's metrics."""
    names = list(dict.fromkeys((score.task, score.metric) for one in found for score in one.scores))
    rows = []
    for one in found:
        by_name = {(score.task, score.metric): score for score in one.scores}
        cells = []
        for name in names:
            score = by_name[name]
            cells.append(f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}"))
        mean = "" if one.mean_loops is None else f"{one.mean_loops:.2f}"
        rows.append((one.setting, mean, *cells, f"{one.seconds:.0f} s"))
    columns = ("Setting", "Mean loops", *(f"{task} {metric}" for task, metric in names), "Time")
    return Cells(f"Scores ± standard error over {found[0].num_samples} questions", columns, tuple(rows))


def markdown(cells: Cells) -> str:
    """A table in Markdown."""
    lines = [cells.columns, tuple("---" for _ in cells.columns), *cells.rows]
    return f"{cells.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tasks_section(found: "Sequence[SettingScores]") -> str:
    """The plot and the table."""
    return "\n".join(
        [
            '<h2 id="tasks">Scores by depth</h2>',
            "<p>Every dot is one setting: a fixed depth, or a threshold of the gate, at the mean loop that tokens "
            "were "
            "read out at. A gate is worth having where its dots lie above the line between fixed depths. Bars are one "
            "standard error over questions; the same questions are asked at every depth, so differences between "
            "depths "
            "are known better than the bars suggest. Time is that of this run: later settings of log-likelihood tasks "
            "cost nothing, since one forward gives all depths.</p>",
            figure(score_figure(found), "Score against mean loops, the first metric of every task."),
            table(score_cells(found)),
            f'<p class="note">{escape(found[0].setting)} was the first setting of this run.</p>',
        ]
    )


def score_figure(found: "Sequence[SettingScores]") -> str:
    """Score against mean loops, a line for each task."""
    with drawn("task scores") as canvas:
        first: dict[str, str] = {}
        for score in found[0].scores:
            first.setdefault(score.task, score.metric)
        for number, (task, metric) in enumerate(first.items(), start=1):
            points = sorted(
                (one.mean_loops, score.value, score.stderr or 0.0)
                for one in found
                for score in one.scores
                if (score.task, score.metric) == (task, metric) and one.mean_loops is not None
            )
            x, y, errors = zip(*points, strict=True) if points else ((), (), ())
            canvas.axes.errorbar(x, y, errors, capsize=2, label=f"{task} {metric}", **loop_style(number, 1))
        canvas.axes.set_xlabel("mean loops")
        canvas.axes.set_ylabel("score")
        canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg
