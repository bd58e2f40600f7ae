"""`looplm judge` and `looplm harm` with a judge on this machine."""

import json

import pytest
import typer
from typer.testing import CliRunner

from looplm.cli.harm import harm
from looplm.cli.judge import JUDGE_KEY, judge
from looplm.errors import UserError

from ..evaluation.judge_server import judge_server

judging, harming = typer.Typer(pretty_exceptions_enable=False), typer.Typer(pretty_exceptions_enable=False)
judging.command()(judge)
harming.command()(harm)


def invoke(app, *words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_answers_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(JUDGE_KEY, "sk-secret")
    answers = lines(
        tmp_path / "answers.jsonl",
        {"prompt": "Q1", "text": "A", "depth": 1},
        {"question": "Q2", "answer": "A", "reference": "R", "depth": 2},
        {"question": "Q3", "answer": "A", "depth": 2},
    )
    with judge_server(lambda body, before: "status 400" if "Q3" in str(body) else "score 4") as server:
        words = (answers, "--judge-url", server.url, "--judge-model", "m", "--out", tmp_path / "out")
        result = invoke(judging, *words, "--by", "depth")
        assert {one["Authorization"] for one in server.headers} == {"Bearer sk-secret"}
        assert invoke(judging, *words, "--by", "depth").exit_code == 0
        assert len(server.requests) == 4  # the one that was refused, again
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")][2:]
    assert [(row.split(" | ")[0], row.split(" | ")[-1]) for row in rows] == [
        ("| all", "1 |"),
        ("| 1", "0 |"),
        ("| 2", "1 |"),
    ]
    assert "1 of 3 are missing" in result.stdout
    found = json.loads((tmp_path / "out" / "judge.json").read_text(encoding="utf-8"))
    assert [one["score"] for one in found["judgments"]] == [4, 4, None]
    for path in (tmp_path / "out").iterdir():
        assert "sk-secret" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", [{"question": "Q"}, {"answer": "A"}, {"question": "Q", "answer": 3}])
def test_a_wrong_line_is_named(tmp_path, wrong):
    answers = lines(tmp_path / "answers.jsonl", {"question": "Q", "answer": "A"}, wrong)
    with pytest.raises(UserError, match="line 2"):
        invoke(judging, answers, "--judge-url", "http://127.0.0.1:9", "--judge-model", "m", "--out", tmp_path / "out")


def test_what_else_is_wrong(tmp_path):
    rest = ("--judge-url", "http://127.0.0.1:9", "--judge-model", "m", "--out", tmp_path / "out")
    with pytest.raises(UserError, match="no answer"):
        invoke(judging, lines(tmp_path / "none.jsonl"), *rest)
    with pytest.raises(UserError, match="group by"):
        invoke(judging, lines(tmp_path / "a.jsonl", {"question": "Q", "answer": "A"}), *rest, "--by", "depth")


def test_harm_from_prompts_to_a_table(tmp_path, checkpoint):
    prompts = lines(
        tmp_path / "prompts.jsonl",
        *({"prompt": f"the {name}", "category": name} for name in ("cat", "mat", "cat sat")),
    )
    words = (checkpoint, "--prompts", prompts, "--out", tmp_path / "out", "--num-loops", "1,4", "--max-tokens", 6)
    words += ("--decoding", "base,thinking")
    written = invoke(harming, *words)
    assert written.exit_code == 0 and "--judge-url" in written.stdout
    assert "warning: loops 4" in written.stderr
    assert len((tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 12
    with judge_server(lambda body, before: f"score {1 + len(str(body)) % 5}") as server:
        judged = (*words, "--judge-url", server.url, "--judge-model", "m")
        result = invoke(harming, *judged)
        asked = len(server.requests)
        again = invoke(harming, *judged)
        assert len(server.requests) == asked <= 12
    assert result.exit_code == 0
    assert "6 texts are there, 0 to write" in again.stdout and "0 to ask for" in again.stdout
    found = json.loads((tmp_path / "out" / "harm.json").read_text(encoding="utf-8"))
    assert len(found["scores"]) == 2 * 2 * 4
    assert {one["decoding"] for one in found["scores"]} == {"base", "thinking"}
    assert (tmp_path / "out" / "harm.md").read_text(encoding="utf-8") in again.stdout
    assert (tmp_path / "out" / "harm.html").read_text(encoding="utf-8").count("<svg") == 2


def test_harm_options(tmp_path, checkpoint):
    prompts = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat", "category": "c"})
    words = (checkpoint, "--prompts", prompts, "--out", tmp_path / "out")
    for wrong in (("--judge-url", "http://a"), ("--decoding", "x"), (), ("--chat", "--max-tokens", 3)):
        with pytest.raises(UserError):
            invoke(harming, *words, *wrong)
