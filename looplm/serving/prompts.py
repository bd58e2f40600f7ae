"""From texts and messages to token ids, with a tokenizer that only this side uses."""

import copy
from collections.abc import Sequence
from typing import Any

from looplm.errors import UserError
from looplm.inference.engine import Engine
from looplm.inference.prompts import part_token_ids, read_prompt
from looplm.inference.sampling import SamplingParams, check_text
from looplm.serving.schema import DEFAULT_CHAT_TOKENS, DEFAULT_TOKENS, ChatRequest, CompletionRequest


class PromptReader:
    """Reads prompts as `engine` would. Has a copy of its tokenizer: one tokenizer must not be used by two threads."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer: Any = copy.deepcopy(engine.tokenizer)
        self._vocab_size, self._max_len = engine.model.model.config.vocab_size, engine.max_len
        self._most_characters = self._max_len * max(map(len, self.tokenizer.get_vocab()))

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    def check_size(self, prompt: str | Sequence[int]) -> None:
        """Raises UserError for a prompt that is too long whatever its tokens are: reading it would hold up others."""
        most = self._most_characters if isinstance(prompt, str) else self._max_len
        if len(prompt) > most:
            kind = "characters" if isinstance(prompt, str) else "tokens"
            raise UserError(
                f"The prompt has {len(prompt)} {kind}; the {self._max_len} positions of the context cannot hold more "
                f"than {most}. Shorten the prompt."
            )

    def completion(self, body: CompletionRequest) -> list[tuple[list[int], SamplingParams]]:
        """Every prompt with how it is continued. Raises UserError for one that cannot be."""
        read: list[tuple[list[int], SamplingParams]] = []
        for index, prompt in enumerate(body.prompts):
            try:
                if body.max_tokens == 0:  # it is given back, and nothing follows it
                    read.append((self.token_ids(prompt), self._sampling(body, 1)))
                    continue
                token_ids = part_token_ids(prompt, self.tokenizer, first=True)
                read.append(self._checked(body, token_ids, body.max_tokens, DEFAULT_TOKENS))
            except UserError as error:
                raise UserError(f"Prompt {index}: {error}" if len(body.prompts) > 1 else str(error)) from None
        return read

    def chat(self, body: ChatRequest) -> tuple[list[int], SamplingParams]:
        """The conversation, with the beginning of an answer. Raises UserError when the template refuses it."""
        from jinja2 import TemplateError

        messages = [message.plain() for message in body.messages]
        self.check_size("".join(message["content"] for message in messages))
        for number, message in enumerate(messages):
            check_text(f"messages.{number}.content", message["content"])
        if not self.can_chat:
            raise UserError("This checkpoint has no chat template, so it cannot chat; use /v1/completions.")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"The chat template refuses this conversation ({error}).") from None
        # Special tokens are spelled out by the template.
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self._checked(body, token_ids, body.max_completion_tokens or body.max_tokens, DEFAULT_CHAT_TOKENS)

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        """A text to look at, which may fill the whole context. Raises UserError when it is empty or too long."""
        token_ids = part_token_ids(prompt, self.tokenizer, first=True)
        if len(token_ids) > self._max_len:
            raise UserError(f"The text has {len(token_ids)} tokens, more than the {self._max_len} of the context.")
        if not token_ids or not all(0 <= token < self._vocab_size for token in token_ids):
            raise UserError(f"Give at least one token; token ids go from 0 to {self._vocab_size - 1}.")
        return token_ids

    def _checked(
        self, body: CompletionRequest | ChatRequest, token_ids: list[int], max_tokens: int | None, default: int
    ) -> tuple[list[int], SamplingParams]:
        if max_tokens is None:
            max_tokens = min(default, self._max_len - len(token_ids))
            if max_tokens < 1:
                raise UserError(
                    f"The prompt has {len(token_ids)} tokens; with one to write that is more than the "
                    f"{self._max_len} positions of the context. Shorten the prompt."
                )
        sampling = self._sampling(body, max_tokens)
        read_prompt(token_ids, sampling, self.tokenizer, self._vocab_size, self._max_len)
        return token_ids, sampling

    def _sampling(self, body: CompletionRequest | ChatRequest, max_tokens: int) -> SamplingParams:
        """How it is continued. Raises UserError for end tokens that there are not."""
        sampling = body.sampling(max_tokens)
        for token in sampling.stop_token_ids:
            if not 0 <= token < self._vocab_size:
                raise UserError(f"stop_token_ids has {token}; token ids go from 0 to {self._vocab_size - 1}.")
        return sampling
