"""The README is run: its Python blocks, and its looplm commands that need nothing but the shipped checkpoint."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import looplm
from looplm.cli import main as cli

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(3, 100, (2, 16))
    names = {"model": looplm.load("stdlib-small", dtype="float32"), "input_ids": ids, "labels": ids}
    first, second = blocks("python")
    exec(first, {})
    assert "weight_passes" in capsys.readouterr().out
    names["model"].requires_grad_(True)
    exec(second, names)
    assert names["model"].model.early_exit_gate.weight.grad is not None


@pytest.mark.parametrize(
    "command", [line for block in blocks("sh") for line in block.splitlines() if "stdlib-small" in line]
)
def test_commands_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # some write where they are called
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, capsys.readouterr().err


def test_every_file_the_readme_names_is_there() -> None:
    named = re.findall(r"`(looplm/[\w/]+)`", README) + re.findall(r"\((docs/[\w.]+)\)", README)
    assert len(named) > 12
    assert [path for path in named if not (Path(__file__).parents[1] / path).exists()] == []
