"""Conversations as tokens: the tokenizer's own chat template, and which tokens a model learns to say.

With a template that marks its responses (`{% generation %}`), its marks decide. With any other, the conversation is
rendered up to each response and up to its end; what lies between is the response. That needs a template that renders
the beginning of a conversation as the beginning of the whole, which is checked for every conversation.

A response ends with its end-of-turn token: the model must learn to stop. What a template writes after that token (in
ChatML a line break) is never the model's to say, and is not predicted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from looplm.data.text_files import checked_unicode
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""

_ROLES = ("system", "user", "assistant")
_MARKS_RESPONSES = re.compile(r"\{%-?\s*generation\s*-?%\}")


def checked_messages(value: object, where: str, *, needs_response: bool) -> list[Message]:
    """The messages of one conversation.

    Raises:
        UserError: they are not a list of objects with a known role and a string as content, or hold no response
            although `needs_response`.
    """
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: expected a list of messages that is not empty, found {type(value).__name__}.")
    messages = [_checked_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]
    if needs_response and not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: no message of the role assistant, so there is nothing to learn from it.")
    return messages


def _checked_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: expected an object with role and content, found {type(message).__name__}.")
    if "role" not in message or "content" not in message:
        raise UserError(f"{where}: expected the fields role and content, found {', '.join(map(str, message))}.")
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise UserError(f"{where}: unknown role {role!r}; it must be one of {', '.join(_ROLES)}.")
    if message.get("tool_calls"):
        raise UserError(f"{where}: tool calls are not supported; leave such conversations out.")
    if not isinstance(content, str):
        raise UserError(f"{where}: content must be a string, found {type(content).__name__}.")
    return {"role": role, "content": checked_unicode(content, where)}


class ChatEncoder:
    """Turns conversations into token ids and marks what is to be predicted.

    Args:
        tokenizer: with a chat template.
        responses_only: mark the responses; False marks everything.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, responses_only: bool) -> None:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                "The tokenizer has no chat template, so conversations cannot be rendered. Give one that has "
                "(`chat_template.jinja` beside tokenizer.json), or use format: text."
            ) from error
        self.tokenizer = tokenizer
        self.responses_only = responses_only
        self._marks_responses = _MARKS_RESPONSES.search(template) is not None
        self._special_ids = {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)

    def encode(self, conversations: Sequence[tuple[str, list[Message]]]) -> list[tuple[list[int], np.ndarray]]:
        """Token ids of each conversation, and a mask of those to predict, (num_tokens,) bool.

        Args:
            conversations: where each is from (for messages), and its messages.

        Raises:
            UserError: the template refuses a conversation, or does not let its responses be told from the rest.
        """
        if not self.responses_only:
            texts = [self._render(messages, where) for where, messages in conversations]
            return [(ids, np.ones(len(ids), dtype=bool)) for ids in self._tokenize(texts)]
        if self._marks_responses:
            return [self._encode_marked(messages, where) for where, messages in conversations]
        return self._encode_by_prefixes(conversations)

    def _encode_marked(self, messages: list[Message], where: str) -> tuple[list[int], np.ndarray]:
        encoding = self._apply_template(
            messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = encoding["input_ids"]
        marks = np.array(encoding["assistant_masks"], dtype=bool)
        edges = np.flatnonzero(np.diff(marks, prepend=False, append=False)).tolist()
        predicted = np.zeros(len(ids), dtype=bool)
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            stop = self._end_of_turn(ids, start, end)
            if ids[stop - 1] not in self._special_ids and stop < len(ids) and ids[stop] in self._special_ids:
                stop += 1  # a template may end its mark before the end-of-turn token
            predicted[start:stop] = True
        return ids, predicted

    def _encode_by_prefixes(
        self, conversations: Sequence[tuple[str, list[Message]]]
    ) -> list[tuple[list[int], np.ndarray]]:
        """Tokenised in segments, cut at the responses: so is a prompt in generation, and no token can span a cut."""
        segmented = [self._segments(messages, where) for where, messages in conversations]
        whole = self._tokenize(["".join(segments) for segments in segmented])
        pieces = iter(self._tokenize([segment for segments in segmented for segment in segments]))
        encoded = []
        for (where, _), segments, whole_ids in zip(conversations, segmented, whole, strict=True):
            ids: list[int] = []
            spans = []
            for number in range(len(segments)):
                piece = next(pieces)
                if number % 2 == 1:
                    spans.append((len(ids), len(ids) + len(piece)))
                ids += piece
            if ids != whole_ids and self.tokenizer.decode(ids) != self.tokenizer.decode(whole_ids):
                raise UserError(
                    f"{where}: this tokenizer cannot tokenise a conversation in parts, so its responses cannot be "
                    "told from the rest token by token. Use a chat template with {% generation %} marks."
                )
            predicted = np.zeros(len(ids), dtype=bool)
            for start, end in spans:
                predicted[start : self._end_of_turn(ids, start, end)] = True
            encoded.append((ids, predicted))
        return encoded

    def _segments(self, messages: list[Message], where: str) -> list[str]:
        """The rendered conversation in segments; those at odd places are the responses."""
        text = self._render(messages, where)
        segments, done = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], where, add_generation_prompt=True)
            answered = self._render(messages[: number + 1], where)
            if not (text.startswith(answered) and answered.startswith(prompt) and len(prompt) >= done):
                raise UserError(
                    f"{where}: the chat template renders the beginning of this conversation differently when more "
                    f"follows (message {number + 1}), so its responses cannot be found. Use a template with "
                    "{% generation %} marks, or responses_only: false."
                )
            segments += [text[done : len(prompt)], text[len(prompt) : len(answered)]]
            done = len(answered)
        return [*segments, text[done:]]

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        """Where the response in ids[start:end] ends: after its last special token, if only space follows that."""
        for last in range(end - 1, start - 1, -1):
            if ids[last] in self._special_ids:
                tail = "".join(self.tokenizer.decode(ids[last + 1 : end]))
                return last + 1 if not tail.strip() else end
        return end

    def _render(self, messages: list[Message], where: str, *, add_generation_prompt: bool = False) -> str:
        return self._apply_template(messages, where, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply_template(self, messages: list[Message], where: str, **arguments: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"{where}: the chat template refuses this conversation ({error}).") from error

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Special tokens are read as such: the template spells them out."""
        encoding = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoding["input_ids"]
