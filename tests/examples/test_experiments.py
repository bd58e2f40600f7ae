"""Every experiment runs small, says what it found, and reads back what it has trained already."""

import json
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.data.stdlib_text import load_stdlib_text

EXAMPLES = Path(__file__).parents[2] / "examples"


text_read_once = cache(load_stdlib_text)


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the scripts on the path, and the threads as they were afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(import_module("text_experiment"), "load_stdlib_text", text_read_once)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def smoke(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the script writes to results.json."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(out), "--smoke"])
    import_module(name).main()
    assert (out / "plot.svg").stat().st_size > 1000
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_gate_collapse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, recovered = smoke("gate_collapse", tmp_path, monkeypatch)
    assert "mean exit pdf" in capsys.readouterr().out
    assert len(first["bits_per_byte"]) == len(first["exit_pdf"]) == 2
    assert first["alarm_step"] is None and sum(first["exit_pdf"]) == pytest.approx(1)
    # The second cell goes on from the first one's model: its first loss is the first one's last, but for the batch.
    assert recovered["loss"][0] < first["loss"][0] - 0.3

    # Read back, nothing is trained; taken away, the cell comes out the same.
    weights = tmp_path / "fresh-beta0-warmup0-seed0" / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert smoke("gate_collapse", tmp_path, monkeypatch) == [first, recovered]
    assert weights.stat().st_mtime_ns == written
    shutil.rmtree(weights.parents[1])
    assert smoke("gate_collapse", tmp_path, monkeypatch) == [first, recovered]


def test_stage_two_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = smoke("stage_two_gain", tmp_path, monkeypatch)
    rules = [row["rule"] for row in found["summary"]]
    assert rules[0] == "fixed depth" and rules[-1] == "oracle"
    assert {"Stage I gate", "Stage II gate, paper", "Stage II gate, next", "hidden change", "confidence"} < set(rules)
    assert all(len(row["areas"]) == len(found["seeds"]) == 2 for row in found["summary"])
    for seed, area in zip(found["seeds"], found["summary"][-1]["areas"], strict=True):
        assert area < min(seed["bits_per_byte"])  # the oracle
        curves = seed["comparison"]["curves"]
        assert all(
            curve["points"][0]["mean_loops"] == 1 and curve["points"][-1]["mean_loops"] == 4 for curve in curves
        )
    assert found["seeds"][0]["bits_per_byte"] != found["seeds"][1]["bits_per_byte"]


def test_routing_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, routing = smoke("routing_comparison", tmp_path, monkeypatch)
    assert (expected["objective"], routing["objective"]) == ("expected_loss", "routing")
    assert len(expected["sweep"]["points"]) == len(routing["sweep"]["points"]) == 4
    # The curriculum begins with one loop and runs 1, 2, 3, 4 loops where the expected loss runs 4.
    assert len(routing["loop_losses"][0]) == 1 and len(routing["loop_losses"][-1]) == 4
    assert routing["training_flops"] == pytest.approx(expected["training_flops"] * 10 / 16)


def test_upcycling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = smoke("upcycling", tmp_path, monkeypatch)
    assert [(row["num_loops"], row["order"]) for row in found] == [
        (loops, order) for loops in (4, 1) for order in ("unchanged", "stacked", "interleaved")
    ]
    for row in found:
        assert len(row["before"]) == len(row["after"]) == len(row["after further training"]) == row["num_loops"]
        assert (row["after"] == row["before"]) == (row["order"] == "unchanged")
        assert row["after further training"][-1] < row["after"][-1]
    assert found[1]["after"] != found[2]["after"] and found[1]["before"] == found[0]["before"]
    assert "4 loops, stacked" in capsys.readouterr().out
