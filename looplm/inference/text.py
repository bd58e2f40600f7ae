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

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself puts around one."""
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
    because the first decoded character may be cut.
    """
    reach = max(len(string.encode()) for string in stop) + 4
    tail = tokenizer.decode(list(token_ids[-reach:]), skip_special_tokens=True)
    return any(string in tail for string in stop)


def final_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text of all tokens but special ones, cut before the earliest of `stop`."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
