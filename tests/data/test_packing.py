"""Packing: every token once an epoch, no label across documents, and a resume that draws what would have come."""

import itertools

import numpy as np
import pytest
import torch

from looplm.data.documents import Document
from looplm.data.packing import IGNORE_INDEX, RingPacking, TokenStream, tokenize_documents
from looplm.data.rows import RowStream
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError

DOCUMENTS = [
    Document("first", "The first of three documents.\n"),
    Document("second", "é" * 7),
    Document("third", "And a third one, a little longer than the two before it.\n" * 3),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document.text for document in DOCUMENTS], vocab_size=280)


@pytest.fixture
def stream(tokenizer) -> TokenStream:
    return tokenize_documents(DOCUMENTS, tokenizer)


def numbered_stream(*lengths: int) -> TokenStream:
    """A stream whose ids are their own positions, so that a window shows where it was cut."""
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenStream(np.arange(sum(lengths), dtype=np.uint16), starts, num_text_bytes=1)


def draw_epochs(rows: RowStream, num_epochs: int = 1) -> dict[str, torch.Tensor]:
    """All windows of the next epochs, one below the other."""
    assert rows.rows_per_epoch is not None
    drawn = list(itertools.islice(rows, num_epochs * rows.rows_per_epoch))
    return {key: torch.stack([row[key] for row in drawn]) for key in drawn[0]}


def test_the_stream_holds_each_document_between_its_boundaries(stream, tokenizer):
    pieces = np.split(stream.ids, stream.document_starts[1:])
    assert [piece[0] for piece in pieces] == [piece[-1] for piece in pieces] == [0, 0, 0]
    assert [tokenizer.decode(piece[1:-1]) for piece in pieces] == [document.text for document in DOCUMENTS]
    assert stream.ids.dtype == np.uint16


def test_bytes_per_token_counts_text_only(stream):
    num_bytes = sum(len(document.text.encode()) for document in DOCUMENTS)
    assert stream.bytes_per_token == num_bytes / (stream.num_tokens - 6)


def test_many_documents_keep_their_order(tokenizer):
    documents = [Document(str(number), f"document {number}") for number in range(150)]
    stream = tokenize_documents(iter(documents), tokenizer)
    pieces = np.split(stream.ids, stream.document_starts[1:])
    assert [tokenizer.decode(piece[1:-1]) for piece in pieces] == [document.text for document in documents]


@pytest.mark.parametrize("seq_len", [2, 5, 16, 47, 48, 49, 100])
def test_an_epoch_predicts_every_token_once_but_the_starts(seq_len):
    stream = numbered_stream(3, 30, 1, 2, 12)
    rows = RowStream.of_tokens(stream, seq_len=seq_len, seed=3)
    for _ in range(3):
        labels = draw_epochs(rows)["labels"]
        predicted = labels[labels != IGNORE_INDEX].tolist()
        assert sorted(predicted) == sorted(set(range(48)) - {0, 3, 33, 34, 36})


@pytest.mark.parametrize("seq_len", [5, 16, 60])
def test_labels_are_the_ids_and_are_masked_exactly_where_they_must_be(seq_len):
    stream = numbered_stream(3, 30, 1, 2, 12)
    batch = draw_epochs(RowStream.of_tokens(stream, seq_len=seq_len, seed=0))
    ids, labels = batch["input_ids"], batch["labels"]
    kept = labels != IGNORE_INDEX
    assert torch.equal(labels[kept], ids[kept])
    assert not kept[:, 0].any()
    assert not kept[torch.isin(ids, torch.from_numpy(stream.document_starts))].any()
    num_repeated = ids.shape[0] * (seq_len - 1) - stream.num_tokens  # where the last window runs on
    num_starts = torch.isin(ids[:, 1:], torch.from_numpy(stream.document_starts)).sum()
    assert (~kept[:, 1:]).sum() <= num_starts + num_repeated


@pytest.mark.parametrize("lengths", [(3, 30, 1, 2, 12), (7,), (1,) * 30])
def test_document_ids_change_exactly_at_starts(lengths):
    stream = numbered_stream(*lengths)
    batch = draw_epochs(RowStream.of_tokens(stream, seq_len=20, seed=0))
    is_start = torch.isin(batch["input_ids"][:, 1:], torch.from_numpy(stream.document_starts))
    assert (batch["document_ids"][:, 0] == 0).all()
    assert torch.equal(batch["document_ids"].diff(dim=1), is_start.long())


@pytest.mark.parametrize("offset", [0, 1, 40, 100])
def test_windows_put_together_are_the_documents_again(stream, tokenizer, offset):
    packing = RingPacking(stream, seq_len=9)
    windows = np.stack([packing.window(number, offset)["input_ids"].numpy() for number in range(packing.num_rows)])
    ids = np.roll(windows[:, :-1].ravel()[: stream.num_tokens], offset)
    pieces = np.split(ids, stream.document_starts[1:])
    assert [tokenizer.decode(piece[1:-1]) for piece in pieces] == [document.text for document in DOCUMENTS]


def test_shapes_and_types(stream):
    row = next(RowStream.of_tokens(stream, seq_len=8, seed=0))
    assert {key: tuple(value.shape) for key, value in row.items()} == {
        "input_ids": (8,),
        "labels": (8,),
        "document_ids": (8,),
    }
    assert all(value.dtype == torch.int64 for value in row.values())


def test_epochs_differ_in_order_and_cuts_and_seeds_differ():
    stream = numbered_stream(100)
    rows = RowStream.of_tokens(stream, seq_len=11, seed=0)
    first, second = draw_epochs(rows)["input_ids"], draw_epochs(rows)["input_ids"]
    assert set(first[:, 0].tolist()) != set(second[:, 0].tolist())
    other = draw_epochs(RowStream.of_tokens(stream, seq_len=11, seed=1))["input_ids"]
    assert not torch.equal(first, other)
    again = draw_epochs(RowStream.of_tokens(stream, seq_len=11, seed=0), num_epochs=2)["input_ids"]
    assert torch.equal(torch.cat([first, second]), again)


@pytest.mark.parametrize("documents", [[], [Document("empty", "")]])
def test_no_text_is_an_error(tokenizer, documents):
    with pytest.raises(UserError, match="no text to train on"):
        tokenize_documents(documents, tokenizer)
