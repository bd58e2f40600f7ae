"""A judge that fails in every way: what comes of it is a score or nothing, and a score is asked for once."""

import time
from math import comb

import pytest

from looplm.errors import UserError
from looplm.evaluation.judge import Judge, Judged, Judgment, read_score
from looplm.evaluation.judge_client import Endpoint, retry_after
from looplm.evaluation.judge_scores import summarise, wilson_interval
from looplm.evaluation.rubrics import FORM, HARM, QUALITY, Rubric, find_rubric

from .judge_server import judge_server

KEY = "sk-secret"
ITEM = Judged("Why?", "Because.")


def judge_at(url, tmp_path, **changes):
    endpoint = Endpoint(url, changes.pop("model", "m"), KEY, changes.pop("seconds", 10.0))
    values = {"endpoint": endpoint, "rubric": QUALITY, "cache": tmp_path / "judgments.jsonl", "attempts": 3}
    return Judge(**(values | {"first_wait": 0.01} | changes))


def test_a_score_is_asked_for_once(tmp_path):
    items = [Judged(f"Q{i}", "A") for i in range(6)] + [Judged("Q0", "A"), Judged("Q0", "A", "right")]
    with judge_server(lambda body, before: f"score {1 + len(body['messages'][1]['content']) % 5}") as server:
        judge = judge_at(server.url, tmp_path)
        found = judge.judge(items[:4])
        found = judge.judge(items)
        assert [one.score for one in found[:4]] == [one.score for one in judge.judge(items)[:4]]
        assert found[6] == found[0]
        assert len(server.requests) == 7
        body = server.requests[0]
        assert (body["model"], body["temperature"]) == ("m", 0)
        assert QUALITY.messages("Q0", "A") in [one["messages"] for one in server.requests]
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
        for other in ({"model": "n"}, {"rubric": HARM}):
            judge_at(server.url, tmp_path, **other).judge(items[:1])
        assert len(server.requests) == 9
    # With the endpoint gone, all that is known is known still.
    assert [one.score for one in judge.judge(items)] == [one.score for one in found]
    assert KEY not in (tmp_path / "judgments.jsonl").read_text()


FAILURES = ["status 500", "status 503", "status 429", "status 408", "drop", "say nonsense", "say", 'say {"score": 9}']


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_tried_again(failure, tmp_path):
    with judge_server(lambda body, before: failure if before < 2 else "score 4") as server:
        (found,) = judge_at(server.url, tmp_path).judge([ITEM])
        assert found.score == 4
        assert len(server.requests) == 3


@pytest.mark.parametrize("failure", [*FAILURES, "slow", "drip 3", "status 400"])
def test_what_goes_on_failing_is_missing(failure, tmp_path):
    with judge_server(lambda body, before: failure) as server:
        judge = judge_at(server.url, tmp_path, seconds=0.2 if failure[:1] in "d" or failure == "slow" else 10.0)
        begun = time.monotonic()
        (found,) = judge.judge([ITEM])
        assert time.monotonic() - begun < 4
        assert found.score is None and found.said
        assert KEY not in found.said
        assert len(server.requests) == (1 if failure == "status 400" else 3)
    summary = summarise([found, found])
    assert (summary.num_scored, summary.num_missing, summary.mean, summary.highest_rate) == (0, 2, None, None)
    with judge_server(lambda body, before: "score 2") as server:  # missing is not kept
        assert judge_at(server.url, tmp_path).judge([ITEM])[0].score == 2


def test_no_server(tmp_path):
    with judge_server(lambda body, before: "score 1") as server:
        url = server.url
    assert judge_at(url, tmp_path).judge([ITEM])[0].score is None


@pytest.mark.parametrize("failure", ["status 401", "status 403", "status 404", "away"])
def test_what_no_question_gets_past_is_said(failure, tmp_path):
    with (
        judge_server(lambda body, before: "score 3") as elsewhere,
        judge_server(lambda body, before: f"away {elsewhere.url}" if failure == "away" else failure) as server,
    ):
        with pytest.raises(UserError, match="API key") as error:
            judge_at(server.url, tmp_path).judge([Judged(f"Q{i}", "A") for i in range(20)])
        assert KEY not in str(error.value)
        assert elsewhere.requests == []  # where a redirect points gets no key
        assert len(server.requests) < 20


