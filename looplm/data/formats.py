"""Records as their format reads them: texts, conversations, instructions, token ids; each checked, none tokenised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from looplm.data.chat import Message, checked_messages
from looplm.data.packing import IGNORE_INDEX
from looplm.data.recipe import RecordSource
from looplm.data.text_files import checked_text
from looplm.errors import UserError


@dataclass(frozen=True, slots=True)
class Record:
    """One record as a source gives it."""

    name: str
    """Identifies the record alike on every machine; decides on which side of the held-out split it falls."""
    where: str
    """What to call it in an error: file and line, or source and number."""
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """One record as its format reads it."""

    name: str
    where: str
    content: Any
    """text: str. chat: list[Message]. instruction: the same, or (prompt, response). tokens: (ids, predicted)."""
    text: str
    """All its text; of a conversation the contents, one under another; empty for tokens."""


def reader_of(source: RecordSource) -> Callable[[Record], Checked]:
    """The function that reads records of this source.

    It raises UserError, naming the record, where one is not as the format says.
    """

    def read_text(record: Record) -> Checked:
        text = checked_text(record.fields, source.text_field, record.where)
        return Checked(record.name, record.where, text, text)

    def read_chat(record: Record) -> Checked:
        if source.messages_field not in record.fields:
            raise UserError(
                f'{record.where}: no field "{source.messages_field}"; its fields are: {_names(record.fields)}.'
            )
        value = record.fields[source.messages_field]
        messages = checked_messages(value, record.where, needs_response=source.responses_only)
        return Checked(record.name, record.where, messages, "\n".join(message["content"] for message in messages))

    def read_instruction(record: Record) -> Checked:
        prompt = checked_text(record.fields, source.prompt_field, record.where)
        response = checked_text(record.fields, source.response_field, record.where)
        if not source.as_chat:
            return Checked(record.name, record.where, (prompt, response), prompt + response)
        messages: list[Message] = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": response},
        ]
        return Checked(record.name, record.where, messages, f"{prompt}\n{response}")

    readers = {"text": read_text, "chat": read_chat, "instruction": read_instruction, "tokens": _read_tokens}
    return readers[source.format]


def _read_tokens(record: Record) -> Checked:
    if set(record.fields) != {"input_ids", "labels"}:
        raise UserError(
            f"{record.where}: format tokens needs exactly input_ids and labels, found: {_names(record.fields)}."
        )
    ids, labels = (_flat_integers(record, field) for field in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise UserError(f"{record.where}: {len(ids)} input_ids and {len(labels)} labels; each token needs its label.")
    predicted = labels != IGNORE_INDEX
    if not np.array_equal(labels[predicted], ids[predicted]):
        raise UserError(
            f"{record.where}: every label must be the token at its own place, or {IGNORE_INDEX}; "
            "the model shifts them itself."
        )
    if not predicted[1:].any():
        raise UserError(f"{record.where}: nothing is to be predicted; the first token never is.")
    return Checked(record.name, record.where, (ids.tolist(), predicted), "")


def _flat_integers(record: Record, field: str) -> np.ndarray:
    try:
        values = np.asarray(record.fields[field])
    except ValueError:  # lists of different lengths within
        values = np.empty((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise UserError(f"{record.where}: {field} must be a flat list of token ids that is not empty.")
    return values


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in fields) or "none"
