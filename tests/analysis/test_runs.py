"""Tables and directories of runs."""

import json

import pytest

from looplm.analysis.runs import POINTS_PER_RUN, STUDY_COLUMNS, RunPoint, read_runs, write_runs
from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.lab.study_results import RUN_COLUMNS
from looplm.model.config import LoopedConfig
from looplm.model.flops import count_parameters

POINTS = [
    RunPoint("small", 100, 1000, 2, (3.0, 2.5), (0.25, 0.75), 40),
    RunPoint("small", 100, 2000, 2, (2.9, 2.4), None, 40, 2.6),
    RunPoint("large", 900, 2000, 1, (2.7,), (1.0,), 500),
]


def test_a_table_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "runs.csv"
    write_runs(POINTS, file)
    assert read_runs(file) == POINTS


def test_total_loss_and_unrolled_parameters():
    assert POINTS[0].total_loss == pytest.approx(0.25 * 3.0 + 0.75 * 2.5)
    assert POINTS[1].total_loss == 2.6
    assert POINTS[0].unrolled_parameters == 140
    assert RunPoint("x", 5, 5, 1, (2.0,)).total_loss == 2.0
    assert RunPoint("x", 5, 5, 1, (2.0,)).unrolled_parameters is None
    with pytest.raises(UserError, match="exit pdf"):
        _ = RunPoint("x", 5, 5, 2, (2.0, 1.0)).total_loss


STUDY = (
    "cell,kind,layers,num_parameters,core_parameters,num_tokens,num_loops,loop,loss,exit_pdf\n"
    "2x2-seed0,looped,2,100,40,1000,2,1,3.0,0.25\n2x2-seed0,looped,2,100,40,1000,2,2,2.5,0.75\n"
    "2x2-seed0,looped,2,100,40,2000,2,1,2.9,0.5\n2x2-seed0,looped,2,100,40,2000,2,2,2.4,0.5\n"
    "4x1-seed0,standard,4,180,160,1000,1,1,2.6,1.0\n"
)
"""As `looplm lab study` writes it (looplm.lab.study_results)."""


def test_a_study_of_the_lab_is_read(tmp_path):
    assert STUDY.partition("\n")[0].split(",") == list(RUN_COLUMNS)
    assert set(RUN_COLUMNS) >= STUDY_COLUMNS
    file = tmp_path / "runs.csv"
    file.write_text(STUDY, encoding="utf-8")
    assert read_runs(file) == [
        RunPoint("2x2-seed0", 100, 1000, 2, (3.0, 2.5), (0.25, 0.75), 40),
        RunPoint("2x2-seed0", 100, 2000, 2, (2.9, 2.4), (0.5, 0.5), 40),
        RunPoint("4x1-seed0", 180, 1000, 1, (2.6,), (1.0,), 160),
    ]
    file.write_text(STUDY.replace("2000,2,2,2.4", "2000,3,2,2.4"), encoding="utf-8")
    with pytest.raises(UserError, match="line 5.*another size or depth"):
        read_runs(file)
    file.write_text(STUDY.replace("2000,2,1,", "2000,2,3,"), encoding="utf-8")
    with pytest.raises(UserError, match="line 4.*loss_1 to loss_2"):
        read_runs(file)


HEADER = "run,num_parameters,num_tokens,num_loops,loss_1,loss_2,exit_pdf_1,exit_pdf_2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no runs"),
        ("run,num_loops\na,1\n", "lacks the columns loss_1, num_parameters, num_tokens"),
        (HEADER + "a,10,10,2,3.0,,,\n", "line 2: num_loops is 2, so loss_1 to loss_2"),
        (HEADER + "a,10,10,2,3.0,2.0,,\na,10,10,2,3.0,2.0,0.5,\n", "line 3: exit_pdf_1 to exit_pdf_2"),
        (HEADER + "a,ten,10,2,3.0,2.0,,\n", "num_parameters is 'ten'"),
        (HEADER + "a,0,10,2,3.0,2.0,,\n", "num_parameters is '0'"),
        (HEADER + "a,10,10,2,nan,2.0,,\n", "loss_1 is 'nan'"),
    ],
)
def test_a_broken_table_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "runs.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_runs(file)


@pytest.fixture
def run_directory(tmp_path):
    """Two stages of language model and one of gate, as a run tells them, with a saved model."""
    config = LoopedConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4, num_loops=2,
    )  # fmt: skip
    directory = tmp_path / "runs" / "one"
    save_checkpoint(LoopLMForCausalLM(LoopLMConfig.from_model_config(config)), directory / "first" / "model")
    lines = []
    for stage, count in (("first", 50), ("second", 50), ("gate", 5)):
        for step in range(1, count + 1):
            entry = {"stage": stage, "step": step, "tokens": 100 * step, "loop_losses": [3.0, 2.0]}
            entry["exit_pdf"] = [0.5, 0.5]
            if stage == "gate":
                entry |= {"continue_label": [0.5], "loop_losses": [9.0, 9.0]}
            lines.append(json.dumps(entry))
        lines.append(json.dumps({"stage": stage, "step": count, "warning": "none"}))
    (directory / "telemetry.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "runs", config


def test_runs_come_from_their_directories(run_directory):
    root, config = run_directory
    points = read_runs(root)
    assert 6 < len(points) <= POINTS_PER_RUN
    count = count_parameters(config)
    for point in points:
        assert (point.run, point.num_loops, point.loop_losses, point.exit_pdf) == ("one", 2, (3.0, 2.0), (0.5, 0.5))
        assert (point.num_parameters, point.core_parameters) == (count.total, count.core)
    tokens = [point.num_tokens for point in points]
    assert tokens == sorted(tokens)
    # Tokens of the second stage come on top of the first's; nothing of the warmup, nothing of the gate's stage.
    assert tokens[0] >= 1000 and 9000 < tokens[-1] <= 10000


def test_a_directory_without_runs_or_without_a_model_is_refused(run_directory, tmp_path):
    root, _ = run_directory
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="holds no run"):
        read_runs(empty)
    (root / "one" / "first" / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="no saved model yet"):
        read_runs(root)
