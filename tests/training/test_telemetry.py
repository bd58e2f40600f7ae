"""What a run tells, and to whom: memory, JSONL, TensorBoard, a log, a live terminal."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from looplm.training.telemetry import Record, Telemetry, clock, live_view, progress_line, seconds_left


def record(step: int = 30, **overrides) -> Record:
    """A record of a stage of 120 steps, two seconds each."""
    plain = Record(
        stage="first",
        step=step,
        num_steps=120,
        tokens=100 * step,
        loss=2.0,
        loop_losses=[2.5, 2.25, 2.125],
        exit_pdf=[0.5, 0.3, 0.2],
        entropy=1.03,
        expected_loops=1.7,
        lr=1e-3,
        grad_norm=0.5,
        tokens_per_second=1234.5,
        seconds=2.0 * step,
    )
    return replace(plain, **overrides)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_console(file: io.StringIO) -> Console:
    return Console(file=file, force_terminal=False, width=200)


def test_jsonl_lines_are_the_records(tmp_path: Path):
    telemetry = Telemetry(tmp_path / "run")
    with telemetry.stage():
        telemetry.log(record(1))
        telemetry.warn("first", 1, "The exit gate has collapsed.")
        telemetry.log(record(2))
    lines = read(tmp_path / "run" / "telemetry.jsonl")
    assert lines[1] == {"stage": "first", "step": 1, "warning": "The exit gate has collapsed."}
    assert [Record(**line) for line in (lines[0], lines[2])] == telemetry.records == [record(1), record(2)]
    assert lines[0] == asdict(record(1))


def test_tensorboard_has_a_curve_for_every_figure_and_loop(tmp_path: Path):
    telemetry = Telemetry(tmp_path)
    with telemetry.stage():
        telemetry.log(record(1))
        telemetry.log(record(2, loop_losses=[1.5, 1.25, 1.0]))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    figures = {"loss", "entropy", "expected_loops", "lr", "grad_norm", "tokens_per_second"}
    by_loop = {f"{name}/{loop}" for name in ("loop_loss", "exit_pdf") for loop in (1, 2, 3)}
    assert set(events.Tags()["scalars"]) == {f"first/{name}" for name in figures | by_loop}
    assert [(event.step, event.value) for event in events.Scalars("first/loop_loss/3")] == [(1, 2.125), (2, 1.0)]


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


def test_the_live_view_shows_progress_and_a_bar_a_loop():
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=100, color_system=None).print(live_view(record(30)))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert "first" in lines[0] and "30/120 steps" in lines[0] and "3:00 left" in lines[0]
    assert lines[0].count("█") == 8 and lines[0].count("░") == 22  # a quarter of 30
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "2.5000"], ["2", "2.2500"], ["3", "2.1250"]]
    assert [line.count("█") for line in lines[2:5]] == [20, 12, 8]
    assert "gate entropy 1.03 (94% of even)" in lines[5]


def test_the_live_view_takes_a_single_loop():
    file = io.StringIO()
    one = record(loop_losses=[2.0], exit_pdf=[1.0], entropy=0.0)
    Console(file=file, force_terminal=True, width=100).print(live_view(one))
    assert "(0% of even)" in file.getvalue()


def test_a_terminal_gets_the_live_view_and_warnings_above_it():
    file = io.StringIO()
    telemetry = Telemetry(console=Console(file=file, force_terminal=True, width=100))
    with telemetry.stage():
        telemetry.log(record(30))
        telemetry.warn("first", 30, "The exit gate has collapsed.")
        telemetry.log(record(31))
    shown = file.getvalue()
    assert "31/120 steps" in shown and "nats per token" in shown
    assert shown.count("The exit gate has collapsed.") == 1
    assert progress_line(record(31)) not in shown


def test_an_error_closes_the_display_and_the_event_file():
    telemetry = Telemetry(console=Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyboardInterrupt), telemetry.stage():
        raise KeyboardInterrupt
    with telemetry.stage():  # a display that still ran would refuse a second one
        telemetry.log(record())


def test_rewinding_takes_back_the_stage_s_later_steps_alone(tmp_path: Path):
    telemetry = Telemetry(tmp_path)
    for stage in ("first", "second"):
        for step in (1, 2, 3):
            telemetry.log(record(step, stage=stage))
            telemetry.warn(stage, step, "careful")
    telemetry.rewind("second", 1)
    kept = [("first", 1), ("first", 2), ("first", 3), ("second", 1)]
    assert [(r.stage, r.step) for r in telemetry.records] == kept
    assert [(line["stage"], line["step"]) for line in read(tmp_path / "telemetry.jsonl")] == sorted(2 * kept)


def test_rewinding_reads_what_an_earlier_process_told(tmp_path: Path):
    """A killed one may have left half a line, which it then cannot have saved a checkpoint after."""
    earlier = Telemetry(tmp_path)
    earlier.log(record(1))
    earlier.log(record(2))
    path = tmp_path / "telemetry.jsonl"
    path.write_text(path.read_text() + '{"stage": "first", "st')
    telemetry = Telemetry(tmp_path)
    telemetry.rewind("first", 5)
    telemetry.log(record(6))
    assert telemetry.records == [Record(**line) for line in read(path)] == [record(1), record(2), record(6)]
    assert [p.name for p in tmp_path.iterdir()] == ["telemetry.jsonl"]


def test_rewinding_without_files_rewinds_memory():
    telemetry = Telemetry(records=[record(1), record(2), record(3)])
    telemetry.rewind("first", 2)
    assert telemetry.records == [record(1), record(2)]
