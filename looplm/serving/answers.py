"""What comes back: choices, log-probabilities and usage in OpenAI's form, with depths where asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from looplm.inference.results import GenerationResult
from looplm.inference.text import REPLACEMENT, Tokenizer, token_texts
from looplm.serving.loops import finite
from looplm.serving.worker import Alternatives, EngineFailed, Finished


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Some tokens in a row, with what is known of them."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[float | None]
    """None for the first token of a prompt, which nothing predicts."""
    alternatives: list[Alternatives]
    """For every token; empty where none were asked for."""

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(
            texts=self.texts + other.texts,
            token_ids=self.token_ids + other.token_ids,
            logprobs=self.logprobs + other.logprobs,
            alternatives=self.alternatives + other.alternatives,
        )


def finish_reason(result: GenerationResult) -> str:
    """OpenAI's word for it. Raises EngineFailed for a text that was not finished."""
    if result.finish_reason in ("stop", "length"):
        return result.finish_reason
    raise EngineFailed(result.error or f"The text was ended before it was complete ({result.finish_reason}).")


def decode_token_loops(result: GenerationResult) -> int:
    """Positions times loops computed in decoding, drafts that did not stand included. The first token is read out of
    the prompt, which is apart."""
    return sum(result.token_loops[1:]) + result.rejected_token_loops


def usage(prompts: Sequence[Sequence[int]], finished: Sequence[Finished]) -> dict[str, Any]:
    """Tokens, and the loops they took, as `/metrics` counts them: `token_loops` computed in decoding, drafts that did
    not stand included, and `claimed_loops`, the sum of the depths of the generated tokens."""
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    completion_tokens = sum(len(one.result.token_ids) for one in finished)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "token_loops": sum(decode_token_loops(one.result) for one in finished),
        "claimed_loops": sum(sum(one.result.loops) for one in finished),
    }


def depths(finished: Finished) -> dict[str, Any]:
    """What `return_depths` adds to a choice."""
    result = finished.result
    return {
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "loops": result.loops,
        "token_loops": result.token_loops,
        "weight_passes": finished.weight_passes,
        "rejected_token_loops": result.rejected_token_loops,
    }


# --- Log-probabilities ----------------------------------------------------------------------------------------------


def scored(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: Sequence[float | None], alternatives: list[Alternatives]
) -> Scored:
    """All tokens of a finished text."""
    texts = token_texts(tokenizer, token_ids)
    return Scored(texts=texts, token_ids=token_ids, logprobs=list(logprobs), alternatives=alternatives)


def completion_logprobs(tokenizer: Tokenizer, given: Scored, offset: int) -> dict[str, Any]:
    """As `/v1/completions` writes them; `offset`: characters of text before the first token."""
    offsets: list[int] = []
    for text in given.texts:
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float] | None] | None = None
    if given.alternatives:
        top = [None if logprob is None else _top_of(tokenizer, given, i) for i, logprob in enumerate(given.logprobs)]
    return {
        "tokens": given.texts,
        "token_logprobs": [None if logprob is None else finite(logprob) for logprob in given.logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _top_of(tokenizer: Tokenizer, given: Scored, i: int) -> dict[str, float]:
    """Alternatives by text, the chosen token among them. Of two with one text the likelier stands."""
    top: dict[str, float] = {}
    for text, logprob in _alternatives(tokenizer, given, i):
        top.setdefault(text, logprob)
    chosen = given.logprobs[i]
    assert chosen is not None
    top.setdefault(given.texts[i], finite(chosen))
    return top


def _alternatives(tokenizer: Tokenizer, given: Scored, i: int) -> list[tuple[str, float]]:
    chosen = given.token_ids[i]
    return [
        (given.texts[i] if token == chosen else tokenizer.decode([token]), finite(logprob))
        for token, logprob in given.alternatives[i]
    ]


def chat_logprobs(tokenizer: Tokenizer, given: Scored) -> dict[str, Any]:
    """As `/v1/chat/completions` writes them."""
    content = []
    for i, (text, logprob) in enumerate(zip(given.texts, given.logprobs, strict=True)):
        assert logprob is not None
        others = _alternatives(tokenizer, given, i) if given.alternatives else []
        top = [{"token": other, "logprob": value, "bytes": list(other.encode())} for other, value in others]
        entry = {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()), "top_logprobs": top}
        content.append(entry)
    return {"content": content, "refusal": None}


class TokenTexts:
    """The text of each token while they come in; all join to what `token_texts` gives of the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._run: list[int] = []
        """The last tokens, from one whose text is out and complete."""

    def add(self, token_ids: list[int]) -> list[str]:
        """The texts of the next tokens; a character made of several tokens comes with the last of them."""
        self._run += token_ids
        pieces = token_texts(self.tokenizer, self._run)
        if pieces and pieces[-1].endswith(REPLACEMENT):
            pieces[-1] = ""
        new = pieces[len(pieces) - len(token_ids) :]
        complete = [i for i, piece in enumerate(pieces) if piece]
        self._run = self._run[complete[-1] :] if complete else self._run
        return new


# --- The two forms --------------------------------------------------------------------------------------------------


class CompletionForm:
    """`/v1/completions`."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def choice(self, index: int, text: str, tokens: Scored | None, finish: str | None, offset: int) -> dict[str, Any]:
        """A choice, whole or a piece; `offset`: characters of it that are out before `tokens`."""
        logprobs = None if tokens is None else completion_logprobs(self.tokenizer, tokens, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    chunk = choice

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with: nothing."""
        return None


class ChatForm:
    """`/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def choice(self, index: int, text: str, tokens: Scored | None, finish: str | None, offset: int) -> dict[str, Any]:
        """A whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def chunk(self, index: int, text: str, tokens: Scored | None, finish: str | None, offset: int) -> dict[str, Any]:
        """A piece of an answer."""
        delta = {"content": text} if text or finish is None else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Scored | None) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(self.tokenizer, tokens)


Form = CompletionForm | ChatForm


# --- Streams --------------------------------------------------------------------------------------------------------


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""Ends a stream."""
