"""`looplm code` from problems to a table and a page, on a model that knows nothing and on the file's own solutions."""

import json

import pytest
import typer
from typer.testing import CliRunner

from looplm.cli.code import code
from looplm.cli.exit_settings import exits_of
from looplm.errors import UserError
from looplm.evaluation import code_execution
from looplm.inference import FixedDepth, HiddenDiffExit, QuantileExit

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(code)


@pytest.fixture
def problems(tmp_path):
    """Two problems, one of which any function solves."""
    path = tmp_path / "problems.jsonl"
    records = [
        {"task_id": name, "prompt": f'def {name}(x):\n    """On the mat."""\n', "entry_point": name,
         "canonical_solution": "    return x\n", "test": f"def check(candidate):\n    assert {test}\n"}
        for name, test in (("cat", "candidate(3) == 3"), ("mat", "callable(candidate)"))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_the_files_own_solutions(problems, tmp_path):
    result = invoke("--canonical", "--problems", problems, "--out", tmp_path / "out", "--allow-code-execution")
    assert result.exit_code == 0
    assert "| canonical |  | 100.0% ± 0.0% |  |" in result.stdout
    assert "isolation " in result.stdout


def test_a_model_at_many_depths_and_again(problems, checkpoint, tmp_path):
    words = [checkpoint, "--problems", problems, "--out", tmp_path / "out", "--allow-code-execution"]
    words += ["--num-loops", "1,4", "--exit-threshold", "0.5", "--samples", 3, "--k", "1,2", "--max-tokens", 4]
    first = invoke(*words)
    assert first.exit_code == 0
    assert "warning: loops 4: beyond the 3" in first.stderr
    found = json.loads((tmp_path / "out" / "code.json").read_text(encoding="utf-8"))
    assert [one["setting"] for one in found["scores"]] == ["loops 1", "loops 4", "threshold 0.5"]
    assert [one["mean_loops"] for one in found["scores"]][:2] == [1.0, 4.0]
    assert set(found["scores"][0]["pass_at_k"]) == {"1", "2"}
    assert (tmp_path / "out" / "code.md").read_text(encoding="utf-8") in first.stdout
    assert "<svg" in (tmp_path / "out" / "code.html").read_text(encoding="utf-8")
    kept = (tmp_path / "out" / "texts.jsonl").read_bytes(), (tmp_path / "out" / "outcomes.jsonl").read_bytes()
    again = invoke(*words)
    assert "6 texts are there, 0 to write" in again.stdout and "0 programs to run" in again.stdout
    assert kept == (
        (tmp_path / "out" / "texts.jsonl").read_bytes(),
        (tmp_path / "out" / "outcomes.jsonl").read_bytes(),
    )
    with pytest.raises(UserError, match="seed differ"):
        invoke(*words, "--seed", 1)


def test_nothing_runs_unless_it_is_allowed(problems, checkpoint, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(code_execution.subprocess, "Popen", never)
    with pytest.raises(UserError, match="--allow-code-execution"):
        invoke(checkpoint, "--problems", problems, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weak_isolation_is_said(problems, tmp_path, monkeypatch):
    monkeypatch.setattr(code_execution, "find_isolation", lambda: "process")
    result = invoke("--canonical", "--problems", problems, "--out", tmp_path / "out", "--allow-code-execution")
    assert "kernel refuses namespaces" in result.stderr
    assert "isolation process" in result.stdout


@pytest.mark.parametrize(
    "wrong",
    [["--k", "2"], ["--k", "x"], ["--k", ""], ["--samples", "2", "--temperature", "0"], ["--canonical"],
     ["--cpu-seconds", "0"], ["--num-loops", ""], ["--exit", "x"], ["--kv-cache", "none"], ["--max-tokens", "64"]],
)  # fmt: skip
def test_impossible_options(problems, checkpoint, tmp_path, wrong):
    words = [checkpoint, "--problems", problems, "--out", tmp_path / "out", "--allow-code-execution"]
    with pytest.raises(UserError):
        invoke(*words, "--max-tokens", "4", *wrong)
    assert not (tmp_path / "out" / "texts.jsonl").exists()


def test_exits():
    found = exits_of("1, 5", "0.50", "hidden-diff:0.1", trained=4)
    assert found == {
        "loops 1": FixedDepth(1),
        "loops 5": FixedDepth(5),
        "threshold 0.5": QuantileExit(0.5),
        "hidden-diff:0.1": HiddenDiffExit(0.1),
    }
    assert list(exits_of(None, None, None, trained=2)) == ["loops 1", "loops 2"]
    with pytest.raises(UserError):
        exits_of(None, "x", None, trained=2)
