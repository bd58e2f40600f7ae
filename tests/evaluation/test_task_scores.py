"""Samples, votes, categories and errors, against counting and resampling."""

import itertools
import math

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from looplm.evaluation.continuation import Continuation
from looplm.evaluation.task_gains import category_gains
from looplm.evaluation.task_scores import (
    UNREAD,
    final_answer,
    loop_changes,
    majority,
    mean_and_error,
    question_values,
    sample_scores,
    scores_of,
)
from looplm.evaluation.task_sweep import TaskResult


def test_votes():
    assert majority([("4", 0.0), ("5", 1.0), ("5", 1.0)]) == 1
    assert majority([("4", 0.0), ("5", 1.0)]) == 0  # alike: the first
    assert majority([(UNREAD, 0.0), (UNREAD, 0.0), ("5", 1.0)]) == 1
    assert majority([(UNREAD, 0.0)]) == 0


def test_passes_and_majorities_are_those_of_all_groups():
    answers = [[("1", 1.0), ("2", 0.0), ("1", 1.0), ("3", 0.0)], [("a", 0.0), ("b", 0.0), ("c", 1.0), ("c", 1.0)]]
    found = {(score.kind, score.n): score for score in sample_scores(answers)}
    for n in (1, 2, 4):
        each = [
            sum(any(score for _, score in group) for group in itertools.combinations(row, n)) / math.comb(4, n)
            for row in answers
        ]
        assert found["pass", n].value == pytest.approx(sum(each) / 2)
    assert found["pass", 1].value == found["majority", 1].value == 0.5
    assert found["majority", 2].value == ((1 + 1) / 2 + (0 + 1) / 2) / 2
    assert found["majority", 4].value == 1


def test_what_an_answer_ends_on():
    assert final_answer("so \\boxed{3} and \\boxed{ 12 } it is 4") == "12"
    assert final_answer("first 3, then 1,234.50 dollars") == "1234.50"
    assert final_answer(" no number \n") == "no number"


def test_mean_and_error():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean, error = mean_and_error(values)
    assert mean == 0.6
    assert error == pytest.approx(torch.tensor(values).std().item() / 5**0.5)
    assert mean_and_error([1.0]) == (1.0, None)


def test_lm_eval_s_numbers():
    metrics = {"acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 0.25, "em_stderr,strict": "N/A", "alias": "x"}
    assert [(one.metric, one.value, one.stderr) for one in scores_of("t", metrics)] == [
        ("acc", 0.5, 0.1), ("em,strict", 0.25, None)
    ]  # fmt: skip
    logged = {
        "one": [{"filter": "none", "acc": 1, "doc": {"k": 2}}, {"filter": "strict", "acc": 0, "doc": {"k": 2}}],
        "two": [{"filter": "none", "acc": 0.0, "doc": {"k": 3}}, {"filter": "none", "acc": (1, 2), "doc": {"k": 3}}],
    }
    assert question_values(logged, "acc", None) == ([1.0, 0.0], ["one", "two"])
    assert question_values(logged, "acc,strict", "k") == ([0.0], ["2"])


def result(depth, values, categories):
    value, stderr = mean_and_error(values)
    return TaskResult(
        task="t", setting=f"loops {depth}", rule="loops", level=depth, kv_cache="per_loop", max_gen_toks=None,
        metric="acc", value=value, stderr=stderr, mean_loops=depth, prompt_flops=1.0, decode_flops=0.0,
        num_questions=len(values), cut_prompts=0, seconds=0.0, scores=(), values=tuple(values),
        categories=tuple(categories), samples=(), loop_changes=(),
    )  # fmt: skip


def test_the_error_of_a_gain_is_that_of_resampled_questions():
    first = (torch.rand(600) < 0.4).double()
    last = torch.maximum(first, (torch.rand(600) < 0.5).double())
    found = [result(1, first.tolist(), ["a"] * 600), result(2, [1.0] * 600, ["a"] * 600)]
    found.append(result(4, last.tolist(), ["a"] * 600))
    found.append(result(6, [0.0] * 600, ["a"] * 600))  # beyond the trained depth: shown, not taken
    (gain,) = category_gains(found, 4)
    assert gain.gain == pytest.approx((last.mean() / first.mean() - 1).item())
    assert [depth for depth, _, _ in gain.by_loop] == [1, 2, 4, 6]
    drawn = torch.randint(600, (3000, 600))
    resampled = last[drawn].mean(1) / first[drawn].mean(1)
    assert gain.gain_stderr == pytest.approx(resampled.std().item(), rel=0.1)


def test_categories_are_ordered_by_their_gain():
    names = ["flat", "up", "up", "zero"]
    found = [result(1, [1.0, 1.0, 0.0, 0.0], names), result(4, [1.0, 1.0, 1.0, 1.0], names)]
    gains = category_gains(found, 4)
    assert [(one.category, one.gain) for one in gains] == [("all", 1.0), ("up", 1.0), ("flat", 0.0), ("zero", None)]


def test_the_error_of_a_change_is_over_questions():
    answers = []
    for _ in range(300):
        n, shift = int(torch.randint(1, 6, ())), torch.randn(())
        logprobs = torch.stack([torch.zeros(n), shift.expand(n) + 0.1 * torch.randn(n)])
        nothing = torch.zeros(2, n, dtype=torch.long)
        answers.append(Continuation(logprobs, nothing, nothing[0], torch.zeros(2, n), None, None))
    (change,) = loop_changes(answers)
    total = torch.cat([-one.logprobs[1] for one in answers])
    assert change.mean_nats == pytest.approx(total.mean().item())
    assert change.worse_share == pytest.approx((total > 0).double().mean().item())
    naive = total.std().item() / len(total) ** 0.5
    assert 1.3 * naive < change.stderr < 3 * naive  # tokens of one question move together
    assert loop_changes(answers[:1]) == []
