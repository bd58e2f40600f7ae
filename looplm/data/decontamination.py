"""Leaving out documents that repeat what a model will be tested on."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from looplm.errors import UserError

_WORD = re.compile(r"\w+")
_MAX_NAMED = 20


def normalised_words(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


class Decontamination:
    """Tells documents that share `ngram` words in a row with a reference text (Brown et al. 2020, appendix C).

    Args:
        references: the texts that must not be trained on. One with fewer words than `ngram` counts as a run of its
            own length, if it has at least `ngram` / 2; shorter ones would match by chance, and are not checked.
        ngram: words in a row, after `normalised_words`.

    Raises:
        UserError: no reference is long enough to be checked.
    """

    def __init__(self, references: Iterable[str], ngram: int) -> None:
        self.num_dropped = 0
        self.dropped: list[str] = []
        """Where the first few dropped documents are from."""
        self.num_unchecked = 0
        """Reference texts too short to be checked."""
        self._runs: dict[int, set[str]] = {}
        for text in references:
            words = normalised_words(text)
            length = min(ngram, len(words))
            if 2 * length < ngram or not words:
                self.num_unchecked += 1
                continue
            self._runs.setdefault(length, set()).update(_runs(words, length))
        if not self._runs:
            raise UserError(
                f"decontaminate: no text in the files of `against` has the {-(-ngram // 2)} words that a match needs."
            )

    def is_contaminated(self, text: str) -> bool:
        """Whether `text` shares a run of words with a reference."""
        words = normalised_words(text)
        return any(not runs.isdisjoint(_runs(words, length)) for length, runs in self._runs.items())

    def keeps(self, text: str, where: str) -> bool:
        """Whether `text` may be trained on; counts and names it if not."""
        if not self.is_contaminated(text):
            return True
        self.num_dropped += 1
        if len(self.dropped) < _MAX_NAMED:
            self.dropped.append(where)
        return False


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[first : first + length]) for first in range(len(words) - length + 1))
