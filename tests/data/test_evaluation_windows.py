"""Held-out windows: every byte of every document covered once, whatever the batch."""

import pytest
import torch

from looplm.data.documents import Document
from looplm.data.evaluation_windows import evaluation_windows
from looplm.data.packing import IGNORE_INDEX
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError

DOCUMENTS = [
    Document("long", "A document that takes several windows, naïve and 🙂.\n" * 4),
    Document("short", "x"),
    Document("empty", ""),
    Document("middle", "A sentence."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document.text for document in DOCUMENTS], vocab_size=270)


@pytest.mark.parametrize("seq_len", [2, 7, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_predicted_tokens_cover_each_document_once_and_in_order(tokenizer, seq_len, batch_size):
    windows = evaluation_windows(DOCUMENTS, tokenizer, seq_len)
    predicted: list[list[int]] = [[] for _ in DOCUMENTS]
    for batch in windows.batches(batch_size):
        assert batch["input_ids"].shape[1] <= seq_len
        assert batch["attention_mask"][:, -1].any()  # no batch is wider than its longest window
        for labels, index in zip(batch["labels"], batch["document_index"].tolist(), strict=True):
            predicted[index] += labels[labels != IGNORE_INDEX].tolist()
    assert [tokenizer.decode(ids) for ids in predicted] == [document.text for document in DOCUMENTS]
    assert sum(map(len, predicted)) == windows.num_predicted_tokens
    assert windows.document_bytes.tolist() == [len(document.text.encode()) for document in DOCUMENTS]


def test_contexts_are_bos_and_then_the_token_before(tokenizer):
    windows = evaluation_windows(DOCUMENTS[:1], tokenizer, seq_len=10)
    text_ids = tokenizer.encode(DOCUMENTS[0].text)
    contexts = windows.input_ids[:, 0].tolist()
    assert contexts == [0, *text_ids[8::9]][: len(contexts)]


def test_padding_is_masked_in_labels_and_attention(tokenizer):
    batch = next(evaluation_windows(DOCUMENTS, tokenizer, seq_len=1000).batches(8))
    padding = batch["attention_mask"] == 0
    lengths = [len(tokenizer.encode(document.text)) + 1 for document in DOCUMENTS if document.text]
    assert sorted(batch["attention_mask"].sum(1).tolist()) == sorted(lengths)
    assert (batch["labels"][padding] == IGNORE_INDEX).all()
    assert (batch["labels"][:, 0] == IGNORE_INDEX).all()
    inside = ~padding
    inside[:, 0] = False
    assert torch.equal(batch["labels"][inside], batch["input_ids"][inside])


def test_no_text_or_no_room_is_an_error(tokenizer):
    with pytest.raises(UserError, match="no text to evaluate on"):
        evaluation_windows([Document("empty", "")], tokenizer, 16)
    with pytest.raises(UserError, match="seq_len = 1"):
        evaluation_windows(DOCUMENTS, tokenizer, 1)
