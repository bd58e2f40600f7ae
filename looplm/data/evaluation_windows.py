"""Held-out batches: each document alone, every token of its text predicted once, so that bits per byte are exact.

For a set of documents, bits per byte = nats of all predicted tokens / ln 2 / `document_bytes`, summed over the set:
the text of a document is covered by its predicted tokens without gap or overlap, whatever the vocabulary, which makes
the figure comparable between tokenizers. The end-of-text token covers no bytes and is not predicted here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from looplm.data.documents import Document
from looplm.data.packing import IGNORE_INDEX
from looplm.data.tokenizer import boundary_token_ids, encode_plain
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """Windows of held-out documents, the long ones first, padded on the right."""

    input_ids: Tensor
    """(num_windows, S) int64."""
    lengths: Tensor
    """(num_windows,) int64, tokens of each window before the padding; they do not increase."""
    document_index: Tensor
    """(num_windows,) int64, the document each window was cut from."""
    document_bytes: Tensor
    """(num_documents,) int64, UTF-8 bytes of each document's text."""

    @property
    def num_predicted_tokens(self) -> int:
        """Tokens of text: all but the one that each window begins with."""
        return int(self.lengths.sum()) - len(self.lengths)

    def batches(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield all windows once, `batch_size` at a time, each batch cut to its longest window.

        Keys: `input_ids`, `labels` (IGNORE_INDEX in the first column and at padding, otherwise unshifted as in
        transformers), `attention_mask` (1 at tokens, 0 at padding), all (B, S) int64, and `document_index` (B,).
        """
        for first in range(0, len(self.lengths), batch_size):
            rows = slice(first, first + batch_size)
            input_ids = self.input_ids[rows, : int(self.lengths[first])]
            column = torch.arange(input_ids.shape[1])
            attention_mask = column < self.lengths[rows, None]  # (B, S)
            yield {
                "input_ids": input_ids,
                "labels": input_ids.masked_fill(~attention_mask | (column == 0), IGNORE_INDEX),
                "attention_mask": attention_mask.long(),
                "document_index": self.document_index[rows],
            }


def evaluation_windows(
    documents: Sequence[Document], tokenizer: "PreTrainedTokenizerBase", seq_len: int
) -> EvaluationWindows:
    """Cut each document into windows of at most `seq_len` tokens.

    The first window of a document begins with bos, as the document does in training; every further one begins with
    the last token of the window before, which gives it a context it is not charged for twice.

    Raises:
        UserError: the documents hold no text, or `seq_len` is below 2.
    """
    if seq_len < 2:
        raise UserError(f"seq_len = {seq_len} is too short: a window needs one token to predict and one before.")
    start_id, end_id = boundary_token_ids(tokenizer)
    windows: list[tuple[int, list[int]]] = []
    for index, text_ids in enumerate(encode_plain([document.text for document in documents], tokenizer)):
        ids = [start_id, *text_ids]
        windows.extend((index, ids[cut : cut + seq_len]) for cut in range(0, len(text_ids), seq_len - 1))
    if not windows:
        raise UserError("There is no text to evaluate on: all documents are empty. Check the data files.")
    windows.sort(key=lambda window: -len(window[1]))
    padded = np.full((len(windows), len(windows[0][1])), end_id, dtype=np.int64)
    for row, (_, ids) in enumerate(windows):
        padded[row, : len(ids)] = ids
    return EvaluationWindows(
        input_ids=torch.from_numpy(padded),
        lengths=torch.tensor([len(ids) for _, ids in windows]),
        document_index=torch.tensor([index for index, _ in windows]),
        document_bytes=torch.tensor([document.num_bytes for document in documents]),
    )
