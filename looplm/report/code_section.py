"""pass@k by depth: a table, and a section with a plot."""

from collections.abc import Sequence

from looplm.evaluation.code_results import CodeScore
from looplm.evaluation.pass_at_k import Estimate
from looplm.report.canvas import drawn, loop_style
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

MOST_KINDS = 4
"""Kinds of failure that the table names."""


def code_cells(scores: Sequence[CodeScore]) -> Cells:
    """A row for each setting, a column for each k."""
    ks = list(scores[0].pass_at_k)
    rows = []
    for one in scores:
        kinds = list(one.failures.items())
        named = ", ".join(f"{kind} {count}" for kind, count in kinds[:MOST_KINDS])
        others = sum(count for _, count in kinds[MOST_KINDS:])
        depth = "" if one.mean_loops is None else f"{one.mean_loops:.2f}"
        cells = [with_error(one.pass_at_k[k]) for k in ks]
        rows.append((one.setting, depth, *cells, named + (f", others {others}" if others else "")))
    first = scores[0]
    title = f"pass@k ± standard error over {first.num_problems} problems, {first.num_samples} sample(s) each"
    return Cells(title, ("Setting", "Mean loops", *(f"pass@{k}" for k in ks), "Failed at"), tuple(rows))


def with_error(estimate: Estimate) -> str:
    """A share in percent and its standard error."""
    return f"{estimate.value:.1%}" + ("" if estimate.stderr is None else f" ± {estimate.stderr:.1%}")


def code_section(scores: Sequence[CodeScore], under: str) -> str:
    """The plot and the table. `under`: limits and isolation that programs were run with."""
    return "\n".join(
        [
            '<h2 id="code">Programs that pass their tests, by depth</h2>',
            "<p>A sample passes if its program and all tests run to the end. pass@k is the chance that one of k "
            "samples does, without bias. Bars are one standard error over problems; every depth answers the same "
            "problems.</p>",
            figure(code_figure(scores), "pass@k against the mean loop that tokens were read out at."),
            table(code_cells(scores)),
            f'<p class="note">Each program ran in a process of its own: {under}.</p>',
        ]
    )


def code_figure(scores: Sequence[CodeScore]) -> str:
    """pass@k against mean loops, a line for each k."""
    with drawn("pass at k") as canvas:
        for number, k in enumerate(scores[0].pass_at_k, start=1):
            points = sorted(
                (one.mean_loops, one.pass_at_k[k].value, one.pass_at_k[k].stderr or 0.0)
                for one in scores
                if one.mean_loops is not None
            )
            x, y, errors = zip(*points, strict=True) if points else ((), (), ())
            canvas.axes.errorbar(x, y, errors, capsize=2, label=f"pass@{k}", **loop_style(number, 1))
        canvas.axes.set_xlabel("mean loops")
        canvas.axes.set_ylabel("share of problems")
        canvas.axes.set_ylim(bottom=0)
        canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg
