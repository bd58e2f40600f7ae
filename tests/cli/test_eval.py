"""`looplm eval` from a folder of own tasks to a table and a page."""

import json

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from looplm.cli.eval import evaluate
from looplm.cli.eval_options import choices_of, curve_rules, files_of, settings_of
from looplm.errors import UserError
from looplm.evaluation.presets import load_preset
from looplm.evaluation.task_plan import TaskChoice
from looplm.inference import FixedDepth, HiddenDiffExit, QuantileExit
from looplm.quickstart.shipped import shipped_directory

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate)


def test_depths_and_thresholds_of_an_own_task(tmp_path):
    lines = [json.dumps({"q": f"import o{i}\nimport ", "right": i % 2}) for i in range(4)]
    (tmp_path / "two.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "two.yaml").write_text(
        "task: two\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'two.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: right\n"
        "doc_to_choice: ['sys', 'os']\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    higher_is_better: true\nmetadata:\n  version: 1\n",
        encoding="utf-8",
    )
    words = [
        str(shipped_directory()),
        "--tasks",
        "two",
        "--include-path",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--num-loops", "1,2", "--exit-threshold", "0.5"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = (tmp_path / "out" / "scores.md").read_text(encoding="utf-8")
    assert table in result.output
    for row in ("| 1 |", "| two | loops 2 | 2.00 |", "| two | threshold 0.5 |", "| two | 1 to 2 |"):
        assert row in table
    found = json.loads((tmp_path / "out" / "scores.json").read_text(encoding="utf-8"))
    assert [one["mean_loops"] for one in found["results"]][:2] == [1.0, 2.0]
    assert len(found["gains"]["two"]) == 1
    assert found["plan"]["dtype"] == "bfloat16"
    page = (tmp_path / "out" / "scores.html").read_text(encoding="utf-8")
    assert "<svg" in page and "two acc" in page


def test_held_out_text_alone(tmp_path):
    lines = [json.dumps({"text": f"def f{i}(x):\n    return {i} + x\n" * 9}) for i in range(9)]
    (tmp_path / "held.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [str(shipped_directory()), "--text", str(tmp_path / "held.jsonl"), "--text-tokens", "400"]
    result = CliRunner().invoke(
        app, [*words, "--num-loops", "1,5", "--out", str(tmp_path / "out")], catch_exceptions=False
    )
    assert "| 5 (untrained) |" in result.output
    found = json.loads((tmp_path / "out" / "scores.json").read_text(encoding="utf-8"))
    assert [point["num_loops"] for point in found["text"]["points"]] == [1, 2, 3, 4, 5]


def test_wrong_options_are_told(tmp_path):
    for words, wrong in (
        ([], "--tasks, --preset or --text"),
        (["--preset", "ouro"], "no preset ouro"),
        (["--tasks", "two", "--samples", "4"], "give a --temperature"),
        (["--tasks", "two", "--curve", "gate,oracle"], "--curve names oracle"),
        (["--tasks", "two", "--task-data", "gsm8k=x.jsonl"], "gsm8k, which is not among the tasks"),
        (["--tasks", "two", "--max-gen-toks", "0"], "at least one token"),
    ):
        with pytest.raises(UserError, match=wrong):
            CliRunner().invoke(
                app, [str(shipped_directory()), *words, "--out", str(tmp_path / "out")], catch_exceptions=False
            )
    assert not (tmp_path / "out").exists()


def test_presets_and_what_overrides_them():
    paper = load_preset("ouro_base")
    found, notes = choices_of(None, paper, None, None, None, allow_code=False)
    assert found[0] == TaskChoice(task="mmlu", num_fewshot=5, metric="acc")
    assert "humaneval" not in [one.task for one in found]
    assert any(note.startswith("humaneval runs generated code") for note in notes)
    assert "humaneval" in [one.task for one in choices_of(None, paper, None, None, None, allow_code=True)[0]]
    found, notes = choices_of("gsm8k_cot,piqa", paper, None, None, ["gsm8k_cot=x.jsonl"], allow_code=False)
    assert (found[0].num_fewshot, found[0].metric) == (3, "exact_match,strict-match")
    assert found[0].data == {"test": "x.jsonl"}
    assert (found[1], notes) == (TaskChoice(task="piqa"), [])
    assert choices_of("mmlu", paper, 1, "acc_norm", None, allow_code=False)[0][0].num_fewshot == 1
    assert "HLE" in " ".join(choices_of(None, load_preset("ouro_thinking"), None, None, None, allow_code=False)[1])
    assert files_of(["a=b", "a:train=c=d"]) == {"a": {"test": "b", "train": "c=d"}}
    with pytest.raises(UserError, match="give TASK=FILE"):
        files_of(["x.jsonl"])
    assert curve_rules("gate, kl") == ("gate", "kl")


def test_settings():
    found = settings_of("1,3", "0.5", "hidden-diff:2", "per_loop,last", None, trained=4)
    assert [one.exit for one in found[:4]] == [FixedDepth(1), FixedDepth(3), QuantileExit(0.5), HiddenDiffExit(2.0)]
    assert [one.name for one in found] == [
        "loops 1", "loops 3", "threshold 0.5", "hidden-diff 2",
        "loops 1, last", "loops 3, last", "threshold 0.5, last", "hidden-diff 2, last",
    ]  # fmt: skip
    assert [one.max_gen_toks for one in settings_of("1", None, None, "per_loop", "8,16", trained=4)] == [8, 16]
    assert len(settings_of(None, None, None, "per_loop", None, trained=4)) == 4
    for arguments in (
        ("x", None, None, "per_loop", None),
        (None, "0.5,y", None, "per_loop", None),
        (None, None, "entropy:1", "per_loop", None),
        ("1", None, None, "none", None),
        ("1", None, None, "per_loop", "many"),
    ):
        with pytest.raises(UserError):
            settings_of(*arguments, trained=4)
