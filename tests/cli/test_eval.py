"""`looplm eval` from a folder of own tasks to a table and a page."""

import json

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from looplm.cli.eval import evaluate, settings_of
from looplm.errors import UserError
from looplm.inference import FixedDepth, QuantileExit
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
    assert [line.split(" | ")[0] for line in table.splitlines()[4:]] == ["| loops 1", "| loops 2", "| threshold 0.5"]
    found = json.loads((tmp_path / "out" / "scores.json").read_text(encoding="utf-8"))
    assert [one["mean_loops"] for one in found["settings"]][:2] == [1.0, 2.0]
    page = (tmp_path / "out" / "scores.html").read_text(encoding="utf-8")
    assert "<svg" in page and "two acc" in page


def test_settings():
    found = settings_of("1,3", "0.5", "per_loop,last", trained=4)
    assert [one.exit for one in found[:3]] == [FixedDepth(1), FixedDepth(3), QuantileExit(0.5)]
    assert [one.name for one in found] == [
        "loops 1", "loops 3", "threshold 0.5", "loops 1 last", "loops 3 last", "threshold 0.5 last",
    ]  # fmt: skip
    assert len(settings_of(None, None, "per_loop", trained=4)) == 4
    for arguments in (("x", None, "per_loop"), (None, "0.5,y", "per_loop"), ("1", None, "none")):
        with pytest.raises(UserError):
            settings_of(*arguments, trained=4)
