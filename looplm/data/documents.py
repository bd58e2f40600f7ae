"""A named text, and the division of many of them into a train and a held-out part."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from looplm.errors import UserError

HELD_OUT_FRACTION = 0.05

# Any salt gives a fair split; this one was picked so that the standard library's held-out part is balanced in bytes
# and holds no module whose text has moved between files since Python 3.11 (tests/data/test_stdlib_text.py).
_SPLIT_SALT = "looplm-3936"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the name that identifies it, alike on every machine (a relative path, not an absolute one)."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8, the unit in which bits per byte are counted."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class DocumentSplit:
    """The two parts of a corpus, each in the order of the documents they came from."""

    train: list[Document]
    held_out: list[Document]


def hash_fraction(name: str, salt: str) -> float:
    """A number in [0, 1) that depends on `name` and `salt` only, the same in every process and Python version."""
    digest = hashlib.sha256(f"{salt}/{name}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def is_held_out(name: str) -> bool:
    """Whether the document of this name belongs to the held-out part (about 5 % of all names do).

    The name alone decides, never the text or the other documents: a model trained on one version of a corpus has not
    seen a document held out in another.
    """
    return hash_fraction(name, _SPLIT_SALT) < HELD_OUT_FRACTION


def split_documents(documents: Sequence[Document]) -> DocumentSplit:
    """Divide documents by `is_held_out` of their names.

    Raises:
        UserError: one of the two parts would be empty, as happens with a handful of documents.
    """
    split = DocumentSplit(
        train=[document for document in documents if not is_held_out(document.name)],
        held_out=[document for document in documents if is_held_out(document.name)],
    )
    if not split.train or not split.held_out:
        raise UserError(
            f"{len(documents)} documents are too few to hold some out: {len(split.train)} fall to training and "
            f"{len(split.held_out)} to the held-out part, which takes about one document in "
            f"{round(1 / HELD_OUT_FRACTION)} by its name. Give more documents, or a held-out file of their own."
        )
    return split
