"""The engine: prompts in, results out, with continuous depth-wise batching in between.

Requests come and go at any tick; within a tick each is at a loop of its own. What a request gets does not
depend on its batch-mates: exactly in float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from looplm.errors import UserError
from looplm.inference.exit_policy import ExitPolicy, FixedDepth, QuantileExit
from looplm.inference.runner import Exits, LanguageModel, SlotMemory, allocate, feed, prefill, tick
from looplm.inference.sampling import (
    SamplingParams,
    all_finite,
    check_number,
    check_text,
    make_generator,
    sample,
    token_logprobs,
    whole_numbers,
)
from looplm.inference.scheduler import FinishReason, Request, Scheduler
from looplm.inference.text import Tokenizer, end_token_ids, final_text, find_stop
from looplm.model.looped import LoopedTransformer

Prompt = str | Sequence[int]


@runtime_checkable
class CheckpointModel(LanguageModel, Protocol):
    """A language model with what its checkpoint has saved, as `looplm.load` returns it."""

    config: Any
    """With `eos_token_id` (one, several or None) and `exit_threshold` (None: all loops)."""
    generation_config: Any
    """With `eos_token_id`."""


@dataclass(kw_only=True, frozen=True)
class GenerationResult:
    """One continuation of one prompt: the text and the depths of running all loops and then selecting.

    Exactly in float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding. The same holds of the
    other prompts of the call: a result does not depend on them.
    """

    index: int
    """Of the prompt in the list that was given."""
    sample: int
    """Which of the prompt's n samples."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """All generated tokens, the one that ended the text included."""
    text: str | None
    """Their text, without special tokens, the stop string and what follows it. None without a tokenizer."""
    logprobs: list[float] | None
    """Log-probability of each token under the model itself, before temperature and filters; None unless asked for."""
    loops: list[int]
    """Claimed depth: the loop, 1 to R, at which each token was read out."""
    token_loops: list[int]
    """Loops computed in the end at the position each token was read out at, catch-up for later tokens included."""
    finish_reason: FinishReason


@dataclass(kw_only=True)
class EngineStats:
    """What an engine has done since it was made, or since its `stats` were replaced. Prompts are counted apart."""

    weight_passes: int = 0
    """Applications of the core's weights in decoding, however many rows each carried."""
    token_loops: int = 0
    """Positions times loops computed in decoding; padding is not counted."""
    prompt_weight_passes: int = 0
    prompt_token_loops: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    claimed_loops: int = 0
    """Sum over generated tokens of the loop they were read out at."""
    cache_bytes: int = 0
    """Keys and values there was room for, in the largest call."""
    cache_bytes_in_use: int = 0
    """Most bytes of keys and values that held something at one time."""
    state_bytes: int = 0
    """States that wait for deeper loops (and embeddings, where injected again), in the largest call."""

    @property
    def mean_loops(self) -> float:
        """Mean claimed depth of a generated token; nan before there is one."""
        return self.claimed_loops / self.generated_tokens if self.generated_tokens else float("nan")


