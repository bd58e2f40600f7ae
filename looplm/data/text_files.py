"""The user's own text: plain files and jsonl, checked line by line so that an error says where to look."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looplm.data.documents import Document
from looplm.errors import UserError


def read_documents(path: Path | str) -> list[Document]:
    """Read one file: a `.jsonl` file as one document a line, any other as one document.

    UTF-8, with or without a byte-order mark; CRLF and CR become LF. A line of jsonl is an object whose "text" is a
    string; blank lines and empty texts are skipped. Documents are named by the file's name, and in jsonl by
    `name:line`.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or holds no text, or a line of jsonl is not as described.
            The message names the file, and the line where there is one.
    """
    path = Path(path)
    documents = list(_documents(path))
    if not any(document.text.strip() for document in documents):
        raise UserError(f"{path} holds no text. Give a file with something to read in it.")
    return documents


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        yield Document(path.name, read_text(path))
        return
    for number, record in read_jsonl(path):
        text = checked_text(record, "text", where=f"{path}, line {number}")
        if text:
            yield Document(f"{path.name}:{number}", text)


def read_text(path: Path) -> str:
    """The text of one file, without its byte-order mark and with unified newlines.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` is what was decoded: the data without its byte-order mark, which `error.start` does not count.
        line = len(unify_newlines(error.object[: error.start].decode("utf-8")).split("\n"))
        raise _undecodable(path, line, error) from error
    return unify_newlines(text)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a jsonl file with their line numbers, from 1, one line in memory at a time.

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8 or not one JSON object.
    """
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: malformed, or a number beyond Python's digit limit
            raise UserError(
                f"{path}, line {number}: not valid JSON ({error}). Every line must be one JSON object."
            ) from error
        if not isinstance(record, dict):
            raise UserError(
                f'{path}, line {number}: expected an object, such as {{"text": ...}}, found {_kind(record)}.'
            )
        yield number, record


def checked_text(record: Mapping[str, Any], field: str, where: str) -> str:
    """The string under `field`, its newlines unified.

    Raises:
        UserError: there is no such field (the message names those there are), or it is not a string of Unicode.
    """
    if field not in record:
        there = ", ".join(repr(name) for name in record) or "none"
        raise UserError(f'{where}: expected an object with a string under "{field}"; its fields are: {there}.')
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f'{where}: expected an object with a string under "{field}", found {_kind(text)} there.')
    return unify_newlines(checked_unicode(text, where))


def checked_unicode(text: str, where: str) -> str:
    """The text itself.

    Raises:
        UserError: it holds half of a surrogate pair, which JSON can spell and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds half of a surrogate pair, which is not valid Unicode.") from error
    return text


def unify_newlines(text: str) -> str:
    """CRLF and CR as LF."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines as universal newlines cut them; not by Python's text mode, whose decoding errors know no line."""
    number = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                if number == 0:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                for line in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                    number += 1
                    try:
                        yield number, line.decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise _undecodable(path, number, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}. Give the path of a text or jsonl file.")


def _undecodable(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    return UserError(
        f"{path}, line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}). "
        "Convert the file to UTF-8."
    )


def _kind(value: object) -> str:
    """What a JSON value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
