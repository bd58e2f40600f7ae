"""The user's files: what is accepted is read exactly, what is not is named by file and line."""

import re

import pytest

from looplm.data.documents import Document
from looplm.data.text_files import read_documents
from looplm.errors import UserError


def write(tmp_path, name: str, data: bytes):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_text_file_is_one_document(tmp_path):
    path = write(tmp_path, "notes.txt", "naïve 🙂\nsecond\x00line\n".encode())
    assert read_documents(path) == [Document("notes.txt", "naïve 🙂\nsecond\x00line\n")]
    assert read_documents(str(path)) == read_documents(path)


def test_byte_order_mark_and_newlines_are_normalised(tmp_path):
    path = write(tmp_path, "windows.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_documents(path) == [Document("windows.txt", "one\ntwo\nthree\n")]


def test_jsonl_is_one_document_a_line(tmp_path):
    data = b'\xef\xbb\xbf{"text": "one\\r\\ntwo", "id": 7}\r\n\r\n{"text": ""}\r\n{"text": "\\u00e9\\u2028"}'
    path = write(tmp_path, "data.jsonl", data)
    assert read_documents(path) == [Document("data.jsonl:1", "one\ntwo"), Document("data.jsonl:4", "é\u2028")]


def test_a_line_separator_inside_a_string_does_not_split_the_line(tmp_path):
    path = write(tmp_path, "data.jsonl", '{"text": "a\u2028b\u0085c"}\n'.encode())
    assert read_documents(path) == [Document("data.jsonl:1", "a\u2028b\u0085c")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\r\nfine\rfine\nb\xe9d", "a.txt, line 4: not UTF-8 (byte 0xe9"),
        ("a.txt", b"\xef\xbb\xbf\xff", "a.txt, line 1: not UTF-8 (byte 0xff"),
        ("a.txt", "two\n".encode("utf-16"), "a.txt, line 1: not UTF-8 (byte 0xff"),
        ("a.txt", b"cut \xf0\x9f", "a.txt, line 1: not UTF-8 (byte 0xf0"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "a.jsonl, line 2: not UTF-8"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b"\xef\xbb\xbf \n", "a.txt holds no text"),
        ("a.jsonl", b"\n\n", "a.jsonl holds no text"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl holds no text"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"\n', "a.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'["text"]\n', 'a.jsonl, line 1: expected an object, such as {"text": ...}, found a list'),
        ("a.jsonl", b'{"content": "x"}\n', 'a.jsonl, line 1: expected an object with a string under "text"'),
        ("a.jsonl", b'{"text": 3}\n', 'a.jsonl, line 1: expected an object with a string under "text"'),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "a.jsonl, line 1: the text holds half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, name, data, message):
    path = write(tmp_path, name, data)
    with pytest.raises(UserError, match=re.escape(message)):
        read_documents(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match="missing.txt cannot be read: No such file"):
        read_documents(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="cannot be read"):
        read_documents(tmp_path)