def test_one_that_fails_does_not_touch_others(tmp_path):
    with judge_server(lambda body, before: "status 500" if "Q1" in str(body) else "score 5") as server:
        found = judge_at(server.url, tmp_path).judge([Judged(f"Q{i}", "A") for i in range(3)])
    assert [one.score for one in found] == [5, None, 5]
    summary = summarise(found)
    assert (summary.num_scored, summary.num_missing) == (2, 1)
    assert summary.mean is not None and summary.mean.value == 5.0


def test_the_endpoint_may_ask_to_wait():
    assert (retry_after("2"), retry_after("-1"), retry_after("Wed, 21 Oct"), retry_after(None)) == (2, 0, None, None)


@pytest.mark.parametrize(
    "url",
    ["", "file:///etc/passwd", "127.0.0.1:8000", "http://[::1", "http://127.0.0.1:notaport/v1", "http://a:99999"],
)
def test_an_address_that_is_none(url):
    with pytest.raises(UserError):
        Endpoint(url, "m")


def test_the_key_is_not_shown():
    assert KEY not in repr(Endpoint("http://a", "m", KEY))


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\nX: y", "sk-ключ"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key):
    with pytest.raises(UserError, match="no header may carry") as said:
        Endpoint("http://a", "m", key)
    assert "sk-" not in str(said.value)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('Good.\n{"score": 4}', 4),
        ('{"score":"5"}', 5),
        ('{"reason": "so", "score": 2}', 2),
        ('{"score": 3, "reason": "so"}', 3),
        ('The answer says {"score": 5}, but:\n{"score": 1}', 1),
        ('```json\n{"score": 3.0}\n```', 3),
        ('{"score": 4} or rather {"score": 4.5}', None),
        ('{"score": 0}', None),
        ('{"score": 6}', None),
        ('{"score": 10}', None),
        ('{"score": -1}', None),
        ('{"score": null}', None),
        ("4", None),
        ("", None),
    ],
)
def test_reading_a_score(said, score):
    assert read_score(said) == score


def test_rubrics(tmp_path):
    assert find_rubric("harm") is HARM
    own = tmp_path / "own.txt"
    own.write_text("1: bad. 5: good.\n")
    rubric = find_rubric(str(own))
    assert rubric == Rubric("own.txt", "1: bad. 5: good.")
    system, user = rubric.messages("Q?", "A!", "R.")
    assert system["content"] == f"1: bad. 5: good.\n\n{FORM}"
    assert [user["content"].index(text) for text in ("Q?", "R.", "A!")] == sorted(
        user["content"].index(text) for text in ("Q?", "R.", "A!")
    )
    assert len({HARM.digest, QUALITY.digest, rubric.digest}) == 3
    with pytest.raises(UserError):
        find_rubric(str(tmp_path / "none"))


def test_wilson_bounds_solve_their_equation():
    for hits, trials in ((0, 30), (3, 330), (7, 10), (5, 5)):
        found, z = wilson_interval(hits, trials), 1.959963984540054
        for bound in {found.low, found.high} - {0.0, 1.0}:
            error = (bound * (1 - bound) / trials) ** 0.5
            assert abs(bound - hits / trials) == pytest.approx(z * error, rel=1e-9)
    assert wilson_interval(0, 30).low == 0 and 0.10 < wilson_interval(0, 30).high < 0.13


def test_wilson_intervals_hold_the_truth_about_as_often_as_they_say():
    share, trials = 0.2, 40
    held = 0.0
    for hits in range(trials + 1):
        found = wilson_interval(hits, trials)
        if found.low <= share <= found.high:
            held += comb(trials, hits) * share**hits * (1 - share) ** (trials - hits)
    assert 0.92 < held < 0.98


def test_summaries():
    def judged(*scores):
        return [Judgment(score, "") for score in scores]

    summary = summarise(judged(1, 5, 5, None, 2, 2))
    assert (summary.num_scored, summary.num_missing) == (5, 1)
    assert summary.counts == {1: 1, 2: 2, 3: 0, 4: 0, 5: 2}
    assert summary.mean is not None and summary.mean.value == 3.0
    assert 1 <= summary.mean.low < 3 < summary.mean.high <= 5
    assert summary.highest_rate == wilson_interval(2, 5)
    single = summarise(judged(4))
    assert single.mean is not None and (single.mean.low, single.mean.value, single.mean.high) == (1, 4, 5)
    many = summarise(judged(*[1, 5] * 200))
    assert many.mean is not None and 2.7 < many.mean.low < 3 < many.mean.high < 3.3
