"""The comparison and the sweep: their order, their figures, their tables; and the command."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from looplm.bench import train
from looplm.bench.sizes import SMOKE
from looplm.bench.tables import breakdown_table, comparison_table, headline, ratios, sweep_table
from looplm.bench.train import Machine, Measured, TrainReport, compare, parse_checkpointing, parse_compiles, sweep
from looplm.bench.worker import Worker
from looplm.cli.bench import app
from looplm.errors import UserError

CALLS: list[tuple[str, str]] = []


class FakeWorker(Worker):
    """Answers at once: 1 second a step of ours, 2 of the baseline's, which takes four times the memory."""

    def __init__(self, threads: int) -> None:
        self.threads, self.side = threads, ""

    def __exit__(self, *error: object) -> None:
        CALLS.append(("close", self.side))

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        self.side = arguments.get("side", self.side)
        CALLS.append((request, self.side))
        factor = 2 if self.side == "naive" else 1
        answers: dict[str, dict[str, Any]] = {
            "build": {"num_parameters": 7},
            "step": {"seconds": float(factor), "loss": 3.0},
            "measure": {"peak_bytes": factor**2 * 2**20, "held_bytes": 5},
            "breakdown": {
                "head products": 0.5,
                "core products": 0.25,
                "attention": 0.125,
                "optimizer": 0,
                "rest": 0.125,
            },
        }
        return answers[request]


@pytest.fixture
def fake_workers(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(train, "Worker", FakeWorker)


def text_of(*tables: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_steps_are_made_in_turn_after_a_warm_and_a_measured_one(fake_workers):
    report = compare(SMOKE, compiles=("none",), repeats=2)
    expected = [(verb, side) for side in ("naive", "looplm") for verb in ("build", "step", "measure")]
    expected += [("step", "naive"), ("step", "looplm")] * 2
    expected += [("breakdown", "naive"), ("breakdown", "looplm"), ("close", "looplm"), ("close", "naive")]
    assert expected == CALLS
    naive, ours = report.rows
    assert (naive.side, ours.side, ours.seconds, ours.first_loss) == ("naive", "looplm", [1.0, 1.0], 3.0)
    assert ratios(naive, ours) == (2.0, 0.25)
    assert ours.tokens_per_second == SMOKE.num_tokens


def test_the_tables_show_ratios_spread_and_parts(fake_workers):
    report = compare(SMOKE, compiles=("none", "blocks"), repeats=3, checkpointing="layer")
    report.rows[1].seconds[:] = [0.5, 1.0, 4.0]
    shown = text_of(comparison_table(report), breakdown_table(report))
    assert "2.00 x" in shown and "0.25 x" in shown and "1 (0.5-4)" in shown
    assert "looplm, layer recomputed" in shown and "0.50 50%" in shown
    assert f"{report.machine.threads} threads" in headline(report)
    assert "…" not in text_of(*(table(report) for table in (comparison_table, breakdown_table, sweep_table)), width=80)


def test_the_sweep_grows_loops_at_one_length_and_length_at_the_same_tokens(fake_workers):
    report = sweep(SMOKE, loops=(1, 2, 4), seq_lens=(8, 16, 64), repeats=1)
    points = list(dict.fromkeys((row.num_loops, row.batch_size, row.seq_len) for row in report.rows))
    assert points == [(1, 2, 16), (2, 2, 16), (4, 2, 16), (2, 4, 8), (2, 1, 64)]
    variants = [(row.side, row.checkpointing) for row in report.rows[:4]]
    assert variants == [("looplm", "none"), ("looplm", "layer"), ("looplm", "loop"), ("naive", "none")]
    assert text_of(sweep_table(report)).count("naive") == len(points)


def test_names_of_ways_to_compile_and_recompute():
    assert parse_compiles("blocks, none,blocks") == ["blocks", "none"]
    assert parse_compiles("blocks,none", one=True) == ["blocks"]
    assert parse_checkpointing("loop") == "loop"
    with pytest.raises(UserError, match="'all'; choose from none, blocks"):
        parse_compiles("none,all")
    with pytest.raises(UserError, match="'yes'; choose from none, layer"):
        parse_checkpointing("yes")


def test_ratios_are_to_the_baseline():
    def row(side: str, seconds: list[float], peak: int) -> Measured:
        return Measured(
            side=side, num_loops=1, seq_len=10, batch_size=1, num_parameters=1, first_loss=0.0, held_bytes=0,
            peak_bytes=peak, seconds=seconds,
        )  # fmt: skip

    naive, ours = row("naive", [4.0, 8.0, 6.0], 100), row("looplm", [3.0, 2.0, 100.0], 30)
    assert ratios(naive, ours) == (2.0, 0.3)
    assert ratios(naive, naive) == (1.0, 1.0)
    report = TrainReport(machine=Machine.here("cpu", 1), sizes=SMOKE, rows=[naive, ours])
    assert "0.30 x" in text_of(comparison_table(report))


def test_the_command_measures_in_processes_of_their_own(tmp_path):
    file = tmp_path / "train.json"
    options = ["--smoke", "--compile", "none", "--repeats", "2", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 0, result.output
    assert "Stage-I training step" in result.output and "Seconds of a step, by part" in result.output
    report = json.loads(file.read_text())
    assert [row["side"] for row in report["rows"]] == ["naive", "looplm"]
    assert report["machine"]["threads"] == 1 and report["sizes"]["hidden_size"] == SMOKE.hidden_size
    for row in report["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["peak_bytes"] > 0 and abs(row["first_loss"] - 4.13) < 0.1  # ln 64 - 0.05 ln 2
        assert sum(row["breakdown"].values()) == pytest.approx(1)


def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path, fake_workers):
    file = tmp_path / "absent" / "train.json"
    result = CliRunner().invoke(app, ["train", "--smoke", "--json", str(file)])
    assert isinstance(result.exception, UserError) and "cannot be written" in str(result.exception)
    assert CALLS == []


def test_a_process_that_dies_is_said():
    with Worker(1) as worker:
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(UserError, match="ended with status -9"):
            worker.build("naive", SMOKE)
