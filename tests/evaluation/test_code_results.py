"""From planted texts to pass@k, and what is not run twice."""

import pytest

from looplm.evaluation import code_results
from looplm.evaluation.code_execution import Limits, Outcome
from looplm.evaluation.code_problems import Problem
from looplm.evaluation.code_results import KEY, describe, failure_kind, run_missing, score
from looplm.evaluation.kept_lines import KeptLines

LIMITS = Limits()
PROBLEMS = [Problem(name, "", "", f"assert x == {n}", (), "") for n, name in enumerate("abc")]


@pytest.fixture
def texts(tmp_path):
    """Two settings, two samples: of "a" both are right in the first setting, of "b" one, of "c" none."""
    kept = KeptLines(tmp_path / "texts.jsonl", ("setting", "name", "sample"))
    right = {("one", "a"): 2, ("one", "b"): 1}
    for setting in ("one", "two"):
        for n, name in enumerate("abc"):
            for sample in range(2):
                value = n if sample < right.get((setting, name), 0) else 9
                text = None if (setting, name, sample) == ("two", "c", 0) else f"x = {value}"
                kept.add(
                    {"setting": setting, "name": name, "sample": sample, "text": text, "num_tokens": 1 + sample,
                     "mean_loops": 1.0 + sample, "error": "broken: so"}
                )  # fmt: skip
    return kept


def test_scores_of_planted_texts(texts, tmp_path):
    outcomes = KeptLines(tmp_path / "outcomes.jsonl", KEY)
    arguments = (PROBLEMS, ["one", "two"], texts, outcomes, LIMITS, "process")
    said: list[str] = []
    run_missing(*arguments, num_samples=2, say=said.append)
    under = describe(LIMITS, "process")
    one, two = (score(PROBLEMS, name, texts, outcomes, under, num_samples=2, ks=(1, 2)) for name in ("one", "two"))
    assert one.pass_at_k[1].value == pytest.approx((1 + 0.5 + 0) / 3)
    assert one.pass_at_k[2].value == pytest.approx((1 + 1 + 0) / 3)
    assert one.failures == {"AssertionError": 3}
    assert one.mean_loops == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert two.pass_at_k[2].value == 0
    assert two.failures == {"AssertionError": 5, "no text": 1}
    run_missing(*arguments, num_samples=2, say=said.append)
    assert [line.split()[0] for line in said] == ["12", "0"]


def test_only_what_is_missing_runs(texts, tmp_path, monkeypatch):
    ran: list[str] = []

    def run(programs, limits, isolation, num_processes):
        ran.extend(programs)
        return [Outcome(True, "passed")] * len(programs)

    monkeypatch.setattr(code_results, "run_programs", run)
    path = tmp_path / "outcomes.jsonl"
    run_missing(PROBLEMS, ["one"], texts, KeptLines(path, KEY), LIMITS, "process", num_samples=1)
    assert len(ran) == 3
    run_missing(PROBLEMS, ["one", "two"], texts, KeptLines(path, KEY), LIMITS, "process", num_samples=2)
    assert len(ran) == 11  # one has no text
    run_missing(PROBLEMS, ["one"], texts, KeptLines(path, KEY), Limits(cpu_seconds=9), "process", num_samples=1)
    run_missing(PROBLEMS, ["one"], texts, KeptLines(path, KEY), LIMITS, "namespaces", num_samples=1)
    assert len(ran) == 17  # other limits, another isolation: other outcomes


def test_kinds_of_failure():
    kinds = [failure_kind(text) for text in ("NameError: x", "refused: open", "more than 1 s of CPU")]
    assert kinds == ["NameError", "refused: open", "more than 1 s of CPU"]
