"""What a run shows: lines in a log, a live view in a terminal."""

import io

import pytest
from rich.console import Console

from looplm.training.telemetry import Telemetry
from looplm.training.telemetry_view import (
    clock,
    held_out_line,
    live_view,
    progress_line,
    seconds_left,
    spark_line,
)

from .telemetry_records import MEASURED, plain_console, record


def shown(view: object) -> list[str]:
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=120, color_system=None).print(view)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_log_gets_a_line_now_and_then_and_the_last_one_always():
    file = io.StringIO()
    telemetry = Telemetry(console=plain_console(file), line_seconds=1000)
    with telemetry.stage():
        for step in (1, 2, 119, 120):
            telemetry.log(record(step))
    assert file.getvalue().splitlines() == [progress_line(record(1)), progress_line(record(120))]


def test_a_line_holds_progress_time_left_and_every_loop():
    assert progress_line(record(30)) == (
        "first 30/120  3:00 left  loss by loop 2.500 2.250 2.125  exit pdf 0.50 0.30 0.20  H 1.03  1,234 tokens/s"
    )


def test_a_stage_s_name_is_not_markup():
    file = io.StringIO()
    telemetry = Telemetry(console=plain_console(file))
    telemetry.log(record(stage="[red]one"))
    telemetry.warn("[red]one", 3, "[bold] stays")
    assert file.getvalue().splitlines()[0].startswith("[red]one 30/120")
    assert file.getvalue().splitlines()[1] == "[red]one, step 3: [bold] stays"


def test_silence_and_no_files_without_console_and_directory(capsys: pytest.CaptureFixture):
    telemetry = Telemetry()
    with telemetry.stage():
        telemetry.log(record())
        telemetry.warn("first", 30, "something")
    assert telemetry.records == [record()]
    assert telemetry.path is None
    assert capsys.readouterr() == ("", "")


def test_time_left_is_at_the_mean_pace_of_the_whole_stage():
    assert seconds_left(record(30)) == 180
    assert seconds_left(record(120)) == 0
    assert [clock(seconds) for seconds in (0, 59.9, 60, 754, 7200)] == ["0:00", "0:59", "1:00", "12:34", "120:00"]


def test_held_out_losses_have_a_line():
    file = io.StringIO()
    telemetry = Telemetry(console=plain_console(file))
    telemetry.log_held_out("first", 40, MEASURED)
    assert file.getvalue().splitlines() == [held_out_line("first", 40, MEASURED)]
    assert held_out_line("first", 40, MEASURED) == (
        "first 40  held out, 5,000 tokens: loss by loop 2.600 2.400 2.300 2.350  bits per byte 1.300 1.200 1.150 1.175"
    )
    assert telemetry.held_out == {("first", 40): MEASURED}


def test_a_share_of_peak_is_told_where_it_is_known():
    assert progress_line(record(flops_utilisation=0.421)).endswith("1,234 tokens/s, 42% of peak")


def test_a_spark_line_goes_from_nothing_to_full_and_keeps_the_newest():
    assert spark_line([0.0, 0.2, 0.5, 0.99, 1.0]) == "▁▂▅██"
    assert spark_line([1.0] * 999 + [0.0], width=40) == "█" * 39 + "▁"
    assert len(spark_line([0.5] * 41, width=40)) == 21
    assert spark_line([-0.1, 1.1]) == "▁█"


def test_the_live_view_shows_progress_and_a_bar_a_loop():
    lines = shown(live_view([record(30)]))
    assert "first" in lines[0] and "30/120 steps" in lines[0] and "3:00 left" in lines[0]
    assert lines[0].count("█") == 8 and lines[0].count("░") == 22  # a quarter of 30
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "2.5000"], ["2", "2.2500"], ["3", "2.1250"]]
    assert [line.count("█") for line in lines[2:5]] == [20, 12, 8]
    assert "gate entropy 1.03 (94% of even)" in lines[5]
    assert "held out" not in lines[1]


def test_the_live_view_shows_held_out_loss_beyond_the_trained_depth_trend_and_alarms():
    falling = [record(step, exit_pdf=[1 - 2 * p, p, p]) for step, p in ((10, 0.33), (20, 0.1), (30, 0.0))]
    lines = shown(live_view(falling, MEASURED, ["step 5: old", "step 20: falling", "step 30: collapsed"]))
    assert lines[1].split()[-5:] == ["held", "out", "bits", "per", "byte"]
    assert lines[2].split()[:2] == ["1", "2.5000"] and lines[2].split()[-2:] == ["2.6000", "1.300"]
    assert lines[5].split() == ["4", "2.3500", "1.175"]
    assert lines[7].endswith("evenness █▅▁")
    assert lines[8:] == ["! step 20: falling", "! step 30: collapsed"]


def test_the_live_view_takes_a_single_loop():
    lines = shown(live_view([record(loop_losses=[2.0], exit_pdf=[1.0], entropy=0.0)]))
    assert any("(0% of even)" in line for line in lines)


def test_the_views_take_a_step_that_was_not_finite():
    nan = float("nan")
    broken = record(loss=nan, loop_losses=[nan] * 3, exit_pdf=[nan] * 3, entropy=nan)
    assert "nan" in shown(live_view([record(20), broken]))[2]
    assert "nan nan nan" in progress_line(broken)


def test_a_terminal_gets_the_live_view_and_warnings_above_it():
    file = io.StringIO()
    telemetry = Telemetry(console=Console(file=file, force_terminal=True, width=100))
    with telemetry.stage():
        telemetry.log(record(30))
        telemetry.warn("first", 30, "The exit gate has collapsed.")
        telemetry.log(record(31))
        telemetry.log_held_out("first", 31, MEASURED)
    text = file.getvalue()
    assert "31/120 steps" in text and "nats per token" in text and "2.3500" in text
    assert "first, step 30: The exit gate has collapsed." in text and "! step 30: The exit gate" in text
    assert progress_line(record(31)) not in text and held_out_line("first", 31, MEASURED) not in text


def test_the_live_view_is_of_its_own_stage():
    file = io.StringIO()
    telemetry = Telemetry(console=Console(file=file, force_terminal=True, width=100))
    telemetry.log(record(30))
    telemetry.warn("first", 30, "careful")
    telemetry.log_held_out("first", 30, MEASURED)
    file.truncate(0)
    with telemetry.stage():
        telemetry.log(record(1, stage="second"))
    assert "second" in file.getvalue() and "careful" not in file.getvalue() and "held out" not in file.getvalue()


def test_an_error_closes_the_display_and_the_event_file():
    telemetry = Telemetry(console=Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyboardInterrupt), telemetry.stage():
        raise KeyboardInterrupt
    with telemetry.stage():  # a display that still ran would refuse a second one
        telemetry.log(record())
