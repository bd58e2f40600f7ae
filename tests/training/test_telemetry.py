"""What a run tells, and to whom: memory, JSONL, TensorBoard, W&B."""

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from looplm.errors import UserError
from looplm.objectives.expected_loss import depth_metrics
from looplm.training.recipe import WandbRecipe
from looplm.training.telemetry import Record, Telemetry
from looplm.training.telemetry_record import QUANTILES, depth_fields, scalars

from .telemetry_records import MEASURED, full_record, plain_console, record


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
