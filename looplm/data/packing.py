"""Training batches: documents laid end to end in one stream of tokens, cut into windows of equal length.

A document is stored as bos, its text, eos (`<|endoftext|>` both, in the vocabularies of Ouro and of this package), so
that a model learns to begin from bos, as generation does, and to end.

Every epoch cuts the stream, seen as a ring, from a new random offset and shuffles the windows. Neighbouring windows
share one token: the last of one is the context, unpredicted, with which the next begins. So every token is predicted
exactly once an epoch, but for the bos of each document, which nothing in its document precedes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from looplm.data.documents import Document
from looplm.data.tokenizer import boundary_token_ids, encode_plain
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""Label of a token that must not be predicted, as in transformers and `torch.nn.functional.cross_entropy`."""

_DOCUMENTS_PER_CALL = 64  # enough for the tokenizer's threads, few enough that their Python lists stay small


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Tokenised documents, end to end."""

    ids: np.ndarray
    """(num_tokens,) uint16, or uint32 for a vocabulary beyond 65,536."""
    document_starts: np.ndarray
    """(num_documents,) int64, where in `ids` each document's bos stands; the first is 0."""
    num_text_bytes: int
    """UTF-8 bytes of all texts."""

    @property
    def num_tokens(self) -> int:
        """Length of the stream, two boundary tokens a document included."""
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes that a token of text covers on average (boundary tokens cover none and do not count)."""
        return self.num_text_bytes / (self.num_tokens - 2 * len(self.document_starts))


def tokenize_documents(documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase") -> TokenStream:
    """Tokenise documents into one stream, in their order.

    Raises:
        UserError: the documents hold no text, or the tokenizer has no end-of-text token.
    """
    start_id, end_id = boundary_token_ids(tokenizer)
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    pieces: list[np.ndarray] = []
    num_text_bytes = 0
    remaining = iter(documents)
    while group := list(islice(remaining, _DOCUMENTS_PER_CALL)):
        num_text_bytes += sum(document.num_bytes for document in group)
        for ids in encode_plain([document.text for document in group], tokenizer):
            pieces.append(np.array([start_id, *ids, end_id], dtype=dtype))
    if num_text_bytes == 0:
        raise UserError("There is no text to train on: all documents are empty. Check the data files.")
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return TokenStream(
        ids=np.concatenate(pieces), document_starts=np.cumsum(lengths) - lengths, num_text_bytes=num_text_bytes
    )


class PackedDataset:
    """Endless iterator over training batches cut from a stream, resumable to the window.

    A batch is a dict of int64 tensors:

    - `input_ids` (B, S);
    - `labels` (B, S): the same ids, unshifted as in transformers (the model's position s - 1 predicts label s), and
      IGNORE_INDEX in the first column, at every document's bos, and where the last window of an epoch runs on into
      tokens that another one predicts;
    - `document_ids` (B, S): 0, 1, ... along each row. Positions with different ids must not attend to each other.

    The draw depends on `seed` and the number of windows drawn so far, on nothing else: `state_dict` after any batch,
    given to a new dataset of the same stream, seq_len and seed, continues with the very next window.

    Args:
        stream: what `tokenize_documents` returns; it may be shorter than one window.
        seq_len: S, tokens a window.
        batch_size: B, windows a batch. A batch may span the end of an epoch.
        seed: of the cuts and of the order; not negative.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, batch_size: int, seed: int) -> None:
        if seq_len < 2:
            raise UserError(f"seq_len = {seq_len} is too short: a window needs one token to predict and one before.")
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size} must be at least 1.")
        if seed < 0:
            raise UserError(f"seed = {seed} must not be negative.")
        self.stream = stream
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self._start_epoch(0)

    @property
    def num_windows(self) -> int:
        """Windows an epoch; each predicts seq_len - 1 tokens, the last one of the ring perhaps fewer."""
        return -(-self.stream.num_tokens // (self.seq_len - 1))

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the last window drawn belongs to."""
        return self._epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        windows = np.empty((self.batch_size, 1), dtype=np.int64)
        offsets = np.empty((self.batch_size, 1), dtype=np.int64)
        for row in range(self.batch_size):
            if self._position == self.num_windows:
                self._start_epoch(self._epoch + 1)
            windows[row], offsets[row] = self._order[self._position], self._offset
            self._position += 1
        return self._cut(windows, offsets)

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands, and what it must be continued with."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the last window that `state` counts.

        Raises:
            UserError: the state belongs to another stream, window length or seed, and so would draw differently.
        """
        here = self._identity()
        changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state[name] != here[name]]
        if changed:
            raise UserError(
                f"The data cannot be resumed where it was left: {', '.join(changed)}. "
                "Resume with the data, tokenizer, sequence length and seed the run was started with."
            )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _identity(self) -> dict[str, int]:
        """What a state and a dataset must agree in; batch_size may change, windows are drawn one by one."""
        return {"num_tokens": self.stream.num_tokens, "seq_len": self.seq_len, "seed": self.seed}

    def _start_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng((self.seed, epoch))
        self._epoch = epoch
        self._position = 0
        self._offset = int(rng.integers(self.stream.num_tokens))
        self._order = rng.permutation(self.num_windows)

    def _cut(self, windows: np.ndarray, offsets: np.ndarray) -> dict[str, Tensor]:
        """Cut windows out of the ring; `windows` and the `offsets` of their epochs are (B, 1)."""
        starts = self.stream.document_starts
        distance = windows * (self.seq_len - 1) + np.arange(self.seq_len)  # (B, S), from the epoch's offset
        index = (offsets + distance) % self.stream.num_tokens
        input_ids = self.stream.ids[index].astype(np.int64)
        document = np.searchsorted(starts, index, side="right") - 1
        is_start = index == starts[document]
        # Once round the ring is distance 1 to num_tokens: the token at distance 0 is met again, and predicted, there.
        predicted = ~is_start & (distance <= self.stream.num_tokens)
        predicted[:, 0] = False
        # Counted along the row, not taken from the stream: on the ring a document may follow itself.
        document_ids = np.cumsum(is_start, axis=1) - is_start[:, :1]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(np.where(predicted, input_ids, IGNORE_INDEX)),
            "document_ids": torch.from_numpy(document_ids.astype(np.int64)),
        }
