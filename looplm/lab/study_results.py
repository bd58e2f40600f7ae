"""What a study's cells have come to: mean and spread over seeds as a table, JSON, and runs for scaling laws."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from looplm.lab.study import SHAPE, Plan, shape_of
from looplm.lab.study_cell import FOUND
from looplm.lab.study_figures import Place, Spread, gather, shown, spread_of

MOST_IN_A_CELL = 8
"""Entries of a list that a cell of the table shows."""


def study_table(plan: Plan, places: Sequence[Place]) -> Table:
    """A row a place of the grid: its figures, mean ± standard deviation over seeds."""
    table = _table()
    for axis in plan.axes:
        table.add_column(axis, no_wrap=True)
    for name in ("seeds", *plan.study.table):
        table.add_column(name.replace("_", " "), justify="right")
    for place in places:
        cells = [_cell_text(place.spread(figure)) for figure in plan.study.table]
        table.add_row(*place.levels.values(), str(len(place.found)), *cells)
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _cell_text(spread: Spread | list[Spread] | None) -> str:
    if spread is None:
        return "-"
    if isinstance(spread, Spread):
        return spread.text()
    entries = [shown(entry.mean) for entry in spread[:MOST_IN_A_CELL]]
    return " ".join(entries) + (" ..." if len(spread) > MOST_IN_A_CELL else "")


@dataclass(frozen=True)
class Gap:
    """A looped model beside a dense one, the same in all else."""

    levels: dict[str, str]
    """Of the looped model."""
    dense: str
    """Shape of the dense one."""
    kind: str
    """"iso-parameter" (K x 1) or "iso-FLOP" (K R x 1)."""
    difference: Spread
    """Looped less dense, paired by seed."""


def gaps(plan: Plan, places: Sequence[Place], figure: str) -> list[Gap]:
    """Looped less dense in one figure, wherever the grid has both shapes and seeds of both have finished."""
    if SHAPE not in plan.axes:
        return []
    by_levels = {tuple(place.levels.items()): place for place in places}
    found = []
    for place in places:
        layers, loops = shape_of(place.levels[SHAPE])
        if loops == 1:
            continue
        for kind, shape in (("iso-parameter", f"{layers}x1"), ("iso-FLOP", f"{layers * loops}x1")):
            dense = by_levels.get(tuple((place.levels | {SHAPE: shape}).items()))
            if dense is None:
                continue
            by_seed = [{one["seed"]: one[figure] for one in side.found if one.get(figure) is not None}
                       for side in (place, dense)]  # fmt: skip
            both = sorted(set(by_seed[0]) & set(by_seed[1]))
            if both and not isinstance(by_seed[0][both[0]], list):
                difference = spread_of([by_seed[0][seed] - by_seed[1][seed] for seed in both])
                found.append(Gap(place.levels, shape, kind, difference))
    return found


def gap_table(plan: Plan, found: Sequence[Gap]) -> Table:
    """A row a pair (Ouro, table 18, with benchmark accuracies)."""
    table = _table()
    for column in (*plan.axes, "dense", "", "difference"):
        table.add_column(column, justify="right" if column == "difference" else "left")
    for gap in found:
        table.add_row(*gap.levels.values(), gap.dense, gap.kind, gap.difference.text())
    return table


RUN_COLUMNS = ("cell", "kind", "layers", "num_parameters", "core_parameters", "num_tokens", "num_loops", "loop",
               "loss", "exit_pdf")  # fmt: skip


def runs_csv(plan: Plan, out: Path) -> str:
    """Every held-out measurement of every cell, a row a loop (docs/lab.md): what scaling laws are fitted to.

    exit_pdf is the batch's mean at that step; empty beyond the trained depth.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(RUN_COLUMNS)
    for cell in plan.cells:
        path = out / "cells" / cell.name / FOUND
        if not path.exists():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["scaling"]:
            loops = found["num_loops"]
            for loop, loss in enumerate(row["loop_losses"][:loops], start=1):
                writer.writerow([
                    cell.name, "looped" if loops > 1 else "standard", found["num_layers"], found["num_parameters"],
                    found["core_parameters"], row["tokens"], loops, loop, loss, row["exit_pdf"][loop - 1],
                ])  # fmt: skip
    return file.getvalue()


def write_results(plan: Plan, out: Path, failed: dict[str, str], console: Console) -> None:
    """Shows the table and writes table.txt, results.json, runs.csv and plot.svg.

    Raises UserError when no cell has finished.
    """
    from looplm.lab.study_plot import draw

    places = gather(plan, out)
    # Titles stand above, since rich would wrap them to the table's width.
    tables = [(f"{plan.study.title} ({plan.preset}): mean ± standard deviation over seeds", study_table(plan, places))]
    figure = plan.study.table[0]
    if found := gaps(plan, places, figure):
        title = f"Looped less dense, {figure.replace('_', ' ')}: mean ± standard deviation of the pairs of one seed"
        tables.append((title, gap_table(plan, found)))
    plain = Console(file=io.StringIO(), width=200)
    for title, table in tables:
        for to in (console, plain):
            to.print(title, style="bold", highlight=False, markup=False)
            to.print(table)
    assert isinstance(plain.file, io.StringIO)
    (out / "table.txt").write_text(plain.file.getvalue(), encoding="utf-8")
    results = {
        "study": plan.name,
        "preset": plan.preset,
        "question": plan.study.question,
        "cells": [{"levels": place.levels, **found} for place in places for found in place.found],
        "failed": failed,
        "gaps": [{**vars(gap), "figure": figure, "difference": vars(gap.difference)} for gap in found],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "runs.csv").write_text(runs_csv(plan, out), encoding="utf-8")
    (out / "plot.svg").write_text(draw(plan, places), encoding="utf-8")
    names = "table.txt, results.json, runs.csv and plot.svg"
    console.print(f"{names} are in {out}.", highlight=False, markup=False, soft_wrap=True)
