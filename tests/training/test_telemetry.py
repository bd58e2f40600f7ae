"""What a run tells, and to whom: memory, JSONL, TensorBoard, a log, a live terminal."""

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from looplm.errors import UserError
from looplm.objectives.expected_loss import depth_metrics
from looplm.training.held_out import HeldOutRecord
from looplm.training.recipe import WandbRecipe
from looplm.training.telemetry import Record, Telemetry
from looplm.training.telemetry_record import QUANTILES, depth_fields, scalars
from looplm.training.telemetry_view import (
    clock,
    held_out_line,
    live_view,
    progress_line,
    seconds_left,
    spark_line,
)

MEASURED = HeldOutRecord(loop_losses=[2.6, 2.4, 2.3, 2.35], bits_per_byte=[1.3, 1.2, 1.15, 1.175], num_tokens=5000)


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


def full_record(step: int = 30) -> Record:
    """A record with everything that only some steps and stages have."""
    return record(
        step,
        num_loops=3,
        exit_pdf_quantiles=[[0.1, 0.2, 0.3, 0.4, 0.5]] * 3,
        expected_loops_quantiles=[1.0, 1.5, 2.0, 2.5, 3.0],
        continue_label=[0.5, 0.25],
        routed_share=[0.5, 0.25, 0.25],
        state_gradients=[[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]],
        flops_utilisation=0.42,
        memory_bytes=3 * 2**30,
        num_skipped=1,
        num_spikes=2,
    )


def shown(view: object) -> list[str]:
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=120, color_system=None).print(view)
    return [line.rstrip() for line in file.getvalue().splitlines()]


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
    assert lines[0] == {name: value for name, value in asdict(record(1)).items() if value is not None}


def test_a_full_record_survives_the_file(tmp_path: Path):
    Telemetry(tmp_path).log(full_record())
    telemetry = Telemetry(tmp_path)
    telemetry.rewind("first", 30)
    assert telemetry.records == [full_record()]


def test_lines_of_an_older_version_are_read(tmp_path: Path):
    """They have none of the fields that came later."""
    line = (
        '{"stage": "first", "step": 7, "num_steps": 9, "tokens": 5, "loss": 2.0, "loop_losses": [2.0], '
        '"exit_pdf": [1.0], "entropy": 0.0, "expected_loops": 1.0, "lr": 0.1, "grad_norm": 1.0, '
        '"tokens_per_second": 3.0, "seconds": 4.0}\n'
    )
    (tmp_path / "telemetry.jsonl").write_text(line)
    telemetry = Telemetry(tmp_path)
    telemetry.rewind("first", 7)
    assert telemetry.records[0].step == 7 and telemetry.records[0].state_gradients is None


def test_an_objective_s_metrics_become_the_fields_of_a_record():
    gate_logits = torch.randn(3, 2, 50, dtype=torch.float64)
    metrics = depth_metrics(torch.ones_like(gate_logits), gate_logits, torch.full((2, 50), 0.01, dtype=torch.float64))
    fields = depth_fields({"loss": torch.tensor(2.0), **metrics, "routed_share": torch.tensor([0.5, 0.5, 0.0])})
    told = record(**fields)
    assert told.loss == 2.0 and told.routed_share == [0.5, 0.5, 0.0] and told.continue_label is None
    assert told.loop_losses == pytest.approx([1, 1, 1])
    assert told.exit_pdf_quantiles is not None and told.expected_loops_quantiles is not None
    for loop, quantiles in enumerate(told.exit_pdf_quantiles):
        assert len(quantiles) == len(QUANTILES) and quantiles == sorted(quantiles)
        assert quantiles[0] < told.exit_pdf[loop] < quantiles[-1]
    assert 1 <= told.expected_loops_quantiles[0] < told.expected_loops < told.expected_loops_quantiles[-1] <= 3
    assert json.loads(json.dumps(fields)) == fields


def test_every_figure_has_a_name_of_its_own():
    named = scalars(full_record())
    assert named["loop_loss/2"] == 2.25 and named["exit_pdf/3"] == 0.2
    assert named["state_gradient/3/1"] == 0.5 and named["continue_label/3"] == 0.25 and named["routed_share/1"] == 0.5
    assert named["expected_loops_quantile/0.5"] == 2.0 and named["exit_pdf_quantile/2/0.95"] == 0.5
    assert named["flops_utilisation"] == 0.42 and named["memory_bytes"] == 3 * 2**30
    assert named["num_skipped"] == 1 and named["num_spikes"] == 2
    plain = set(scalars(record()))
    assert plain == {
        "loss", "entropy", "expected_loops", "lr", "grad_norm", "tokens_per_second", "num_skipped", "num_spikes",
        *(f"{name}/{loop}" for name in ("loop_loss", "exit_pdf") for loop in (1, 2, 3)),
    }  # fmt: skip


def curves(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory)).Reload()


def points(directory: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in curves(directory).Scalars(name)]


def test_tensorboard_has_a_run_a_stage_and_a_curve_a_figure(tmp_path: Path):
    telemetry = Telemetry(tmp_path)
    with telemetry.stage():
        telemetry.log(record(1))
        telemetry.log(record(2, loop_losses=[1.5, 1.25, 1.0]))
        telemetry.log_held_out("first", 2, MEASURED)
    with telemetry.stage():
        telemetry.log(record(1, stage="second"))
    first = tmp_path / "tensorboard" / "first"
    held_out = {f"held_out_{name}/{loop}" for name in ("loss", "bits_per_byte") for loop in (1, 2, 3, 4)}
    assert set(curves(first).Tags()["scalars"]) == set(scalars(record(1))) | held_out
    assert points(first, "loop_loss/3") == [(1, 2.125), (2, 1.0)]
    assert points(first, "held_out_bits_per_byte/4") == [(2, pytest.approx(1.175))]
    assert points(tmp_path / "tensorboard" / "second", "loss") == [(1, 2.0)]


