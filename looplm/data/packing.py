"""Documents laid end to end in one stream of tokens, cut into windows of equal length.

A text is stored as bos, its tokens, eos (`<|endoftext|>` both, in the vocabularies of Ouro and of this package), so
that a model learns to begin from bos, as generation does, and to end.

Every epoch cuts the stream, seen as a ring, from a new random offset and shuffles the windows. Neighbouring windows
share one token: the last of one is the context, unpredicted, with which the next begins. So every token is predicted
exactly once an epoch, but for the first of each document, which nothing in its document precedes, and for those that
the stream itself marks as not to be predicted (prompts).
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from looplm.data.documents import Document
from looplm.data.mapped import MappedArray
from looplm.data.tokenizer import boundary_token_ids, encode_plain
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""Label of a token that must not be predicted, as in transformers and `torch.nn.functional.cross_entropy`."""

Row = dict[str, Tensor]
"""`input_ids`, `labels` (unshifted, IGNORE_INDEX where not predicted) and `document_ids`, each (S,) int64."""

_DOCUMENTS_PER_CALL = 64  # enough for the tokenizer's threads, few enough that their Python lists stay small


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Tokenised documents, end to end, in memory or mapped from files."""

    ids: np.ndarray | MappedArray
    """(num_tokens,) uint16, or uint32 for a vocabulary beyond 65,536."""
    document_starts: np.ndarray
    """(num_documents,) int64, where in `ids` each document's first token stands; the first is 0."""
    num_text_bytes: int
    """UTF-8 bytes of all texts."""
    predicted: np.ndarray | MappedArray | None = None
    """(num_tokens,) uint8, 1 where a token is to be predicted, 0 where it is context only; None: all are."""
    stored_content: str | None = None
    """What `content` gives, where it is known already."""

    @property
    def num_tokens(self) -> int:
        """Length of the stream, two boundary tokens a document included."""
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes that a token of text covers on average (boundary tokens cover none and do not count)."""
        return self.num_text_bytes / (self.num_tokens - 2 * len(self.document_starts))

    @property
    def content(self) -> str:
        """A digest of ids, document starts and what is predicted, by which a resumed run knows its data again."""
        if self.stored_content is not None:
            return self.stored_content
        digest = ContentDigest()
        digest.ids.update(np.asarray(self.ids).tobytes())
        digest.document_starts.update(np.asarray(self.document_starts, dtype="<i8").tobytes())
        if self.predicted is not None:
            digest.predicted.update(np.asarray(self.predicted, dtype=np.uint8).tobytes())
        return digest.hexdigest()


class ContentDigest:
    """SHA-256 of a stream's three arrays, each fed piece by piece, so that it can be taken while writing."""

    def __init__(self) -> None:
        self.ids, self.document_starts, self.predicted = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()

    def hexdigest(self) -> str:
        """Of all that was fed; 32 digits."""
        parts = (self.ids, self.document_starts, self.predicted)
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()[:32]


def tokenize_documents(documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase") -> TokenStream:
    """Tokenise documents into one stream, in their order.

    Raises:
        UserError: the documents hold no text, or the tokenizer has no end-of-text token.
    """
    start_id, end_id = boundary_token_ids(tokenizer)
    dtype = token_dtype(tokenizer)
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


def token_dtype(tokenizer: "PreTrainedTokenizerBase") -> type[np.unsignedinteger]:
    """The narrowest type that holds every id of the vocabulary."""
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


class Packing(Protocol):
    """A stream cut into rows: a fixed number of them an epoch, in an order and with cuts that depend on a key."""

    stream: TokenStream

    @property
    def num_rows(self) -> int:
        """Rows an epoch, the same in every epoch."""
        ...

    def epoch(self, key: tuple[int, ...]) -> Callable[[int], Row]:
        """The rows of one epoch by their position in it; equal keys (numbers >= 0) give equal rows."""
        ...


class RingPacking:
    """Windows of `seq_len` tokens cut from the stream as the module's docstring describes.

    Args:
        stream: it may be shorter than one window.
        seq_len: S, tokens a row.

    Raises:
        UserError: `seq_len` is below 2.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        if seq_len < 2:
            raise UserError(f"seq_len = {seq_len} is too short: a window needs one token to predict and one before.")
        self.stream = stream
        self.seq_len = seq_len

    @property
    def num_rows(self) -> int:
        """Windows an epoch; each covers seq_len - 1 tokens, the last one of the ring perhaps fewer."""
        return -(-self.stream.num_tokens // (self.seq_len - 1))

    def epoch(self, key: tuple[int, ...]) -> Callable[[int], Row]:
        """See `Packing.epoch`."""
        rng = np.random.default_rng(key)
        offset = int(rng.integers(self.stream.num_tokens))
        order = rng.permutation(self.num_rows)
        return lambda position: self.window(int(order[position]), offset)

    def window(self, number: int, offset: int) -> Row:
        """The window of this number on the ring that is cut at `offset`."""
        starts, num_tokens = self.stream.document_starts, self.stream.num_tokens
        distance = number * (self.seq_len - 1) + np.arange(self.seq_len)  # (S,), from the offset
        index = (offset + distance) % num_tokens
        input_ids = self.stream.ids[index].astype(np.int64)
        is_start = index == starts[np.searchsorted(starts, index, side="right") - 1]
        # Once round the ring is distance 1 to num_tokens: the token at distance 0 is met again, and predicted, there.
        predicted = ~is_start & (distance <= num_tokens)
        if self.stream.predicted is not None:
            predicted &= self.stream.predicted[index].astype(bool)
        predicted[0] = False
        # Counted along the row, not taken from the stream: on the ring a document may follow itself.
        document_ids = np.cumsum(is_start) - is_start[0]
        return as_row(input_ids, predicted, document_ids)


def as_row(input_ids: np.ndarray, predicted: np.ndarray, document_ids: np.ndarray) -> Row:
    """The tensors of one row, from arrays (S,)."""
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(np.where(predicted, input_ids, IGNORE_INDEX)),
        "document_ids": torch.from_numpy(document_ids.astype(np.int64)),
    }


def require_same(state: dict[str, int], here: dict[str, int]) -> None:
    """Check that a saved state names the same data as there is here.

    Raises:
        UserError: it does not; the message says in what they differ.
    """
    changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state[name] != here[name]]
    if changed:
        raise UserError(
            f"The data cannot be resumed where it was left: {', '.join(changed)}. "
            "Resume with the data, tokenizer, sequence length and seed the run was started with."
        )