class Engine:
    """Generates with a looped model, each token at its own depth.

    model: what `looplm.load` returns, or anything with a `model` (LoopedTransformer) and a `lm_head`.
    tokenizer: needed for prompts, results and stop strings as text; without one, prompts are lists of token ids.
    kv_cache: "per_loop": the text and the depths are those of running all loops and then selecting, exactly in
        float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding.
    max_batch: requests that run at one time; more wait for a free slot.
    max_len: most positions of a request, prompt and continuation; the model's context when None. Memory is taken
        for what a call needs, not for this.
    chunk_size: most positions of one request in one pass, of its prompt or in catching up.

    Raises UserError when one of these is impossible.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        kv_cache: str = "per_loop",
        max_batch: int = 32,
        max_len: int | None = None,
        chunk_size: int = 512,
    ) -> None:
        check_model(model)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise UserError(f"tokenizer is {tokenizer!r}; give what looplm.load_tokenizer returns, or None.")
        if kv_cache != "per_loop":
            raise UserError(f"kv_cache is {kv_cache!r}; the one strategy there is now is 'per_loop', the exact cache.")
        for name, value in (("max_batch", max_batch), ("max_len", max_len), ("chunk_size", chunk_size)):
            if value is not None:
                check_number(name, value, Integral, 1, math.inf)
        self.model, self.tokenizer = model, tokenizer
        self.max_batch, self.chunk_size = max_batch, chunk_size
        context = model.model.config.max_position_embeddings
        self.max_len = context if max_len is None else min(max_len, context)
        self.end_token_ids, self.default_exit = model_defaults(model)
        if tokenizer is not None:
            self.end_token_ids |= end_token_ids(tokenizer)
        self.stats = EngineStats()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        exit: ExitPolicy | Sequence[ExitPolicy] | None = None,
    ) -> Iterator[GenerationResult]:
        """Continues every prompt; yields results in the order of the prompts (and samples), as soon as they can be.

        prompts: one string, or a list of strings or of lists of token ids.
        sampling, exit: one for all prompts, or one for each. `sampling` None is greedy, 64 tokens; `exit` None is
            the threshold saved in the checkpoint, and all trained loops where there is none.

        Raises UserError at once, before anything runs: for an empty prompt, a token id outside the vocabulary, a
        prompt that with `max_tokens` goes over the context, text without a tokenizer or that is not valid Unicode,
        lists of different length, values of another type. And when the first result is asked for, if there is no
        memory for all requests that run at one time.
        A request whose logits become non-finite ends with `finish_reason` "error"; the others go on.
        """
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
            raise UserError(f"The prompts are {prompts!r}; give a string, or a list of strings or lists of token ids.")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = SamplingParams() if sampling is None else sampling
        samplings = one_for_each("sampling", sampling, SamplingParams, len(prompts))
        exits = one_for_each("exit", self.default_exit if exit is None else exit, ExitPolicy, len(prompts))
        requests: list[Request] = []
        for index, (prompt, params, policy) in enumerate(zip(prompts, samplings, exits, strict=True)):
            requests += self._requests(index, prompt, params, policy)
        return self._run(requests)

    def prompt_token_ids(self, prompt: Prompt, sampling: SamplingParams) -> list[int]:
        """The token ids of one prompt. Raises UserError when it cannot be continued as `sampling` asks."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("The prompt is text, but there is no tokenizer: give the engine one, or token ids.")
            check_text("The prompt", prompt)
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            token_ids = whole_numbers("The prompt", prompt)
        else:
            raise UserError(f"The prompt is {prompt!r}; it must be a string or a list of token ids.")
        if not token_ids:
            raise UserError("The prompt is empty; give at least one token.")
        vocab_size = self.model.model.config.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"The prompt has the token id {token}, outside the vocabulary of {vocab_size}.")
        length = len(token_ids) + sampling.max_tokens
        if length > self.max_len:
            raise UserError(
                f"The prompt has {len(token_ids)} tokens; with max_tokens {sampling.max_tokens} that is {length}, "
                f"more than the {self.max_len} positions of the context. Shorten the prompt or lower max_tokens."
            )
        if sampling.stop and self.tokenizer is None:
            raise UserError("Stop strings need a tokenizer: give the engine one, or use stop_token_ids.")
        return token_ids

    def _requests(self, index: int, prompt: Prompt, params: SamplingParams, policy: ExitPolicy) -> Iterator[Request]:
        """The n requests of prompt `index`."""
        try:
            token_ids = self.prompt_token_ids(prompt, params)
        except UserError as error:
            raise UserError(f"Prompt {index}: {error}") from None
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_token_ids)
        for sample_index in range(params.n):
            yield Request(
                index=index,
                sample=sample_index,
                prompt_token_ids=token_ids,
                sampling=params,
                exit=policy,
                max_loops=policy.max_loops(self.model.model.config.num_loops),
                end_token_ids=ends,
                generator=make_generator(params, sample_index) if params.temperature > 0 else None,
            )

    # --- Running ------------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request]) -> Iterator[GenerationResult]:
        """Runs to the end. Memory and schedule belong to this call: two at a time do not meet."""
        if not requests:
            return
        num_slots = min(self.max_batch, len(requests))
        max_len = max(request.max_positions for request in requests)
        max_loops = max(request.max_loops for request in requests)
        memory = self._allocate(num_slots, max_len, max_loops)
        self.stats.cache_bytes = max(self.stats.cache_bytes, memory.cache.bytes_allocated)
        self.stats.state_bytes = max(self.stats.state_bytes, memory.state_bytes)
        scheduler = Scheduler(requests, num_slots)
        for request in requests:
            while request.finish_reason is None:
                self._step(scheduler, memory)
            yield self._result(request)

    def _allocate(self, num_slots: int, max_len: int, num_loops: int) -> SlotMemory:
        """The memory of a call. Raises UserError that says how much it would be when there is not as much."""
        model = self.model.model
        try:
            return allocate(model, num_slots, max_len, num_loops)
        # torch has RuntimeError for too much, and the other two for sizes that overflow.
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            config, size = model.config, model.embed_tokens.weight.element_size()
            layers = config.num_prelude_layers + config.num_hidden_layers * num_loops + config.num_coda_layers
            per_layer = 2 * config.num_key_value_heads * config.head_dim * size
            gib = num_slots * max_len * layers * per_layer // 2**30
            raise UserError(
                f"No memory for {num_slots} requests at a time of {max_len} positions and {num_loops} loops: their "
                f"keys and values alone take about {gib:,} GiB. Use fewer loops, a lower max_tokens, a shorter prompt "
                f"or a smaller max_batch ({reason})."
            ) from None

    # Not around the generator: the mode would leak into the caller between two results.
    @torch.inference_mode()
    def _step(self, scheduler: Scheduler, memory: SlotMemory) -> None:
        """Prompts for the slots that are free, then one tick for all that runs."""
        stats = self.stats
        for requests in prompt_groups(scheduler.admit(), self.chunk_size):
            exits = prefill(self.model, memory, requests, self.chunk_size)
            stats.prompt_weight_passes += exits.weight_passes
            stats.prompt_token_loops += exits.token_loops
            stats.prompt_tokens += sum(len(request.prompt_token_ids) for request in requests)
            self._advance(exits, scheduler, memory)
        if scheduler.running:
            exits = tick(self.model, memory, scheduler.running, self.chunk_size)
            stats.weight_passes += exits.weight_passes
            stats.token_loops += exits.token_loops
            self._advance(exits, scheduler, memory)

    def _advance(self, exits: Exits, scheduler: Scheduler, memory: SlotMemory) -> None:
        """Chooses the next token of the requests that left the loop, and ends those that are complete."""
        in_use = memory.cache.bytes_in_use(
            sum(request.filled[0] for request in scheduler.running),
            sum(sum(request.filled) for request in scheduler.running),
        )
        self.stats.cache_bytes_in_use = max(self.stats.cache_bytes_in_use, in_use)
        if not exits.requests:
            return
        requests = exits.requests
        finite = all_finite(exits.logits).tolist()
        # A row that is not finite has no distribution; nothing of what is drawn for it is used.
        logits = exits.logits if all(finite) else exits.logits.nan_to_num(0.0, 0.0, 0.0)
        tokens = sample(logits, [r.sampling for r in requests], [r.generator for r in requests])
        wants_logprobs = any(request.sampling.logprobs for request in requests)
        logprobs = token_logprobs(logits, tokens).tolist() if wants_logprobs else [0.0] * len(requests)
        for request, token, logprob, loop, ok in zip(
            requests, tokens.tolist(), logprobs, exits.loops, finite, strict=True
        ):
            if ok:
                request.append(token, logprob, loop)
                self.stats.generated_tokens += 1
                self.stats.claimed_loops += loop
            request.finish_reason = self._finish_reason(request) if ok else "error"
            if request.finish_reason is not None:
                memory.cache.clear(request.slot, request.filled[0])
                scheduler.release(request)
        feed(memory, [request for request in requests if request.finish_reason is None])

    def _finish_reason(self, request: Request) -> FinishReason | None:
        if request.token_ids[-1] in request.end_token_ids:
            return "stop"
        stop = request.sampling.stop
        if stop and self.tokenizer is not None and find_stop(self.tokenizer, request.token_ids, stop):
            return "stop"
        return "length" if len(request.token_ids) >= request.sampling.max_tokens else None

    def _result(self, request: Request) -> GenerationResult:
        assert request.finish_reason is not None
        text = None
        if self.tokenizer is not None:
            ended = request.token_ids and request.token_ids[-1] in request.end_token_ids
            shown = request.token_ids[:-1] if ended else request.token_ids
            text = final_text(self.tokenizer, shown, request.sampling.stop)
        return GenerationResult(
            index=request.index,
            sample=request.sample,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=request.token_ids,
            text=text,
            logprobs=request.logprobs if request.sampling.logprobs else None,
            loops=request.loops,
            token_loops=request.token_loops(),
            finish_reason=request.finish_reason,
        )


