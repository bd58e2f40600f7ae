"""The report for a terminal: findings and tables, the same as the page's."""

from rich.console import Console
from rich.text import Text

from looplm.report.schema import QuickstartReport
from looplm.report.tables import (
    Cells,
    cache_table,
    depth_table,
    fold_exit_table,
    fold_table,
    gate_table,
    machine_table,
    terminal_table,
    threshold_table,
)
from looplm.report.verdicts import Verdict, fold_verdict, text_model_verdicts

_MARKS = {True: ("+", "green"), False: ("-", "red"), None: ("o", "dim")}


def print_report(report: QuickstartReport, console: Console) -> None:
    """Prints every finding and table. Marks: + as hoped, - not as hoped, o neither."""
    for model in (report.shipped, report.trained):
        print_part(
            model.name,
            text_model_verdicts(model),
            (depth_table(model), gate_table(model), threshold_table(model), cache_table(model)),
            console,
        )
    print_part(
        "The fold task", [fold_verdict(report.fold)], (fold_table(report.fold), fold_exit_table(report.fold)), console
    )
    console.print(terminal_table(machine_table(report.machine, report.phases)))


def print_part(name: str, verdicts: list[Verdict], tables: tuple[Cells, ...], console: Console) -> None:
    """One model: its name, its findings, its tables."""
    console.print(Text(name, style="bold underline"))
    for verdict in verdicts:
        mark, style = _MARKS[verdict.good]
        console.print(Text.assemble((f"{mark} ", style), verdict.text))
    for cells in tables:
        console.print(terminal_table(cells))
