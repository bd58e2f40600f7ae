"""Records as tokenised documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from looplm.data.chat import ChatEncoder
from looplm.data.decontamination import Decontamination
from looplm.data.documents import is_held_out
from looplm.data.formats import Checked, Record, reader_of
from looplm.data.packing import TokenStream, token_dtype
from looplm.data.recipe import RecordSource
from looplm.data.tokenizer import boundary_token_ids, encode_plain
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_SIZE = 64
"""Records tokenised in one call: enough for the tokenizer's threads, few enough that their lists stay small."""


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """One document as tokens."""

    ids: np.ndarray
    """(num_tokens,), of `packing.token_dtype`."""
    predicted: np.ndarray | None
    """(num_tokens,) bool, what is to be predicted; None: everything (the first token never is)."""
    num_bytes: int
    """UTF-8 bytes of its text; of all messages in a conversation; 0 where it came as tokens."""


class Encoder:
    """Reads records in the format of their source and tokenises them.

    Args:
        source: names the format, the fields, and the part that is wanted.
        tokenizer: of the model.
        decontamination: drops documents; it counts them itself.

    Raises:
        UserError: the tokenizer lacks what the format needs (an end-of-text token, a chat template).
    """

    def __init__(
        self, source: RecordSource, tokenizer: "PreTrainedTokenizerBase", decontamination: Decontamination | None
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.decontamination = decontamination
        self.dtype = token_dtype(tokenizer)
        self._is_chat = is_chat(source)
        if self._is_chat:
            self._chat = ChatEncoder(tokenizer, responses_only=source.responses_only)
        elif source.format != "tokens":
            self._boundaries = boundary_token_ids(tokenizer)

    @property
    def masked(self) -> bool:
        """Whether its documents have a `predicted` of their own."""
        return self.source.format == "tokens" or (self.source.format != "text" and self.source.responses_only)

    def encode(self, records: Iterable[Record]) -> Iterator[EncodedDocument]:
        """Tokenise records in their order, a group at a time.

        Left out are empty texts, contaminated documents, and those of the other part.

        Raises:
            UserError: a record is not as its format says; the message names it.
        """
        remaining = iter(records)
        while group := list(islice(remaining, GROUP_SIZE)):
            yield from self.encode_group(group)

    def encode_group(self, group: Iterable[Record]) -> list[EncodedDocument]:
        """The documents of a few records; see `encode`."""
        kept = wanted(self.source, group)
        if self.decontamination is not None:
            kept = [item for item in kept if self.decontamination.keeps(item.text, item.where)]
        if not kept:
            return []
        return [
            EncodedDocument(np.array(ids, dtype=self.dtype), predicted, len(item.text.encode()))
            for item, (ids, predicted) in zip(kept, self._tokenize(kept), strict=True)
        ]

    def _tokenize(self, kept: list[Checked]) -> list[tuple[list[int], np.ndarray | None]]:
        if self.source.format == "tokens":
            return [self._within_vocabulary(item) for item in kept]
        if self._is_chat:
            encoded = self._chat.encode([(item.where, item.content) for item in kept])
            return [(ids, predicted if self.masked else None) for ids, predicted in encoded]
        start_id, end_id = self._boundaries
        if self.source.format == "text":
            return [
                ([start_id, *ids, end_id], None) for ids in encode_plain([item.text for item in kept], self.tokenizer)
            ]
        prompts = encode_plain([item.content[0] for item in kept], self.tokenizer)
        responses = encode_plain([item.content[1] for item in kept], self.tokenizer)
        documents: list[tuple[list[int], np.ndarray | None]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = [start_id, *prompt, *response, end_id]
            documents.append((ids, np.arange(len(ids)) > len(prompt) if self.masked else None))
        return documents

    def _within_vocabulary(self, item: Checked) -> tuple[list[int], np.ndarray]:
        ids, predicted = item.content
        if min(ids) < 0 or max(ids) >= len(self.tokenizer):
            raise UserError(
                f"{item.where}: token ids run from {min(ids)} to {max(ids)}; the vocabulary ends at "
                f"{len(self.tokenizer) - 1}."
            )
        return ids, predicted


def is_chat(source: RecordSource) -> bool:
    """Whether documents are rendered with the chat template, which then decides about their tokens."""
    return source.format == "chat" or (source.format == "instruction" and source.as_chat)


def wanted(source: RecordSource, records: Iterable[Record]) -> list[Checked]:
    """The records of the part that the source names, read and checked, without those that hold no text.

    Raises:
        UserError: a record is not as its format says; the message names it.
    """
    read = reader_of(source)
    checked = [
        read(record)
        for record in records
        if source.part == "all" or is_held_out(record.name) == (source.part == "held_out")
    ]
    return [item for item in checked if item.text or source.format == "tokens"]


def in_memory(documents: Iterable[EncodedDocument], dtype: type[np.unsignedinteger]) -> TokenStream:
    """The documents as one stream in memory; it may be empty."""
    kept = list(documents)
    lengths = np.array([len(document.ids) for document in kept], dtype=np.int64)
    masked = any(document.predicted is not None for document in kept)
    return TokenStream(
        ids=np.concatenate([np.empty(0, dtype=dtype), *(document.ids for document in kept)]),
        document_starts=np.cumsum(lengths) - lengths,
        num_text_bytes=sum(document.num_bytes for document in kept),
        predicted=np.concatenate([predicted_or_all(document) for document in kept]) if masked else None,
    )


def predicted_or_all(document: EncodedDocument) -> np.ndarray:
    """What is to be predicted, (num_tokens,) uint8, also where that is everything."""
    if document.predicted is None:
        return np.ones(len(document.ids), dtype=np.uint8)
    return document.predicted.astype(np.uint8)