Given = TypeVar("Given")


def one_for_each(name: str, given: Given | Sequence[Given], kind: type[Given], count: int) -> list[Given]:
    """`given` once for every prompt, or as it is when it is a list of that length. UserError when it is not."""

    def fits(one: object) -> bool:
        # A class passes for the protocol that its instances follow.
        return isinstance(one, kind) and not isinstance(one, type)

    if fits(given):
        return [given] * count  # type: ignore[list-item]
    if not isinstance(given, Sequence) or not all(fits(one) for one in given):
        raise UserError(f"{name} is {given!r}; give one {kind.__name__}, or a list with one for each prompt.")
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} entries for {count} prompts; give one, or one for each prompt.")
    return list(given)


def check_model(model: object) -> None:
    """Raises UserError for what is no looped language model, or one without numbers."""
    if not isinstance(model, LanguageModel) or not isinstance(model.model, LoopedTransformer):
        raise UserError(f"The model is a {type(model).__name__}; give the engine what looplm.load returns.")
    if model.model.embed_tokens.weight.is_meta:
        raise UserError("The model is on the meta device, which holds shapes and no numbers; load it on cpu or cuda.")


def prompt_groups(requests: Sequence[Request], chunk_size: int) -> Iterator[list[Request]]:
    """New requests in order, together as long as their prompts hold no more than `chunk_size` tokens in all."""
    group: list[Request] = []
    for request in requests:
        tokens = sum(len(r.prompt_token_ids) for r in (*group, request))
        if group and tokens > chunk_size:
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def model_defaults(model: LanguageModel) -> tuple[frozenset[int], ExitPolicy]:
    """The end tokens and the exit threshold that a checkpoint brings; none and all loops for a bare model."""
    all_loops = FixedDepth(model.model.config.num_loops)
    if not isinstance(model, CheckpointModel):
        return frozenset(), all_loops
    ends: set[int] = set()
    for given in (model.config.eos_token_id, model.generation_config.eos_token_id):
        ends.update([given] if isinstance(given, int) else given or [])
    threshold = model.config.exit_threshold
    return frozenset(ends), all_loops if threshold is None or threshold >= 1 else QuantileExit(threshold)
