"""The user's own text: plain files and jsonl, checked line by line so that an error says where to look."""

import json
from pathlib import Path

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
    text = _decode(path)
    documents = _parse_jsonl(path, text) if path.suffix == ".jsonl" else [Document(path.name, text)]
    if not any(document.text.strip() for document in documents):
        raise UserError(f"{path} holds no text. Give a file with something to read in it.")
    return documents


def _decode(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give the path of a text or jsonl file.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` is what was decoded: the data without its byte-order mark, which `error.start` does not count.
        line = len(_unify_newlines(error.object[: error.start].decode("utf-8")).split("\n"))
        raise UserError(
            f"{path}, line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}). "
            "Convert the file to UTF-8."
        ) from error
    return _unify_newlines(text)


def _unify_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse_jsonl(path: Path, text: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            document = Document(f"{path.name}:{number}", _text_of_record(line, where=f"{path}, line {number}"))
            if document.text:
                documents.append(document)
    return documents


def _text_of_record(line: str, where: str) -> str:
    """The "text" of one line of jsonl, its newlines unified too."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: malformed, or a number beyond Python's digit limit
        raise UserError(f"{where}: not valid JSON ({error}). Every line must be one JSON object.") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise UserError(f'{where}: expected an object with a string under "text".')
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds half of a surrogate pair, which is not valid Unicode.") from error
    return _unify_newlines(record["text"])
