import io

from rich.console import Console

from looplm.report import tables
from looplm.report.schema import QuickstartReport
from looplm.report.terminal import print_report


def test_cells_are_the_report_s_numbers(report: QuickstartReport) -> None:
    model = report.trained
    first = tables.depth_table(model).rows[0]
    point = model.sweep.points[0]
    assert first[:2] == ("1", f"{point.bits_per_byte:.3f} ± {point.bits_per_byte_stderr:.3f}")
    assert tables.depth_table(model).rows[4][0] == "5 (untrained)"
    assert tables.depth_table(model).rows[-1][0] == "One-loop twin"
    assert tables.depth_table(report.shipped).rows[-1][0] == "8 (untrained)"
    middle = next(row for row in tables.threshold_table(model).rows if row[0] == "0.5")
    exact = next(point for point in model.thresholds if point.threshold == 0.5)
    assert middle[1:4] == (
        f"{exact.mean_loops:.2f}",
        f"{exact.weight_passes_per_token:.2f}",
        f"{exact.token_loops_per_token:.2f}",
    )
    assert tables.cache_table(model).rows[2] == ("last", "512", "25%", "512")
    assert tables.machine_table(report.machine, report.phases).rows[-1] == ("All together", "226 s")


def test_fold_exits_stand_beside_the_twin(report: QuickstartReport) -> None:
    assert tables.fold_exit_table(report.fold).rows[3] == ("4", "0.34", "0.91", "4.00", "0.95", "4.00")


def test_every_row_has_a_cell_for_every_column(report: QuickstartReport) -> None:
    model = report.trained
    for cells in (
        tables.depth_table(model),
        tables.gate_table(model),
        tables.threshold_table(model),
        tables.cache_table(model),
        tables.fold_table(report.fold),
        tables.fold_exit_table(report.fold),
        tables.machine_table(report.machine, report.phases),
    ):
        assert {len(row) for row in cells.rows} == {len(cells.columns)}, cells.title


def test_the_whole_report_fits_eighty_columns(report: QuickstartReport) -> None:
    console = Console(width=80, file=io.StringIO())
    print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "+ Depth pays" in text and "The fold task" in text
