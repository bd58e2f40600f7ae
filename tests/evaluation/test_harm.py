"""Harm by depth and category from planted answers and a planted judge."""

import json

import pytest

from looplm.errors import UserError
from looplm.evaluation.harm import ALL, DECODING, asked_texts, harm_scores, judge_answers, read_harm_prompts
from looplm.evaluation.judge import Judge
from looplm.evaluation.judge_client import Endpoint
from looplm.evaluation.kept_lines import KeptLines
from looplm.evaluation.rubrics import HARM
from looplm.evaluation.sampled_texts import KEY
from looplm.report.judge_section import harm_cells, harm_section, missing_note

from .judge_server import judge_server


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_decoding_is_the_papers():
    base, thinking = DECODING["base"], DECODING["thinking"]
    assert (base.temperature, base.max_tokens) == (0, 128)
    assert (thinking.temperature, thinking.top_p, thinking.max_tokens) == (1.0, 0.7, 8192)


def test_scores_by_decoding_depth_and_category(tmp_path):
    prompts = read_harm_prompts(
        write(tmp_path / "p.jsonl", *({"prompt": f"P{i}", "category": "xy"[i % 2]} for i in range(4)))
    )
    texts = KeptLines(tmp_path / "answers.jsonl", KEY)
    planted = {"loops 1": [5, 5, 5, 5], "loops 2": [5, 1, 3, None]}
    for decoding in ("base", "thinking"):
        for setting, scores in planted.items():
            for number, score in enumerate(scores):
                text = None if score is None else f"{decoding} says {score}"
                texts.add(
                    {
                        "setting": setting,
                        "name": f"{decoding} {number}",
                        "sample": 0,
                        "text": text,
                        "error": "too long",
                    }
                )

    def behave(body, before):
        said = body["messages"][1]["content"]
        if "thinking says 3" in said:
            return "say I would rather not."
        return f"score {said.split('says ')[1][0]}"

    with judge_server(behave) as server:
        judge = Judge(
            endpoint=Endpoint(server.url, "m"), rubric=HARM, cache=tmp_path / "j.jsonl", attempts=2, first_wait=0.01
        )
        judgments = judge_answers(prompts, ["base", "thinking"], list(planted), texts, judge)
        assert len(server.requests) == 2 * (4 + 2) + 1  # equal answers once; the one without a score twice
    scores = {(one.decoding, one.setting, one.category): one.summary for one in harm_scores(prompts, judgments)}
    assert list(scores)[:3] == [("base", "loops 1", ALL), ("base", "loops 1", "x"), ("base", "loops 1", "y")]
    assert len(scores) == 2 * 2 * 3
    whole = scores["base", "loops 2", ALL]
    assert whole.mean is not None and whole.highest_rate is not None
    assert (whole.num_scored, whole.num_missing) == (3, 1)
    assert (whole.mean.value, whole.highest_rate.value) == (3.0, pytest.approx(1 / 3))
    assert scores["base", "loops 1", "y"].counts[5] == 2
    assert [scores["base", "loops 2", category].mean.value for category in "xy"] == [4.0, 1.0]
    thinking = scores["thinking", "loops 2", ALL]
    assert (thinking.num_scored, thinking.num_missing) == (2, 2)
    several = [one for group in judgments.values() for one in group]
    note = missing_note(several)
    assert note.startswith("3 of 16 are missing") and "no answer: too long" in note and "without a score" in note
    found = harm_scores(prompts, judgments)
    cells = harm_cells(found)
    assert [row[-1] for row in cells.rows if row[2] == ALL] == ["0", "1", "0", "2"]
    assert harm_section(found).count("<svg") == 2
    assert missing_note(judgments["base", "loops 1"]) == ""


@pytest.mark.parametrize(
    "wrong", [{"prompt": "a"}, {"prompt": "", "category": "c"}, {"prompt": 3, "category": "c"},
              {"prompt": "a", "category": ALL}],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, wrong):
    with pytest.raises(UserError, match="line 2"):
        read_harm_prompts(write(tmp_path / "p.jsonl", {"prompt": "a", "category": 1}, wrong))


def test_what_is_asked(tmp_path):
    prompts = read_harm_prompts(write(tmp_path / "p.jsonl", {"prompt": "abc", "category": 1}))

    def encode(text):
        return [ord(letter) for letter in text]

    asked = asked_texts(prompts, ["base", "thinking"], encode, None)
    assert [one.name for one in asked] == ["base 0", "thinking 0"]
    assert [one.sampling.max_tokens for one in asked] == [128, 8192]
    short = asked_texts(prompts, ["thinking"], encode, 10)
    assert (short[0].sampling.max_tokens, short[0].sampling.top_p) == (10, 0.7)
    with pytest.raises(UserError, match="base, thinking"):
        asked_texts(prompts, ["both"], encode, None)
    with pytest.raises(UserError, match="no prompt"):
        read_harm_prompts(write(tmp_path / "p.jsonl"))
