"""Prompts from files, pairs and tasks."""

import json

import pytest

from looplm.analysis.prompts import AskedPrompt, answers_given, generated_prompts, read_pairs, read_prompts
from looplm.errors import UserError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def test_prompts_of_every_kind(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "answer": "yes", "score": 3, "level": 2},
        {"input_ids": [1, 2], "answer": 7},
        {"input_ids": [1, 2, 9, 4], "labels": [-100, 2, 9, -100]},
    )
    assert read_prompts(file, encode) == [
        AskedPrompt((97, 98), "yes", 3, 2),
        AskedPrompt((1, 2), 7),
        AskedPrompt((1, 2), 9),
    ]
    plain = tmp_path / "a.txt"
    plain.write_text("ab\n\nc\n", encoding="utf-8")
    assert read_prompts(plain, encode) == [AskedPrompt((97, 98)), AskedPrompt((99,))]
    assert answers_given(read_prompts(file, encode)) == ["yes", 7, 9]
    assert answers_given(read_prompts(plain, encode)) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "line 1.*prompt"),
        ({"prompt": "x", "score": "high"}, "score is 'high'"),
        ({"prompt": "x", "answer": [1]}, "answer is"),
        ({"prompt": "x", "level": 1.5}, "level is 1.5"),
        ({"input_ids": ["a"]}, "list of whole numbers"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "mark an answer"),
        ({"input_ids": [1, 2], "labels": [1]}, "as many as input_ids"),
    ],
)
def test_broken_prompts_are_refused(tmp_path, record, message):
    with pytest.raises(UserError, match=message):
        read_prompts(write(tmp_path / "a.jsonl", record), encode)


def test_text_needs_a_tokenizer_and_files_need_prompts(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}), None)
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(write(tmp_path / "b.txt"), encode)


def test_pairs_of_tsv_csv_and_jsonl(tmp_path):
    tsv = tmp_path / "qqp.tsv"
    tsv.write_text(
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhy?\tHow?\t0\n1\t3\t4\tWho?\tWho is it?\t1\n",
        encoding="utf-8",
    )
    comma = tmp_path / "qqp.csv"
    comma.write_text('question1,question2,is_duplicate\nWhy?,How?,0\n"Who?","Who is it?",1\n', encoding="utf-8")
    lines = write(
        tmp_path / "qqp.jsonl",
        {"question1": "Why?", "question2": "How?", "is_duplicate": 0},
        {"question1": "Who?", "question2": "Who is it?", "is_duplicate": 1},
    )
    found = [read_pairs(file, encode, template="{first}|{second}") for file in (tsv, comma, lines)]
    expected = [AskedPrompt(tuple(encode("Why?|How?")), "no"), AskedPrompt(tuple(encode("Who?|Who is it?")), "yes")]
    assert found == [expected] * 3
    drawn = read_pairs(tsv, encode, count=1, seed=3, template="{first}|{second}")
    assert len(drawn) == 1 and drawn[0] in expected
    assert bytes(read_pairs(tsv, encode)[0].token_ids).decode().endswith("Answer yes or no.\nAnswer:")
    with pytest.raises(UserError, match="question1"):
        read_pairs(write(tmp_path / "b.jsonl", {"a": "x"}), encode)
    with pytest.raises(UserError, match="is_duplicate is 2"):
        read_pairs(write(tmp_path / "c.jsonl", {"question1": "x", "question2": "y", "is_duplicate": 2}), encode)


def documents(start: int):
    """A generator as recipes name them."""
    for i in range(start, start + 3):
        yield {"input_ids": [i, i, 5], "labels": [-100, -100, 5]}


def test_documents_of_a_task_are_cut_before_their_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    found = generated_prompts("test_prompts:documents", {"start": 2}, 2)
    assert found == [AskedPrompt((2, 2), 5), AskedPrompt((3, 3), 5)]
