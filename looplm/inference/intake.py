"""From what a user asks for to requests: all that can be wrong with it is found here, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from looplm.errors import UserError
from looplm.inference.capacity import DoesNotFit, check_fits
from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.prompts import Prompt, check_length, listed, one_for_each, prompt_parts
from looplm.inference.request import Family, Request
from looplm.inference.sampling import SamplingParams, make_generator
from looplm.inference.screening import Screen
from looplm.inference.speculative import DraftHeads, Speculation
from looplm.inference.text import Tokenizer
from looplm.model.flops import CacheStrategy
from looplm.model.looped import LoopedTransformer

EXACT: tuple[CacheStrategy, ...] = ("per_loop", "fill")
"""Strategies under which a prompt in parts is the same as the whole."""


@dataclass(kw_only=True, frozen=True)
class Asked:
    """How one prompt is to be continued."""

    index: int
    sampling: SamplingParams
    exit: ExitPolicy
    speculation: Speculation | None
    screen: Screen | None


@dataclass(kw_only=True, frozen=True)
class Intake:
    """What requests are measured against; see :class:`~looplm.inference.engine.Engine`."""

    model: LoopedTransformer
    tokenizer: Tokenizer | None
    kv_cache: CacheStrategy
    max_len: int
    memory_bytes: int | None
    end_token_ids: frozenset[int]
    default_exit: ExitPolicy
    draft_heads: DraftHeads
    share: bool
    """Whether samples of a prompt share it."""

    def requests(
        self,
        prompts: object,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        exit: ExitPolicy | Sequence[ExitPolicy] | None,
        speculation: Speculation | None,
        screen: Screen | None,
    ) -> list[Request]:
        """The requests of all prompts, in order. Raises UserError as `Engine.generate` says.

        Prompts that are too long become requests that are refused already; the only one raises UserError.
        """
        given = listed(prompts)
        params = SamplingParams() if sampling is None else sampling
        samplings = one_for_each("sampling", params, SamplingParams, len(given))
        exits = one_for_each("exit", self.default_exit if exit is None else exit, ExitPolicy, len(given))
        for name, value, kind in (("speculation", speculation, Speculation), ("screen", screen, Screen)):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{name} is {value!r}; give a {kind.__name__}, or None.")
        if speculation is not None and (self.kv_cache != "per_loop" or self.model.coda):
            raise UserError(
                "Self-speculative decoding needs the cache per_loop and a model without coda layers: a draft is only "
                "worth its work where deeper loops go on from it."
            )
        self.draft_heads.head_for(speculation)  # or the prompt would be blamed for tokens that there are not
        requests: list[Request] = []
        for index, (prompt, params, policy) in enumerate(zip(given, samplings, exits, strict=True)):
            asked = Asked(index=index, sampling=params, exit=policy, speculation=speculation, screen=screen)
            try:
                requests += self.samples(prompt, asked)
            except UserError as error:
                raise UserError(f"Prompt {index}: {error}") from None
        if len(given) == 1 and requests[0].refused:
            raise DoesNotFit(f"Prompt 0: {requests[0].error}")
        return requests

    def samples(self, prompt: Prompt, asked: Asked) -> list[Request]:
        """The n requests of one prompt."""
        params, vocab_size, trained = asked.sampling, self.model.config.vocab_size, self.model.config.num_loops
        parts = prompt_parts(prompt, params, self.tokenizer, vocab_size)
        if self.kv_cache in EXACT:
            parts = [[token for part in parts for token in part]]
        max_loops = asked.exit.max_loops(trained)
        error = self.misfit(parts, params, max_loops)
        family = Family([]) if params.n > 1 and asked.screen is None and self.share and error is None else None
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_token_ids)
        requests = [
            Request(
                index=asked.index,
                sample=sample_index,
                parts=parts,
                sampling=params,
                exit=asked.exit,
                max_loops=max_loops,
                end_token_ids=ends,
                generator=make_generator(params, sample_index) if params.temperature > 0 else None,
                catches_up=self.kv_cache == "per_loop",
                speculation=asked.speculation,
                draft_head=self.draft_heads.head_for(asked.speculation),
                screen=asked.screen,
                family=family,
            )
            for sample_index in range(params.n)
        ]
        for request in requests:
            if error is not None:
                request.refuse(error)
        if family is not None:
            family.waiting += requests
        return requests

    def misfit(self, parts: list[list[int]], params: SamplingParams, max_loops: int) -> str | None:
        """Why a prompt is too long for the context or the memory limit, if it is."""
        try:
            check_length(parts, params, self.max_len)
            positions = sum(len(part) for part in parts) + params.max_tokens - 1
            check_fits(self.model, self.kv_cache, self.memory_bytes, positions, max_loops)
        except DoesNotFit as error:
            return str(error)
        return None