def test_tensorboard_shows_what_a_resumed_run_told_again_once(tmp_path: Path):
    telemetry = Telemetry(tmp_path)
    with telemetry.stage():
        for step in (1, 2, 3, 4):
            telemetry.log(record(step))
    with telemetry.stage():
        telemetry.log(record(1, stage="second"))
    resumed = Telemetry(tmp_path)
    resumed.rewind("first", 2)
    with resumed.stage():
        for step in (3, 4, 5):
            resumed.log(record(step, loss=1.0))
    told = points(tmp_path / "tensorboard" / "first", "loss")
    assert told == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert points(tmp_path / "tensorboard" / "second", "loss") == [(1, 2.0)]


def test_tensorboard_can_be_left_out(tmp_path: Path):
    telemetry = Telemetry(tmp_path, tensorboard=False)
    with telemetry.stage():
        telemetry.log(record(1))
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.jsonl"]


def test_wandb_that_is_not_installed_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    telemetry = Telemetry(tmp_path, wandb=WandbRecipe(project="loops"))
    with pytest.raises(UserError, match="pip install wandb"), telemetry.stage():
        raise AssertionError("must not begin")
    Telemetry(wandb=WandbRecipe(project="loops")).log(record())  # without a directory it is not asked for


def test_wandb_gets_every_figure_on_the_stage_s_own_step_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    opened: list[dict] = []

    class Run:
        """Keeps what it is told."""

        id, url = "abc", "https://example.org/abc"

        def __init__(self, **options: object) -> None:
            opened.append(options)
            self.told: list[dict] = []
            self.axes: list[tuple[str, str]] = []
            self.finished = 0

        def log(self, values: dict) -> None:
            self.told.append(values)

        def define_metric(self, name: str, step_metric: str) -> None:
            self.axes.append((name, step_metric))

        def finish(self) -> None:
            self.finished += 1

    monkeypatch.setattr(wandb, "init", lambda **options: Run(**options))
    file = io.StringIO()
    telemetry = Telemetry(tmp_path, plain_console(file), wandb=WandbRecipe(project="loops"), run_config={"seed": 1})
    with telemetry.stage():
        telemetry.log(record(1))
        telemetry.log_held_out("first", 1, MEASURED)
    with telemetry.stage():
        telemetry.log(record(1, stage="second"))
    run = telemetry._wandb._run
    telemetry.close()
    telemetry.close()
    assert file.getvalue().startswith("Weights & Biases: https://example.org/abc\n")
    assert len(opened) == 1 and opened[0]["config"] == {"seed": 1} and opened[0]["id"] is None
    assert run.axes == [("first/*", "first/step"), ("second/*", "second/step")] and run.finished == 1
    assert run.told[0] == {f"first/{name}": value for name, value in scalars(record(1)).items()} | {"first/step": 1}
    assert run.told[1]["first/held_out_loss/4"] == 2.35
    again = Telemetry(tmp_path, wandb=WandbRecipe(project="loops"))
    with again.stage():
        assert opened[1]["id"] == "abc" and opened[1]["resume"] == "allow"


def test_a_run_wandb_will_not_open_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**options: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with (
        pytest.raises(UserError, match="No API key configured. Log in with"),
        Telemetry(tmp_path, wandb=WandbRecipe(project="loops")).stage(),
    ):
        raise AssertionError("must not begin")


@pytest.mark.slow
def test_wandb_offline_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """The real package, whose service takes seconds to start."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")  # it speaks where another test has imported openai
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    telemetry = Telemetry(tmp_path / "run", wandb=WandbRecipe(project="loops", mode="offline"))
    with telemetry.stage():
        telemetry.log(record(1))
    telemetry.close()
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
    assert written.stem == "run-" + (tmp_path / "run" / "wandb_run_id").read_text().strip()
    assert capfd.readouterr() == ("", "")


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


def test_rewinding_takes_back_the_stage_s_later_steps_alone(tmp_path: Path):
    telemetry = Telemetry(tmp_path)
    for stage in ("first", "second"):
        for step in (1, 2, 3):
            telemetry.log(record(step, stage=stage))
            telemetry.warn(stage, step, "careful")
            telemetry.log_held_out(stage, step, MEASURED)
    telemetry.rewind("second", 1)
    kept = [("first", 1), ("first", 2), ("first", 3), ("second", 1)]
    assert [(r.stage, r.step) for r in telemetry.records] == kept
    assert [(line["stage"], line["step"]) for line in read(tmp_path / "telemetry.jsonl")] == sorted(3 * kept)
    assert list(telemetry.held_out) == kept


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
    telemetry = Telemetry(records=[record(1), record(2), record(3)], held_out={("first", 3): MEASURED})
    telemetry.rewind("first", 2)
    assert telemetry.records == [record(1), record(2)] and telemetry.held_out == {}


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"half a li\n", b"[1]\n", b'{"stage": "first", "step": 2, "x": 1}\n'])
def test_a_damaged_file_is_set_aside_and_what_can_be_read_is_kept(tmp_path: Path, line: bytes):
    earlier = Telemetry(tmp_path)
    earlier.log(record(1))
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(whole := line + path.read_bytes())
    telemetry = Telemetry(tmp_path)
    telemetry.rewind("first", 5)
    assert telemetry.records == [record(1)]
    assert (tmp_path / "telemetry.jsonl.damaged").read_bytes() == whole
    first, second = read(path)
    assert Record(**first) == record(1) and second["warning"].startswith("1 lines of")
