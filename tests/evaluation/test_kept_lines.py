"""Records that outlast a run."""

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.kept_lines import KeptLines, check_plan, file_digest, model_digest


def test_what_was_added_is_there_again(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    kept = KeptLines(path, ("a", "b"))
    kept.add({"a": 1, "b": "x", "c": "ça\n\udcff"})
    kept.add({"a": 1, "b": "y", "c": 1})
    kept.add({"a": 1, "b": "y", "c": 2})
    again = KeptLines(path, ("a", "b"))
    assert set(again.records) == {(1, "x"), (1, "y")}
    assert again.records[1, "x"]["c"] == "ça\n?"
    assert again.records[1, "y"]["c"] == kept.records[1, "y"]["c"] == 2


def test_a_line_that_was_cut_short_is_taken_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    kept = KeptLines(path, ("a",))
    kept.add({"a": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": 3}\n'
    path.write_bytes(b'{"a"')
    assert not KeptLines(path, ("a",)).records


@pytest.mark.parametrize("line", [b'{"b": 1}', b"nonsense", b"[1]", b"3", b"\xff"])
def test_other_lines_are_refused(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match="line 2"):
        KeptLines(path, ("a",))
    assert path.read_bytes().endswith(line + b"\n")


def test_what_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        with pytest.raises(UserError):
            KeptLines(path, ("a",))
    with pytest.raises(UserError):
        check_plan(tmp_path / "file" / "a", {})
    with pytest.raises(UserError):
        file_digest(tmp_path / "none")


def test_another_plan_is_refused(tmp_path):
    plan = {"a": 1, "b": (1, 2)}
    check_plan(tmp_path / "out", plan)
    check_plan(tmp_path / "out", plan)
    with pytest.raises(UserError, match="b differ"):
        check_plan(tmp_path / "out", {"a": 1, "c": None, "b": [1]})
    (tmp_path / "out" / "plan.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        check_plan(tmp_path / "out", plan)


def test_a_digest_is_of_the_content(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = (file_digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_a_model_trained_again_is_another(tmp_path):
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    first = model_digest(model)
    assert model_digest(model) == first
    check_plan(tmp_path / "out", {"weights": first})
    with torch.no_grad():
        model.bias[1] += 1
    assert model_digest(model) != first
    with pytest.raises(UserError, match="weights differ"):
        check_plan(tmp_path / "out", {"weights": model_digest(model)})
