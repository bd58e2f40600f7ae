"""From recipe to rows: what is tokenised when, what a change does, and what is held out."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from looplm.data import cache, sources
from looplm.data.corpus import (
    describe,
    evaluation_documents,
    held_out_documents,
    open_rows,
    prepare,
    tokenizer_documents,
)
from looplm.data.documents import is_held_out
from looplm.data.packing import IGNORE_INDEX
from looplm.data.recipe import DataRecipe
from looplm.data.stdlib_text import load_stdlib_text
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError

PROBLEM = "If a train leaves at noon and another follows an hour later at twice the speed, when do they meet?"


@pytest.fixture
def texts(write_jsonl) -> Path:
    return write_jsonl("texts.jsonl", [{"text": f"This is document number {n}."} for n in range(120)])


def recipe(*sources: dict, **options) -> DataRecipe:
    return DataRecipe.model_validate({"sources": list(sources), **options})


def files(*paths: Path, **options) -> dict:
    return {"kind": "files", "paths": [str(path) for path in paths], **options}


def rows(data: DataRecipe, tokenizer, cache_dir: Path, n: int = 5, **options):
    stream = open_rows(data, tokenizer, seq_len=32, seed=0, cache_dir=cache_dir, **options)
    return [row["input_ids"].tolist() for row in itertools.islice(stream, n)]


def test_tokens_are_made_once(tmp_path, texts, small_tokenizer, monkeypatch):
    said: list[str] = []
    first = rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", say=said.append)
    assert len(said) == 2 and said[0] == f"files {texts}: tokenising" and "120 documents" in said[1]
    monkeypatch.setattr(cache, "write_shards", None)  # not called again
    assert rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", say=said.append) == first
    assert rows(recipe(files(texts, weight=0.5)), small_tokenizer, tmp_path / "cache", say=said.append) == first
    assert len(said) == 2


def test_a_changed_file_is_noticed(tmp_path, texts, small_tokenizer):
    said: list[str] = []
    first = rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", 200, say=said.append)
    texts.write_text(texts.read_text().replace("number 7.", "number 8."))
    os.utime(texts, (1, 1))
    other = rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", 200, say=said.append)
    assert sum(row != before for row, before in zip(other, first, strict=True)) > 0
    assert said[2] == f"files {texts}: tokenising anew: files changed"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_changed_tokenizer_is_noticed(tmp_path, texts, small_tokenizer):
    said: list[str] = []
    prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache", say=said.append)
    other = train_tokenizer(["another text entirely"], 300)
    prepare(recipe(files(texts)), other, tmp_path / "cache", say=said.append)
    assert "tokenising anew: the tokenizer changed (" in said[2]


def test_a_changed_option_is_noticed(tmp_path, texts, small_tokenizer):
    said: list[str] = []
    prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache", say=said.append)
    prepare(recipe(files(texts, part="train")), small_tokenizer, tmp_path / "cache", say=said.append)
    assert said[2].endswith("tokenising anew: recipe changed")


def test_touched_files_are_tokenised_again_but_are_the_same_data(tmp_path, texts, small_tokenizer):
    """The cache goes by times of change; a resumed run by the content."""
    stream = open_rows(recipe(files(texts)), small_tokenizer, seq_len=32, seed=0, cache_dir=tmp_path / "a")
    next(stream)
    os.utime(texts, (5, 5))
    other = open_rows(recipe(files(texts)), small_tokenizer, seq_len=32, seed=0, cache_dir=tmp_path / "b")
    other.load_state_dict(stream.state_dict())
    assert next(other)["input_ids"].tolist() == next(stream)["input_ids"].tolist()


def test_several_ranks_need_the_tokens_to_be_there(tmp_path, texts, small_tokenizer):
    with pytest.raises(UserError, match="is not tokenised in .* Rank 0 does that before"):
        rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", rank=1, world_size=2)
    prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    mine = [rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", 3, rank=r, world_size=2) for r in range(2)]
    alone = rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", 6)
    assert [row for pair in zip(*mine, strict=True) for row in pair] == alone


def test_given_shards_are_the_data_they_were_made_of(tmp_path, texts, small_tokenizer):
    prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    [directory] = (tmp_path / "cache").iterdir()
    shards = recipe({"kind": "shards", "path": str(directory)})
    expected = rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    assert rows(shards, small_tokenizer, tmp_path / "other") == expected
    with pytest.raises(UserError, match=r"made with another tokenizer: its hash is \w{32}, and this run's is \w{32}"):
        rows(shards, train_tokenizer(["x"], 300), tmp_path / "other")
    (tmp_path / "problems.txt").write_text(PROBLEM)
    decontaminate = {"against": [str(tmp_path / "problems.txt")]}
    with pytest.raises(UserError, match="were not decontaminated against these files"):
        rows(
            recipe({"kind": "shards", "path": str(directory)}, decontaminate=decontaminate), small_tokenizer, tmp_path
        )


def test_given_shards_that_are_not_there(tmp_path, small_tokenizer):
    with pytest.raises(UserError, match="manifest.json cannot be read"):
        rows(recipe({"kind": "shards", "path": str(tmp_path / "missing")}), small_tokenizer, tmp_path)


@pytest.mark.parametrize("packing", ["ring", "whole", None])
def test_chat_is_packed_whole_unless_asked_otherwise(tmp_path, write_jsonl, small_tokenizer, packing):
    chats = [
        [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]
        for n in range(30)
    ]
    path = write_jsonl("chat.jsonl", [{"messages": chat} for chat in chats])
    data = recipe(files(path, format="chat"), packing=packing)
    stream = open_rows(data, small_tokenizer, seq_len=64, seed=0, cache_dir=tmp_path / "cache")
    epoch = list(itertools.islice(stream, stream.rows_per_epoch))
    labels = torch.cat([row["labels"] for row in epoch])
    ends = int((labels == small_tokenizer.convert_tokens_to_ids("<|im_end|>")).sum())
    answers = sum(len(small_tokenizer.encode(f"answer {n}")) for n in range(30))
    assert ends == 30 and int((labels != IGNORE_INDEX).sum()) == answers + 30
    padded = any((row["document_ids"].diff() > 0).sum() and row["input_ids"][-1] == 0 for row in epoch)
    assert padded == (packing != "ring")


def test_decontamination_drops_and_counts(tmp_path, write_jsonl, small_tokenizer):
    path = write_jsonl("texts.jsonl", [{"text": "clean"}, {"text": f"He said: {PROBLEM}"}, {"text": "fine"}])
    against = write_jsonl("test.jsonl", [{"question": PROBLEM.upper(), "answer": 3}])
    said: list[str] = []
    data = recipe(files(path), decontaminate={"against": [str(against)]})
    [manifest] = prepare(data, small_tokenizer, tmp_path / "cache", say=said.append)
    assert manifest.num_documents == 2 and manifest.num_dropped == 1 and manifest.dropped == [f"{path}, line 2"]
    assert "1 dropped by decontamination" in said[1]
    prepare(recipe(files(path)), small_tokenizer, tmp_path / "cache", say=said.append)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(tmp_path, texts, small_tokenizer):
    with pytest.raises(UserError, match="has 400 tokens and the model a vocabulary of 384"):
        prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache", vocab_size=384)
    with pytest.raises(UserError, match="the last 16 would have no embedding"):
        rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", vocab_size=384)
    assert rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache", vocab_size=400)


def test_a_bad_line_leaves_no_tokens_behind(tmp_path, texts, small_tokenizer):
    texts.write_text(texts.read_text() + '{"text": "x"\n')
    with pytest.raises(UserError, match="texts.jsonl, line 121: not valid JSON"):
        prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_is_named(tmp_path, texts, small_tokenizer):
    prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    [directory] = (tmp_path / "cache").iterdir()
    (directory / "tokens-00000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokens-00000.bin is damaged: 0 bytes .* Delete .* and tokenise again"):
        rows(recipe(files(texts)), small_tokenizer, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, texts, small_tokenizer):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache cannot be written"):
        prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")


def test_a_plan_needs_no_tokenising(tmp_path, texts, small_tokenizer):
    data = recipe(
        files(texts, weight=1),
        {"kind": "hub", "name": "owner/name", "weight": 1},
        {"kind": "generator", "function": "itertools:count", "weight": 1},
    )
    files_summary, *others = describe(data, small_tokenizer, seq_len=32, cache_dir=tmp_path / "cache")
    assert files_summary.num_bytes == texts.stat().st_size and files_summary.num_tokens is None
    assert all(other.num_tokens is other.num_bytes is other.rows_per_epoch is None for other in others)
    assert not (tmp_path / "cache").exists()
    [manifest] = prepare(recipe(files(texts)), small_tokenizer, tmp_path / "cache")
    [summary] = describe(recipe(files(texts)), small_tokenizer, seq_len=32, cache_dir=tmp_path / "cache")
    stream = open_rows(recipe(files(texts)), small_tokenizer, seq_len=32, seed=0, cache_dir=tmp_path / "cache")
    assert summary.num_tokens == manifest.num_tokens and summary.rows_per_epoch == stream.rows_per_epoch


def test_the_standard_library_trains_on_one_part_and_holds_out_the_other(tmp_path, small_tokenizer, monkeypatch):
    corpus = load_stdlib_text(200_000)
    monkeypatch.setattr(sources, "load_stdlib_text", {200_000: corpus}.__getitem__)  # reading it takes a second
    data = recipe({"kind": "stdlib", "max_bytes": 200_000})
    [manifest] = prepare(data, small_tokenizer, tmp_path / "cache")
    documents = corpus.documents
    held_out = [document for document in documents if is_held_out(document.name)]
    assert held_out_documents(data) == held_out
    assert manifest.num_documents == len(documents) - len(held_out)


def test_what_is_held_out_of_files(texts, tmp_path):
    held_out = held_out_documents(recipe(files(texts, part="train")))
    assert held_out and all(is_held_out(document.name) for document in held_out)
    lines = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    assert [document.text for document in held_out] == [
        text for n, text in enumerate(lines, 1) if is_held_out(f"texts.jsonl:{n}")
    ]
    with pytest.raises(UserError, match="hold nothing out"):
        held_out_documents(recipe(files(texts)))
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(UserError, match="Nothing falls to the held-out part"):
        held_out_documents(recipe(files(tmp_path / "one.txt", part="train")))


def test_evaluation_data_of_their_own(texts, tmp_path):
    assert len(evaluation_documents(recipe(files(texts)))) == 120
    with pytest.raises(UserError, match="holds tokens, and evaluation needs text"):
        evaluation_documents(recipe({"kind": "shards", "path": str(tmp_path)}))


def test_a_tokenizer_reads_so_much_text_and_of_every_source(texts, tmp_path, monkeypatch):
    """An endless source neither hangs it nor keeps the others out; small sources are read whole."""
    (tmp_path / "endless_texts.py").write_text("def texts():\n    while True:\n        yield 'again and again'\n")
    monkeypatch.syspath_prepend(tmp_path)
    endless = {"kind": "generator", "function": "endless_texts:texts", "weight": 1}
    drawn = [document.text for document in tokenizer_documents(recipe(endless, files(texts, weight=1)), 30_000)]
    assert len(drawn) == 300, "a short document counts as a hundred bytes"
    assert drawn[:4] == [text for n in (0, 1) for text in ("again and again", f"This is document number {n}.")]
    assert {f"This is document number {n}." for n in range(120)} < set(drawn)
    assert len(tokenizer_documents(recipe(files(texts)), 10**9)) == 120
