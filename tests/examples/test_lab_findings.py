"""The page of findings, from two untrained checkpoints: every table has rows of both."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.lab.fold import VOCAB_SIZE
from looplm.model.config import LoopedConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("lab_findings")


def saved(folder: Path, num_layers: int, num_loops: int) -> str:
    config = LoopedConfig(
        vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_hidden_layers=num_layers, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, num_loops=num_loops, initializer_range=0.8,
    )  # fmt: skip
    save_checkpoint(LoopLMForCausalLM(LoopLMConfig.from_model_config(config)), folder)
    return str(folder)


def documents() -> Iterator[dict[str, list[int]]]:
    """Of no task of the lab."""
    while True:
        yield {"input_ids": [1, 2], "labels": [-100, 2]}


def test_both_models_are_compared(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looped, dense = saved(tmp_path / "looped", 1, 2), saved(tmp_path / "dense", 4, 1)
    task = ["--generator", "looplm.lab.fold:documents", "--arguments", '{"max_k": 3}', "--count", "60", "--few", "3"]
    monkeypatch.setattr(sys, "argv", ["lab_findings.py", looped, dense, str(tmp_path / "out"), *task])
    script.main()
    found = json.loads((tmp_path / "out" / "findings.json").read_text(encoding="utf-8"))
    assert list(found) == ["looped", "dense"]
    for numbers in found.values():
        assert [one["level"] for one in numbers["agreement"]["by_level"]] == [1, 2, 3]
        assert len(numbers["agreement"]["agreement"]["matrix"]) == 2  # of the dense model two times two layers
        assert numbers["intervene"]["patches"][0]["num_loops"] == 2
        assert {one["position"] for one in numbers["intervene"]["patches"][0]["effects"]} == {-1, -2, -3, -4}
    page = (tmp_path / "out" / "findings.html").read_text(encoding="utf-8")
    assert page.count("<td>dense</td>") == page.count("<td>looped</td>") == 3 + 3 + 3 + 2 + 4 + 4
    assert 'href="dense/probes.html"' in page and (tmp_path / "out" / "dense" / "probes.html").exists()
    assert capsys.readouterr().out.count(" dense ") == 19  # the same rows in the terminal
    first, *_, last = script.spliced(found["looped"])
    assert first[0] == "-1" and last[0] == "-4"


def test_a_twin_whose_layers_do_not_divide_is_refused(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped, dense = saved(tmp_path / "looped", 1, 2), saved(tmp_path / "dense", 3, 1)
    words = ["lab_findings.py", looped, dense, str(tmp_path / "out"), "--generator", "looplm.lab.fold:documents"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match="3 layers"):
        script.main()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys, "argv", [*words[:-1], "test_lab_findings:documents"])
    with pytest.raises(UserError, match="no task of the lab"):
        script.main()
    assert not (tmp_path / "out").exists()
