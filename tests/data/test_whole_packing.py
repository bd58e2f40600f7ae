"""Documents kept whole: nothing is lost, nothing is cut that fits, padding is never predicted."""

import numpy as np
import pytest
import torch

from looplm.data.packing import IGNORE_INDEX, TokenStream
from looplm.data.whole_packing import WholePacking
from looplm.errors import UserError

PAD = 60_000


def numbered_stream(*lengths: int, predicted: np.ndarray | None = None) -> TokenStream:
    """A stream whose ids are their own positions."""
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenStream(np.arange(sum(lengths), dtype=np.uint16), starts, num_text_bytes=1, predicted=predicted)


def rows_of(packing: WholePacking, key: tuple[int, ...] = (0, 0)) -> list[dict[str, torch.Tensor]]:
    row = packing.epoch(key)
    return [row(position) for position in range(packing.num_rows)]


def predicted_of(rows) -> list[int]:
    labels = torch.cat([row["labels"] for row in rows])
    return sorted(labels[labels != IGNORE_INDEX].tolist())


@pytest.mark.parametrize("seq_len", [2, 5, 8, 30, 100])
def test_every_token_is_predicted_once_but_the_first_of_each_document(seq_len):
    stream = numbered_stream(3, 30, 1, 2, 12, 8, 8)
    packing = WholePacking(stream, seq_len, PAD)
    expected = sorted(set(range(stream.num_tokens)) - set(stream.document_starts.tolist()))
    assert predicted_of(rows_of(packing)) == predicted_of(rows_of(packing, (0, 1))) == expected


def test_documents_that_fit_are_whole_and_apart():
    stream = numbered_stream(3, 5, 4, 2, 7, 6, 3)
    for row in rows_of(WholePacking(stream, 8, PAD)):
        for document in row["document_ids"].unique().tolist():
            ids = row["input_ids"][row["document_ids"] == document].tolist()
            if ids[0] != PAD:
                number = stream.document_starts.tolist().index(ids[0])
                end = [*stream.document_starts.tolist(), stream.num_tokens][number + 1]
                assert ids == list(range(ids[0], end))


def test_padding_is_a_document_of_its_own_and_never_predicted():
    row = rows_of(WholePacking(numbered_stream(3, 4), 10, PAD))[0]
    assert row["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert row["input_ids"].tolist() == [3, 4, 5, 6, 0, 1, 2, PAD, PAD, PAD]
    assert row["labels"].tolist() == [-100, 4, 5, 6, -100, 1, 2, -100, -100, -100]
    assert all(value.dtype == torch.int64 for value in row.values())


def test_best_fit_fills_rows_that_can_be_full():
    """7+3, 6+4, 5+5: first fit in the order given would take a fourth row."""
    packing = WholePacking(numbered_stream(3, 4, 5, 5, 6, 7), 10, PAD)
    assert packing.num_rows == 3
    assert not any((row["input_ids"] == PAD).any() for row in rows_of(packing))


def test_a_piece_goes_where_the_least_room_is_left():
    """6+4, 5+3+2: with the 4 beside the 5, the 2 would need a third row."""
    assert WholePacking(numbered_stream(3, 4, 2, 5, 6), 10, PAD).num_rows == 2


def test_long_documents_are_cut_with_one_token_of_context():
    rows = rows_of(WholePacking(numbered_stream(9), 4, PAD))
    assert sorted(row["input_ids"].tolist() for row in rows) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, PAD]]


def test_masked_tokens_are_context_and_pieces_without_labels_are_left_out():
    predicted = np.zeros(12, dtype=np.uint8)
    predicted[[7, 8, 11]] = 1
    packing = WholePacking(numbered_stream(9, 3, predicted=predicted), 4, PAD)
    rows = rows_of(packing)
    assert predicted_of(rows) == [7, 8, 11]
    assert packing.num_rows == 2  # of the long one only [6, 7, 8]


def test_epochs_differ_and_keys_repeat():
    packing = WholePacking(numbered_stream(*[5] * 40), 10, PAD)
    first, again, second = (torch.stack([row["input_ids"] for row in rows_of(packing, (3, e))]) for e in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    together = {tuple(row[[0, 5]].tolist()) for row in first}
    assert together != {tuple(row[[0, 5]].tolist()) for row in second}  # other neighbours, not only another order


def test_nothing_to_predict_is_an_error():
    with pytest.raises(UserError, match="Nothing in the data is to be predicted"):
        WholePacking(numbered_stream(1, 1), 4, PAD)
    with pytest.raises(UserError, match="seq_len = 1"):
        WholePacking(numbered_stream(5), 1, PAD)
