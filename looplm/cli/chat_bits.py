"""What an answer of `looplm chat` comes in, from a checkpoint as from a server."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from looplm.serving.schema import ChatRequest

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10, 13)}
"""Characters that a terminal would take for commands, and how they are shown."""


class Bit(NamedTuple):
    """A piece of an answer, and the loops its tokens left at."""

    text: str
    loops: list[int]


Reply = Callable[["ChatRequest"], Iterator[Bit]]
"""Answers a conversation. Raises UserError when it cannot be answered."""


def visible(text: str) -> str:
    """`text` with control characters spelled out."""
    return text.translate(CONTROLS)
