"""Between token ids and text: what is needed of a tokenizer, which tokens end a text, and the text of each token."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

END_OF_TURN = "<|im_end|>"
"""Ends a chat turn in Ouro and SmolLM2, whose base configs do not list it as an end token."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; any of transformers' has it.

    That is, beside what stands here, `eos_token_id`, the end-of-text token or None: transformers makes the attribute
    as it is asked for, so that a type checker does not see it.
    """

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Id -> added token, with its `content` and whether it is `special`."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with or without the special tokens that the tokenizer itself puts around one."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        """Text of some ids."""
        ...


def end_token_ids(tokenizer: Any) -> set[int]:
    """Tokens after which a text is complete: end of text, and end of turn where it is a special token."""
    ends = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content == END_OF_TURN and token.special}
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; the pieces join to the whole. A character made of several tokens comes with
    the last of them. Special tokens are shown.

    Decoding token by token would lose spaces and split characters, so each piece is the difference between two
    decodings of a short run of tokens.
    """
    pieces: list[str] = []
    start = done = 0  # the run begins at `start`; the text of tokens before `done` is out
    for end in range(1, len(token_ids) + 1):
        before = tokenizer.decode(list(token_ids[start:done]))
        text = tokenizer.decode(list(token_ids[start:end]))
        if text.endswith(REPLACEMENT) and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces


def find_stop(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether one of `stop` stands in the text of the last tokens, so that the newest one may have completed it.

    A token adds at least a byte, so only as many tokens as the longest string has bytes are decoded, and a few more
    because the first decoded character may be cut; and more where special tokens, which are not shown, lie between.
    """
    reach = needed = max(len(string.encode()) for string in stop) + 4
    tail = tokenizer.decode(list(token_ids[-reach:]), skip_special_tokens=True)
    while len(tail.encode()) < needed and reach < len(token_ids):
        reach *= 2
        tail = tokenizer.decode(list(token_ids[-reach:]), skip_special_tokens=True)
    return any(string in tail for string in stop)


def final_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text of all tokens but special ones, cut before the earliest of `stop`."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


class TextStream:
    """The text of a growing list of tokens, in pieces that are never taken back.

    What may be part of a stop string waits until it is none, and a character made of several tokens comes with the
    last of them. Special tokens are not shown. All pieces join to :func:`final_text`.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.token_ids: list[int] = []
        self.start = self.done = 0  # as in token_texts
        self.held = ""
        self.ended = False

    def add(self, token_id: int, *, last: bool = False) -> str:
        """Takes the next token; returns what can be shown now. `last`: nothing will follow."""
        self.token_ids.append(token_id)
        before = self._decode(self.start, self.done)
        text = self._decode(self.start, len(self.token_ids))
        if text.endswith(REPLACEMENT) and not last:
            return ""
        self.start, self.done = self.done, len(self.token_ids)
        return self._show(text[len(before) :], last)

    def finish(self) -> str:
        """What was held back, once nothing will follow."""
        before = self._decode(self.start, self.done)
        rest = self._decode(self.start, len(self.token_ids))[len(before) :]
        self.done = len(self.token_ids)
        return self._show(rest, True)

    def _show(self, text: str, last: bool) -> str:
        if self.ended:
            return ""
        text = self.held + text
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            self.ended, self.held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, string) for string in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self.token_ids[start:stop], skip_special_tokens=True)


def _overlap(text: str, string: str) -> int:
    """Characters at the end of `text` that `string` begins with."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string.startswith(text[-n:])), 0)
