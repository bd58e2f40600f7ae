"""The ablation of the conversion recipe runs small, compares with the dense twin, and reads back what is there."""

import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.data.stdlib_text import load_stdlib_text
from looplm.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, with two variants of its four and the text read once; the threads are put back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    read = cache(load_stdlib_text)
    for module in ("small_qwen3", "looplm.data.sources", "looplm.data.stdlib_chat"):
        monkeypatch.setattr(import_module(module), "load_stdlib_text", read)
    script = import_module("conversion_ablation")
    kept = {name: script.VARIANTS[name] for name in (script.SCALAR, "naive, eps 0")}
    monkeypatch.setattr(script, "VARIANTS", kept)
    threads = torch.get_num_threads()
    yield script
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_conversion_ablation(
    ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["conversion_ablation.py", str(tmp_path), "--smoke"])
    ablation.main()
    assert "answers: held-out nats a token" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(found) == ["text", "answers"]
    for rows in found.values():
        dense, scalar, naive = rows
        assert [row["model"] for row in rows] == ["dense", "scalar, eps 0.05", "naive, eps 0"]
        assert dense["before"] == scalar["before"][:1] == naive["before"][:1]  # one loop is the dense model
        assert scalar["before"][1] != naive["before"][1]
        assert [len(row["seeds"][0]["losses"]) for row in rows] == [1, 3, 3]
        assert all(row["seeds"][0]["losses"][0] < row["before"][0] for row in rows)
        assert ablation.against_dense(dense | {"seeds": scalar["seeds"]}, dense) == [
            scalar["seeds"][0]["losses"][1] - dense["seeds"][0]["losses"][0]
        ]
    # Other data, other losses; and with the smoothing taken away, its recipe says so.
    assert found["text"][1]["seeds"] != found["answers"][1]["seeds"]
    recipe = (tmp_path / "text-naive-eps0-seed0" / "recipe.yaml").read_text(encoding="utf-8")
    assert "smoothing: 0.0" in recipe and "injection: none" in recipe
    # Run again, it trains nothing.
    monkeypatch.setattr(Trainer, "train_step", None)
    ablation.main()
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == found
