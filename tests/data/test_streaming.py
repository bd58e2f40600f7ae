"""Streams: nothing lost within an epoch, bounded reading, exact state in the middle of a block."""

import importlib
import itertools
from collections import Counter

import pytest
import torch

from looplm.data.corpus import open_rows
from looplm.data.packing import IGNORE_INDEX, RingPacking
from looplm.data.recipe import DataRecipe
from looplm.errors import UserError

MODULE = """
DRAWN = []
def verses(n=150):
    for i in range(n):
        DRAWN.append(i)
        yield f"verse {i} " * (i % 5 + 1)
def endless():
    i = 0
    while True:
        DRAWN.append(i)
        yield f"number {i} and more of it"
        i += 1
def pairs():
    for i in range(150):
        yield {"input_ids": [10 + i] * (i % 6 + 2), "labels": [-100] + [10 + i] * (i % 6 + 1)}
def nothing(): return iter(())
def blank(): return iter(["", ""])
"""


@pytest.fixture
def stream_of(tmp_path, monkeypatch, small_tokenizer):
    """Opens a stream of one of the functions above."""
    name = f"my_stream_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def open_it(function: str, block_tokens: int = 500, seed: int = 0, arguments=None, options=None, **source):
        source = {"kind": "generator", "function": f"{name}:{function}", "arguments": arguments or {}, **source}
        recipe = DataRecipe.model_validate(
            {"sources": [source], "stream_block_tokens": block_tokens, **(options or {})}
        )
        return open_rows(recipe, small_tokenizer, seq_len=40, seed=seed, cache_dir=tmp_path / "cache")

    open_it.drawn = lambda: importlib.import_module(name).DRAWN  # type: ignore[attr-defined]
    return open_it


def predicted(rows) -> Counter:
    labels = torch.cat([row["labels"] for row in rows])
    return Counter(labels[labels != IGNORE_INDEX].tolist())


def take_epoch(stream) -> list[dict[str, torch.Tensor]]:
    """The rows up to the first of the next epoch."""
    rows = []
    epoch = stream.state_dict()["sources"]["0"]["epoch"]
    while True:
        row = next(stream)
        if stream.state_dict()["sources"]["0"]["epoch"] != epoch:
            return rows
        rows.append(row)


@pytest.mark.parametrize("block_tokens", [1, 500, 10**6])
@pytest.mark.parametrize("packing", ["ring", "whole"])
def test_an_epoch_predicts_what_stored_tokens_would(stream_of, block_tokens, packing):
    options = {"packing": packing}
    stored = stream_of("verses", streaming=False, options=options)
    expected = predicted(itertools.islice(stored, stored.rows_per_epoch))
    stream = stream_of("verses", block_tokens, options=options)
    assert stream.rows_per_epoch is None
    assert predicted(take_epoch(stream)) == expected


def test_tokens_with_labels(stream_of):
    stream = stream_of("pairs", format="tokens")
    assert predicted(take_epoch(stream)) == Counter({10 + i: i % 6 + 1 for i in range(150)})


def test_epochs_and_seeds_shuffle_differently(stream_of):
    stream = stream_of("verses", 10**6)
    first, second = ([row["input_ids"].tolist() for row in itertools.islice(stream, 20)] for _ in range(2))
    assert first != second
    other = [row["input_ids"].tolist() for row in itertools.islice(stream_of("verses", 10**6, seed=1), 20)]
    assert first != other


def test_no_more_than_a_block_is_read_ahead(stream_of):
    stream = stream_of("endless", 500)
    next(stream)
    assert len(stream_of.drawn()) <= 128


@pytest.mark.parametrize("stop", [0, 1, 11, 12, 13, 29, 60])
def test_a_state_leads_to_the_very_next_row(stream_of, stop):
    stream = stream_of("verses")
    list(itertools.islice(stream, stop))
    state = stream.state_dict()
    again = stream_of("verses")
    again.load_state_dict(state)
    for row, other in zip(itertools.islice(stream, 40), itertools.islice(again, 40), strict=True):
        assert all(torch.equal(row[key], other[key]) for key in row)
    assert again.state_dict() == stream.state_dict()


@pytest.mark.parametrize("function", ["nothing", "blank"])
def test_a_source_without_documents_is_an_error(stream_of, function):
    with pytest.raises(UserError, match="holds no documents to train on"):
        next(stream_of(function))


def test_decontamination_of_a_stream_is_counted_exactly_also_after_resuming(stream_of, tmp_path, small_tokenizer):
    (tmp_path / "test.txt").write_text("verse 7 verse 7 verse 7")
    options = {"decontaminate": {"against": [str(tmp_path / "test.txt")], "ngram": 6}}
    rows = take_epoch(stream_of("verses", options=options))
    stream = stream_of("verses", options=options)
    list(itertools.islice(stream, len(rows)))
    assert stream.sources[0].num_dropped == 1
    resumed = stream_of("verses", options=options)
    list(itertools.islice(resumed, 3))
    state = resumed.state_dict()
    resumed.load_state_dict(state)
    list(itertools.islice(resumed, len(rows) - 3))
    assert resumed.sources[0].num_dropped == 1
    without = predicted(take_epoch(stream_of("verses"))).total() - predicted(rows).total()
    assert without == len(small_tokenizer.encode("verse 7 " * 3)) + 1


def test_every_block_of_every_epoch_is_shuffled_by_a_key_of_its_own(stream_of, monkeypatch):
    keys = []
    draw = RingPacking.epoch
    monkeypatch.setattr(RingPacking, "epoch", lambda packing, key: keys.append(key) or draw(packing, key))
    stream = stream_of("verses")
    list(itertools.islice(stream, 200))
    assert len({key[1] for key in keys}) > 1 and len({key[3] for key in keys}) > 1
    assert len(set(keys)) == len(keys) > 4
