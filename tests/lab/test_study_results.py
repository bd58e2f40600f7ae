"""What a study comes to: mean and spread, gaps between shapes, the plot, the runs for scaling laws."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from looplm.errors import UserError
from looplm.lab import study_plot
from looplm.lab.study import Plan, plan_study
from looplm.lab.study_figures import Place, Spread, shown
from looplm.lab.study_results import RUN_COLUMNS, gaps, gather, runs_csv, write_results

GRID = "grid: {shape: [1x1, 1x2, 2x1], lr: {key: stages.0.optimizer.lr, values: [0.1, 0.2]}}, base"

UNFINISHED = ("2x1-0.2-seed1", "1x2-0.1-seed0")


def found(seed: int, loss: float, loops: int) -> dict[str, Any]:
    """What a cell might have found."""
    return {
        "seed": seed, "num_loops": loops, "num_layers": 1, "num_parameters": 100, "core_parameters": 60,
        "train_loss": loss, "train_loss_by_loop": [loss + 1, loss][:loops],
        "loss_curve": {"x": [1.0, 2.0], "y": [loss, loss / 2]},
        "scaling": [{"tokens": 64, "loop_losses": [loss + 1, loss, 9.0][: loops + 1], "exit_pdf": [0.5] * loops}],
    }  # fmt: skip


@pytest.fixture
def plan(own: Path, tmp_path: Path) -> Plan:
    """Three shapes at two learning rates, two seeds, all finished but two; the losses are known."""
    panels = ("plot: [{figure: train_loss, against: lr}, {figure: train_loss_by_loop}, "
              "{figure: loss_curve, per: [shape], scale: log}]")  # fmt: skip
    text = own.read_text().replace("{base", f"{{{GRID}")
    own.write_text(text.replace("plot: [{figure: train_loss, against: lr}]", panels).replace(
        "table: [train_loss]", "table: [train_loss, train_loss_by_loop]"))  # fmt: skip
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
    train_loss_by_loop = places["1x2", "0.2"].spread("train_loss_by_loop")
    assert isinstance(train_loss_by_loop, list) and [entry.mean for entry in train_loss_by_loop] == pytest.approx(
        [4.2, 3.2]
    )
    assert places["1x1", "0.1"].spread("no such figure") is None
    line = places["1x1", "0.1"].curve("loss_curve")
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
    first = results["cells"][0]
    assert (first["cell"], first["levels"], first["seed"]) == ("1x1-0.1-seed0", {"shape": "1x1", "lr": "0.1"}, 0)
    assert first["figures"]["train_loss"] == 4.1
    plot = (out / "plot.svg").read_text()
    for text in ("A study", "train loss", "train loss by loop", "1x2", "0.2"):
        assert f">{text}" in plot
    assert not re.search(r">1\.[0-9]+<", plot), "there is no loop between the first and the second"
    write_results(plan, out, {}, Console(quiet=True))
    assert (out / "plot.svg").read_text() == plot


def overwrite(out: Path, **figures: Any) -> None:
    """Gives every cell further figures."""
    for file in out.glob("cells/*/found.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | figures))


def test_no_figure_hides_where_in_the_grid_a_cell_stands(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = gaps(plan, gather(plan, out), "train_loss")
    overwrite(out, levels=[1, 2, 3], seed=7, cell="a figure")  # a task's figures have `levels`
    assert gaps(plan, gather(plan, out), "train_loss") == before
    write_results(plan, out, {}, Console(quiet=True))
    cells = json.loads((out / "results.json").read_text())["cells"]
    assert {(cell["cell"], *cell["levels"].values(), cell["seed"]) for cell in cells} == {
        (cell.name, *cell.levels.values(), cell.seed) for cell in plan.cells if cell.name not in UNFINISHED
    }
    assert cells[0]["figures"]["levels"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "no cell has the figure mine"),
        ([[1.0], [2.0]], "the figure mine is no number or list"),
        ({"a": 1.0}, "the figure mine is no number or list"),
        ({"x": [1], "y": [2]}, "the figure mine is no number"),
        ("text", "the figure mine is no number"),
    ],
)
def test_a_figure_that_cannot_be_shown_is_named_and_costs_nothing_else(
    plan: Plan, tmp_path: Path, value: Any, words: str
) -> None:
    out, told = tmp_path / "out", io.StringIO()
    overwrite(out, mine=value)
    panels = [panel.model_copy(update={"figure": "mine"}) for panel in plan.study.plot]
    study = plan.study.model_copy(update={"table": ["mine", "train_loss"], "plot": panels})
    write_results(replace(plan, study=study), out, {}, Console(file=told, width=100))
    assert f"Warning: {words}" in told.getvalue()
    assert "4.35 ± 0.35" in (out / "table.txt").read_text() and (out / "runs.csv").exists()
    assert "the figure mine" in (out / "plot.svg").read_text()


def test_numbers_come_before_the_plot(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise RuntimeError("no plot")

    monkeypatch.setattr(study_plot, "draw", fails)
    with pytest.raises(RuntimeError):
        write_results(plan, tmp_path / "out", {}, Console(quiet=True))
    assert {"table.txt", "results.json", "runs.csv"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_a_figure_that_is_not_finite_is_shown_as_such() -> None:
    spread = Place({}, [{"loss": math.inf}, {"loss": 2.0}]).spread("loss")
    assert isinstance(spread, Spread) and spread.text() == "nan"


def test_a_result_that_cannot_be_written_is_one_paragraph(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out" / "table.txt").mkdir()  # Linux and macOS have different words for it
    with pytest.raises(UserError, match=r"out.table\.txt cannot be read or written: .* run the same command again"):
        write_results(plan, tmp_path / "out", {}, Console(quiet=True))


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
