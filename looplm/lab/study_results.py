"""What a study's cells have come to: mean and spread over seeds as a table, JSON, and runs for scaling laws."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from looplm.errors import UserError
from looplm.lab.study import Cell, Plan
from looplm.lab.study_figures import IN_A_TABLE, Place, Spread, kind_of, shown, spread_of, unshown
from looplm.lab.study_files import disk_errors, read_found, write_whole
from looplm.lab.study_grid import SHAPE, shape_of

MOST_IN_A_CELL = 8
"""Entries of a list that a cell of the table shows."""


def finished(plan: Plan, out: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Every finished cell with its figures."""
    for cell in plan.cells:
        found = read_found(out / "cells" / cell.name)
        if found is not None:
            yield cell, found | {"seed": cell.seed}


def gather(plan: Plan, out: Path) -> list[Place]:
    """Every place of the grid with what its finished cells have found. Raises UserError when none has finished."""
    cells = list(finished(plan, out))
    if not cells:
        raise UserError(f"No cell of {plan.name} has finished; their logs are in {out}/cells/*/log.txt.")
    return [Place(levels, [found for cell, found in cells if cell.levels == levels]) for levels in plan.places]


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
            by_seed = [{one["seed"]: one[figure] for one in side.found if kind_of(one.get(figure)) == "number"}
                       for side in (place, dense)]  # fmt: skip
            both = sorted(set(by_seed[0]) & set(by_seed[1]))
            if both:
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
    for cell, found in finished(plan, out):
        for row in found["scaling"]:
            loops = found["num_loops"]
            for loop, loss in enumerate(row["loop_losses"][:loops], start=1):
                writer.writerow([
                    cell.name, "looped" if loops > 1 else "standard", found["num_layers"], found["num_parameters"],
                    found["core_parameters"], row["tokens"], loops, loop, loss, row["exit_pdf"][loop - 1],
                ])  # fmt: skip
    return file.getvalue()


def write_results(plan: Plan, out: Path, failed: dict[str, str], console: Console) -> None:
    """Writes table.txt, results.json and runs.csv, shows the table, and draws plot.svg.

    A figure that no cell has is named. Raises UserError when no cell has finished, and for a full disk.
    """
    from looplm.lab.study_plot import draw

    places = gather(plan, out)
    found = gaps(plan, places, plan.study.table[0])
    plain = Console(file=io.StringIO(), width=200)
    _print_tables(plan, places, found, plain)
    assert isinstance(plain.file, io.StringIO)
    with disk_errors(out):
        write_whole(out / "table.txt", plain.file.getvalue())
        write_whole(out / "results.json", _results_json(plan, out, failed, found))
        write_whole(out / "runs.csv", runs_csv(plan, out))
        _print_tables(plan, places, found, console)
        wanted = [(figure, IN_A_TABLE) for figure in plan.study.table]
        wanted += [(panel.figure, panel.kinds) for panel in plan.study.plot]
        problems = dict.fromkeys(unshown(figure, kinds, places) for figure, kinds in wanted)
        for problem in filter(None, problems):
            console.print(f"Warning: {problem}.", highlight=False, markup=False, soft_wrap=True)
        write_whole(out / "plot.svg", draw(plan, places))
    names = "table.txt, results.json, runs.csv and plot.svg"
    console.print(f"{names} are in {out}.", highlight=False, markup=False, soft_wrap=True)


def _print_tables(plan: Plan, places: Sequence[Place], found: Sequence[Gap], to: Console) -> None:
    # Titles stand above, since rich would wrap them to the table's width.
    tables = [(f"{plan.study.title} ({plan.preset}): mean ± standard deviation over seeds", study_table(plan, places))]
    if found:
        figure = plan.study.table[0].replace("_", " ")
        title = f"Looped less dense, {figure}: mean ± standard deviation of the pairs of one seed"
        tables.append((title, gap_table(plan, found)))
    for title, table in tables:
        to.print(title, style="bold", highlight=False, markup=False)
        to.print(table)


def _results_json(plan: Plan, out: Path, failed: dict[str, str], found: Sequence[Gap]) -> str:
    results = {
        "study": plan.name,
        "preset": plan.preset,
        "question": plan.study.question,
        "cells": [
            {"cell": cell.name, "levels": cell.levels, "seed": cell.seed, "figures": figures}
            for cell, figures in finished(plan, out)
        ],
        "failed": failed,
        "gaps": [{**vars(gap), "figure": plan.study.table[0], "difference": vars(gap.difference)} for gap in found],
    }
    return json.dumps(results, indent=1) + "\n"
