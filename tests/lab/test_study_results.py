"""What a study comes to: mean and spread, gaps between shapes, the plot, the runs for scaling laws."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from looplm.errors import UserError
from looplm.lab.study import Plan, plan_study
from looplm.lab.study_figures import Place, Spread, gather, shown
from looplm.lab.study_results import RUN_COLUMNS, gaps, runs_csv, write_results

GRID = "grid: {shape: [1x1, 1x2, 2x1], lr: {key: stages.0.optimizer.lr, values: [0.1, 0.2]}}, base"

UNFINISHED = ("2x1-0.2-seed1", "1x2-0.1-seed0")


def found(seed: int, loss: float, loops: int) -> dict[str, Any]:
    """What a cell might have found."""
    return {
        "seed": seed, "num_loops": loops, "num_layers": 1, "num_parameters": 100, "core_parameters": 60,
        "train_loss": loss, "by_loop": [loss + 1, loss][:loops], "curve": {"x": [1.0, 2.0], "y": [loss, loss / 2]},
        "scaling": [{"tokens": 64, "loop_losses": [loss + 1, loss, 9.0][: loops + 1], "exit_pdf": [0.5] * loops}],
    }  # fmt: skip


@pytest.fixture
def plan(own: Path, tmp_path: Path) -> Plan:
    """Three shapes at two learning rates, two seeds, all finished but two; the losses are known."""
    panels = "plot: [{figure: train_loss, against: lr}, {figure: by_loop}, {figure: curve, per: [shape], scale: log}]"
    text = own.read_text().replace("{base", f"{{{GRID}")
    own.write_text(text.replace("plot: [{figure: train_loss, against: lr}]", panels).replace(
        "table: [train_loss]", "table: [train_loss, by_loop]"))  # fmt: skip
    planned = plan_study(own, "small")
    for cell in planned.cells:
        if cell.name in UNFINISHED:
            continue
        directory = tmp_path / "out" / "cells" / cell.name
        directory.mkdir(parents=True)
        base = {"1x1": 4.0, "1x2": 3.0, "2x1": 2.5}[cell.levels["shape"]]
        loss = base + float(cell.levels["lr"]) + 0.5 * cell.seed * (cell.levels["shape"] != "1x2")
        (directory / "found.json").write_text(json.dumps(found(cell.seed, loss, 1 + (cell.levels["shape"] == "1x2"))))
    return planned


def test_figures_are_averaged_over_seeds(plan: Plan, tmp_path: Path) -> None:
    places = {tuple(place.levels.values()): place for place in gather(plan, tmp_path / "out")}
    std = pytest.approx(0.5 / math.sqrt(2))
    assert places["1x1", "0.1"].spread("train_loss") == Spread(pytest.approx(4.35), std, 2)
    assert places["2x1", "0.2"].spread("train_loss") == Spread(2.7, None, 1)
    by_loop = places["1x2", "0.2"].spread("by_loop")
    assert isinstance(by_loop, list) and [entry.mean for entry in by_loop] == pytest.approx([4.2, 3.2])
    assert places["1x1", "0.1"].spread("no such figure") is None
    line = places["1x1", "0.1"].curve("curve")
    assert line is not None and line[0] == [1.0, 2.0] and [y.mean for y in line[1]] == pytest.approx([4.35, 2.175])


def test_a_figure_that_some_seeds_lack_is_averaged_over_the_others() -> None:
    place = Place({}, [{"decades": None}, {"decades": 2.0}])
    assert place.spread("decades") == Spread(2.0, None, 1)


def test_gaps_pair_looped_models_with_dense_ones_seed_by_seed(plan: Plan, tmp_path: Path) -> None:
    pairs = {(gap.levels["lr"], gap.kind): gap for gap in gaps(plan, gather(plan, tmp_path / "out"), "train_loss")}
    assert len(pairs) == 4
    parameters = pairs["0.1", "iso-parameter"]
    # Seed 0 of the looped one has not finished.
    assert parameters.dense == "1x1" and parameters.difference == Spread(pytest.approx(-1.5), None, 1)
    work = pairs["0.2", "iso-FLOP"]  # seed 1 of the dense one has not finished
    assert work.dense == "2x1" and work.difference == Spread(pytest.approx(0.5), None, 1)


def test_results_are_written_and_shown(plan: Plan, tmp_path: Path) -> None:
    out, shown_text = tmp_path / "out", io.StringIO()
    write_results(plan, out, {"2x1-0.2-seed1": "it diverged"}, Console(file=shown_text, width=100))
    table = (out / "table.txt").read_text()
    for text in (table, shown_text.getvalue()):
        assert "4.35 ± 0.35" in text and "4.1 3.1" in text and "iso-FLOP" in text
    results = json.loads((out / "results.json").read_text())
    assert len(results["cells"]) == 10 and results["failed"] == {"2x1-0.2-seed1": "it diverged"}
    assert results["cells"][0]["levels"] == {"shape": "1x1", "lr": "0.1"}
    plot = (out / "plot.svg").read_text()
    for text in ("A study", "train loss", "by loop", "1x2", "0.2"):
        assert f">{text}" in plot
    assert not re.search(r">1\.[0-9]+<", plot), "there is no loop between the first and the second"
    write_results(plan, out, {}, Console(quiet=True))
    assert (out / "plot.svg").read_text() == plot


def test_runs_have_a_row_a_loop_up_to_the_trained_depth(plan: Plan, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(runs_csv(plan, tmp_path / "out"))))
    assert tuple(rows[0]) == RUN_COLUMNS
    looped = [row for row in rows if row["cell"] == "1x2-0.1-seed1"]
    assert [(row["loop"], float(row["loss"])) for row in looped] == [("1", 4.1), ("2", 3.1)]
    assert {row["kind"] for row in looped} == {"looped"} and {row["num_tokens"] for row in rows} == {"64"}
    assert [row["kind"] for row in rows if row["cell"] == "1x1-0.1-seed0"] == ["standard"]
    assert len(rows) == 3 * 2 + 7


def test_without_a_finished_cell_there_is_nothing_to_show(own: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No cell of own has finished"):
        gather(plan_study(own, "small"), tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.14159, "3.142"), (52_345.6, "52,346"), (5.2e7, "5.2e+07"), (-2e-9, "-2e-09")]
)
def test_four_digits_are_shown(value: float, text: str) -> None:
    assert shown(value) == text
