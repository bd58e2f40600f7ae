"""`looplm lab` as a command: the list, plans, statuses, and a study from nothing to its table."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from looplm.cli import lab
from looplm.cli import main as cli
from looplm.lab import reachability, study_run
from looplm.lab.study import STUDIES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def looplm_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns status, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["looplm", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A study of two cells: one trains in a second, the other diverges at its first step."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"one word and {i % 7} more, {i % 3}" for i in range(200)))
    (tmp_path / "base.yaml").write_text(f"""\
name: base
model:
  kind: new
  architecture: {{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
                 num_key_value_heads: 2, head_dim: 8, num_loops: 2, tie_word_embeddings: true}}
tokenizer: {{kind: train, vocab_size: 280}}
stages:
  - name: train
    num_steps: 3
    seq_len: 16
    batch_tokens: 32
    objective: {{kind: expected_loss, beta: 0.1}}
    optimizer: {{lr: 1e-2}}
    data: {{sources: [{{kind: files, paths: [{text}]}}]}}
telemetry: {{tensorboard: false}}
""")
    (tmp_path / "tiny.yaml").write_text("""\
title: Tiny
question: Does it run?
grid: {lr: {key: stages.0.optimizer.lr, values: [0.01, 1e30]}}
table: [train_loss]
plot: [{figure: train_loss, against: lr}]
presets: {small: {base: base.yaml, seeds: 1, time: seconds}}
""")
    return tmp_path / "tiny.yaml"


def test_without_a_name_the_studies_are_listed(looplm_command: Run) -> None:
    status, out, _ = looplm_command("lab", "study")
    assert status == 0
    for file in STUDIES.glob("*.yaml"):
        assert f"{file.stem}: " in out
    assert "small: " in out and "paper: " in out


def test_a_plan_fits_a_terminal_and_writes_nothing(
    looplm_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = looplm_command("lab", "capo", "--preset", "paper", "--plan", "--seeds", "2")
    assert status == 0 and "210 cells" in out and max(map(len, out.splitlines())) <= 80
    assert "500K" in out and "12x1" in out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["study", "prior"], "did you mean priors"),
        (["study", "priors", "--preset", "huge"], "has no preset huge"),
        (["mano", "stages.0.num_stepz=3"], "num_steps"),
        (["study", "priors", "seed=3"], "--seeds"),
    ],
)
def test_mistakes_end_in_status_2(looplm_command: Run, arguments: list[str], words: str) -> None:
    status, _, err = looplm_command("lab", *arguments)
    assert status == 2 and words in err and "Traceback" not in err


def test_a_study_from_nothing_to_its_table_with_a_cell_that_fails(
    looplm_command: Run, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    status, told, err = looplm_command("lab", "study", tiny, "--out", out, "--processes", "2")
    assert status == 2 and "1 of 2 cells failed" in err and "1e30-seed0: Stage 'train' diverged at step" in err
    assert "0.01-seed0: done" in told and "1e30-seed0: FAILED" in told and "mean ± standard deviation" in told
    results = json.loads((out / "results.json").read_text())
    assert [cell["levels"] for cell in results["cells"]] == [{"lr": "0.01"}]
    assert list(results["failed"]) == ["1e30-seed0"]
    assert (out / "plot.svg").read_text().startswith("<?xml")


def test_a_stopped_study_ends_in_the_status_of_its_signal(
    looplm_command: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise study_run.StudyStopped(15)

    monkeypatch.setattr(study_run, "run_study", stopped)
    status, _, err = looplm_command("lab", "study", tiny, "--out", tmp_path / "out")
    assert status == 143 and "goes on from there" in err


def test_tasks_are_studies_under_their_own_names(monkeypatch: pytest.MonkeyPatch, looplm_command: Run) -> None:
    called = []
    monkeypatch.setattr(lab, "run_or_plan", lambda *arguments: called.append(arguments))
    for name in ("mano", "capo", "multihop"):
        assert looplm_command("lab", name, "--preset", "paper", "a.b=1", "--processes", "3")[0] == 0
    assert called == [(name, ["a.b=1"], "paper", None, False, None, 3) for name in ("mano", "capo", "multihop")]


def test_the_hand_made_reachability_is_checked_and_a_failure_tells(
    looplm_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = looplm_command("lab", "reachability", "--random", "20", "--vertices", "8")
    assert status == 0 and "as it should be" in out and "NOT" not in out
    good = reachability.check_reachability(1, 4, 0)
    bad = (replace(good[0], wrong_graphs=1), replace(good[-1], must_fail=True, wrong_graphs=0))
    monkeypatch.setattr(reachability, "check_reachability", lambda *_: bad)
    status, out, _ = looplm_command("lab", "reachability")
    assert status == 1 and out.count("NOT") == 2
