"""The whole main job at smoke size, with the network cut off."""

import io
import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from looplm.errors import UserError
from looplm.hf.load import load, load_tokenizer
from looplm.quickstart.plan import FULL, SMOKE
from looplm.quickstart.progress import Progress, expected_seconds
from looplm.quickstart.run import check_writable, fresh_telemetry, run
from looplm.report.schema import QuickstartReport


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the quickstart opened a connection")


@pytest.mark.slow
def test_smoke_run_writes_everything_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    out, terminal = tmp_path / "out", io.StringIO()
    run(SMOKE, out, Console(file=terminal, width=100), smoke=True)
    report = QuickstartReport.model_validate_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.smoke
    page = (out / "report.html").read_text(encoding="utf-8")
    # Nothing is fetched: no script, and no reference but within the page.
    assert "<script" not in page and not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']+""", page)
    for model in (report.shipped, report.trained):
        assert len(model.sweep.points) == model.sweep.trained_loops + SMOKE.extra_loops
        assert model.sample is not None and len(model.sample.tokens) == SMOKE.sample_tokens
        assert {row.strategy for row in model.cache} == {"per_loop", "fill", "last", "mean", "first"}
        assert all(point.weight_passes_per_token <= point.token_loops_per_token for point in model.thresholds)
    assert report.trained.twin is not None
    assert report.trained.twin.training_tokens == report.trained.training_tokens
    assert [group.group for group in report.fold.groups] == [1, 2, 3, 4]
    shown = terminal.getvalue()
    assert "left in all" in shown and "tokens/s" in shown
    assert all(command.command in shown for command in report.next_commands) and len(report.next_commands) == 3
    records = [json.loads(line) for line in (out / "telemetry" / "telemetry.jsonl").read_text().splitlines()]
    assert {"looped", "one-loop twin", "gate", "fold"} <= {r["stage"] for r in records if "stage" in r}
    model, tokenizer = load(out / "model"), load_tokenizer(out / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_an_unwritable_directory_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, match="Choose another --out"):
        check_writable(tmp_path / "file")


def test_the_time_left_follows_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 20.0, 20.0])
    # The module's own name for it: other threads of this process go by the real clock.
    monkeypatch.setattr("looplm.quickstart.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    terminal = io.StringIO()
    progress = Progress(Console(file=terminal, width=80), {"one": 10.0, "two": 30.0})
    with progress.phase("one"):
        pass
    with progress.phase("two"):
        pass
    first, second = terminal.getvalue().splitlines()
    assert "about 0:40 left" in first
    assert "about 1:00 left" in second  # the first phase took twice as long as expected


def test_the_full_plan_takes_about_ten_minutes() -> None:
    assert 400 < sum(expected_seconds(FULL, smoke=False).values()) < 660


def test_what_else_lies_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "telemetry" / "data.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    (mine.parent / "telemetry.jsonl").write_text("an earlier run's")
    fresh_telemetry(tmp_path, Console(file=io.StringIO()))
    assert mine.read_text() == "mine" and not (mine.parent / "telemetry.jsonl").exists()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("mine too")
    with pytest.raises(UserError):
        check_writable(tmp_path)
