"""The offline default corpus: the text that every Python installation carries.

It is the standard library's own source (`*.py`), the language reference behind `help()` (`pydoc_data.topics`, prose,
one document a topic) and the licence with Python's history. About 10 MB in Python 3.11: enough to train a toy model,
with no network and no file that is not there already.

Left out, because it would teach a model to count or would leak from train to held-out:

- tests, and whatever is not a module of `sys.stdlib_module_names` (site-packages, the build's `_sysconfigdata`, which
  holds the paths of one machine, and local customisation);
- `encodings`: 120 files, nearly all generated code page tables or the same forty lines under another name;
- fragments under 500 bytes, mostly empty `__init__.py`;
- copies: a document four tenths of whose text stands, line for line, in longer documents. Most are topics that
  another topic includes whole, besides a few forks (`lib2to3/pgen2/tokenize.py`, `sunau.py`).

What is in it differs between Python versions; which part of the split a document belongs to does not.
"""

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from looplm.data.documents import HELD_OUT_FRACTION, Document, hash_fraction, is_held_out
from looplm.errors import UserError

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_TOPICS_FILE = "pydoc_data/topics.py"
_MIN_BYTES = 500
_MIN_LINE_CHARS = 20  # shorter lines ("return None") recur everywhere and say nothing about copying
_MAX_COPIED_FRACTION = 0.4


@dataclass(frozen=True, slots=True)
class StdlibText:
    """The corpus, ordered by name, and how many files and topics were left out for which reason."""

    documents: list[Document]
    num_undecodable: int
    num_fragments: int
    num_copies: int

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents together."""
        return sum(document.num_bytes for document in self.documents)


def load_stdlib_text(max_bytes: int | None = None) -> StdlibText:
    """Read the standard library of the running Python, as the module's docstring describes.

    Args:
        max_bytes: keep no more than this many bytes: a sample of the documents, drawn by the hash of their names, the
            same on every call, with a twentieth of the bytes for the held-out part as in the whole. None keeps all.

    Raises:
        UserError: this Python carries no source (a zipped or stripped installation), or `max_bytes` is too small for
            a single document.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = _source_paths(root)
    if not paths:
        raise UserError(
            f"This Python carries no source of its standard library: no usable .py file under {root}. "
            "The default corpus is that source; give text of your own, or use an ordinary Python installation."
        )
    decoded, num_undecodable = [], 0
    for path in paths:
        try:
            decoded.extend(_read_documents(path, path.relative_to(root).as_posix()))
        except UnicodeDecodeError:
            num_undecodable += 1
    whole = [document for document in decoded if document.num_bytes >= _MIN_BYTES]
    distinct = _drop_copies(whole)
    return StdlibText(
        documents=sorted(_sample(distinct, max_bytes), key=lambda document: document.name),
        num_undecodable=num_undecodable,
        num_fragments=len(decoded) - len(whole),
        num_copies=len(whole) - len(distinct),
    )


def _source_paths(root: Path) -> list[Path]:
    """The files to read: modules of the standard library outside its tests, then the licence where there is one."""
    modules = sys.stdlib_module_names - {"encodings"}
    paths = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0].removesuffix(".py") in modules and _SKIPPED_FOLDERS.isdisjoint(parts):
            paths.append(path)
    return sorted(paths) + sorted(root.glob("LICENSE.txt"))


def _read_documents(path: Path, name: str) -> Iterator[Document]:
    """The document in one file, or the many topics in the file of topics; universal newlines become a line feed."""
    if name == _TOPICS_FILE:
        from pydoc_data.topics import topics

        for topic, text in topics.items():
            yield Document(f"pydoc_data/topics/{topic}", text)
    else:
        yield Document(name, path.read_text(encoding="utf-8"))


def _drop_copies(documents: Iterable[Document]) -> list[Document]:
    """Drop what longer documents hold already; `documents` in any order, the result from long to short."""
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=lambda document: (-len(document.text), document.name)):
        lines = [line for line in map(str.strip, document.text.splitlines()) if len(line) >= _MIN_LINE_CHARS]
        num_copied_chars = sum(len(line) for line in lines if line in seen)
        if num_copied_chars <= _MAX_COPIED_FRACTION * sum(map(len, lines)):
            seen.update(lines)
            kept.append(document)
    return kept


def _sample(documents: list[Document], max_bytes: int | None) -> list[Document]:
    """Documents in the order of their names' hashes, as many as fit into each part's share of `max_bytes`."""
    if max_bytes is None:
        return documents
    num_bytes_left = {True: HELD_OUT_FRACTION * max_bytes, False: (1 - HELD_OUT_FRACTION) * max_bytes}
    sample = []
    for document in sorted(documents, key=lambda document: hash_fraction(document.name, salt="sample")):
        held_out = is_held_out(document.name)
        if document.num_bytes <= num_bytes_left[held_out]:
            sample.append(document)
            num_bytes_left[held_out] -= document.num_bytes
    if not sample:
        raise UserError(f"max_bytes = {max_bytes} is too small: no document of the standard library fits into it.")
    return sample
