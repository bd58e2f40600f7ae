"""The engine: prompts in, results out, with continuous depth-wise batching in between.

Requests come and go at any step; within a step each is at a loop of its own. What a request gets does not depend on
its batch-mates: exactly in float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import get_args

import torch

from looplm.errors import UserError
from looplm.inference.capacity import DoesNotFit, ensure
from looplm.inference.choice import choose, settle
from looplm.inference.decide import Clock, Reading
from looplm.inference.decode import tick
from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.graphs import graphed_model
from looplm.inference.intake import Intake
from looplm.inference.memory import Memory
from looplm.inference.packed import kind_of, packed_model, weights_identity
from looplm.inference.prefill import prefill
from looplm.inference.prompts import Parts, Prompt, check_model, model_defaults, read_prompt
from looplm.inference.request import FinishReason, Flight, Request
from looplm.inference.results import EngineStats, GenerationResult, Piece, next_piece, result_of
from looplm.inference.sampling import MOST_AT_ONCE, SamplingParams, check_number, token_logprobs
from looplm.inference.scheduler import Scheduler
from looplm.inference.screening import Screen
from looplm.inference.speculative import DraftHeads, Speculation
from looplm.inference.text import TextStream, Tokenizer, end_token_ids, find_stop
from looplm.model.flops import CacheStrategy
from looplm.model.language_model import LoopLM


class Engine:
    """Generates with a looped model, each token at its own depth.

    model: what `looplm.load` returns, or anything with a `model` (LoopedTransformer) and a `lm_head`.
    tokenizer: needed for prompts, results and stop strings as text; without one, prompts are lists of token ids.
    kv_cache: how keys of several loops are kept (:mod:`looplm.inference.kv_cache`). "per_loop": the text and the
        depths are those of running all loops and then selecting, exactly in float64; in float32 and bfloat16 wherever
        the margin of choice exceeds rounding. "fill", "last", "mean" and "first" are approximations.
    max_batch: requests that run at one time; more wait for a free slot.
    max_len: most positions of a request, prompt and continuation; the model's context when None. Memory is taken
        for what requests need, not for this.
    chunk_size: most positions of prompts in one pass, and of one request in catching up.
    memory_bytes: limit for cache, states and all else that is kept per position, taken at the first request. Requests
        that do not fit beside others wait. None takes what requests need, as they come.
    pack_weights: keep a second copy of the matrices, laid out for this CPU; decoding is then up to twice as fast at
        one row. None does so where it helps, in bfloat16 on a CPU that multiplies it, and there is memory for it.
    native_kernels: run decoding through kernels that the C++ compiler of this machine builds once (cached). None does
        so on a CPU where there is a compiler; False leaves everything to PyTorch.
    cuda_graphs: replay small passes as CUDA graphs, captured when their shape first comes. None does so on a GPU.
    share_prefixes: whether a prompt uses what has been computed for another that begins alike.
    clock: seconds, for `Deadline`.

    Raises UserError when one of these is impossible.
    """

    def __init__(
        self,
        model: LoopLM,
        tokenizer: Tokenizer | None = None,
        *,
        kv_cache: str = "per_loop",
        max_batch: int = 32,
        max_len: int | None = None,
        chunk_size: int = 512,
        memory_bytes: int | None = None,
        pack_weights: bool | None = None,
        native_kernels: bool | None = None,
        cuda_graphs: bool | None = None,
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_model(model)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise UserError(f"tokenizer is {tokenizer!r}; give what looplm.load_tokenizer returns, or None.")
        strategies = {strategy: strategy for strategy in get_args(CacheStrategy)}
        if kv_cache not in strategies:
            raise UserError(f"kv_cache is {kv_cache!r}; choose one of {', '.join(strategies)}.")
        limits = {"max_batch": max_batch, "max_len": max_len, "chunk_size": chunk_size, "memory_bytes": memory_bytes}
        for name, value in limits.items():
            if value is not None:
                check_number(name, value, Integral, 1, MOST_AT_ONCE if name == "max_batch" else math.inf)
        if not callable(clock):
            raise UserError(f"clock is {clock!r}; give a function that returns seconds.")
        self.model, self.tokenizer = model, tokenizer
        self._packed = packed_model(model, pack_weights, native_kernels)
        self._weights, self._kind = weights_identity(model), kind_of(model)
        self._graphed = graphed_model(model, cuda_graphs)
        self._run_by: LoopLM = self._graphed or self._packed or model
        self.kv_cache: CacheStrategy = strategies[kv_cache]
        self.max_batch, self.chunk_size, self.memory_bytes = max_batch, chunk_size, memory_bytes
        context = model.model.config.max_position_embeddings
        self.max_len = context if max_len is None else min(max_len, context)
        self.end_token_ids, self.default_exit = model_defaults(model)
        if tokenizer is not None:
            self.end_token_ids |= end_token_ids(tokenizer)
        self._intake = Intake(
            model=model.model,
            tokenizer=tokenizer,
            kv_cache=self.kv_cache,
            max_len=self.max_len,
            memory_bytes=memory_bytes,
            end_token_ids=frozenset(self.end_token_ids),
            default_exit=self.default_exit,
            draft_heads=DraftHeads(self._run_by.lm_head),
            share=share_prefixes,
        )
        self.stats = EngineStats()
        self._clock = Clock(clock)
        self._scheduler = Scheduler(max_batch, share=share_prefixes)
        self._memory: Memory | None = None
        self._arrivals = False
        self._unlisted: set[Request] = set()
        self._stepping = False
        self._cancelled: list[Request] = []
        """By a screen, in the step that is being made."""

    @property
    def runs(self) -> LoopLM:
        """The model as this engine runs it: packed, on kernels, or as graphs."""
        return self._run_by

    # --- Whole texts --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Parts | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        exit: ExitPolicy | Sequence[ExitPolicy] | None = None,
        *,
        speculation: Speculation | None = None,
        screen: Screen | None = None,
    ) -> Iterator[GenerationResult]:
        """Continues every prompt; yields results in the order of the prompts (and samples), as soon as they can be.

        prompts: one string or `Parts`, or a list of strings, lists of token ids, or `Parts`.
        sampling, exit: one for all prompts, or one for each. `sampling` None is greedy, 64 tokens; `exit` None is
            the threshold saved in the checkpoint, and all trained loops where there is none.
        speculation: draft from a shallow loop. screen: look at every token before it is out.

        Raises UserError at once, before anything runs: for an empty prompt, a token id outside the vocabulary, text
        without a tokenizer or that is not valid Unicode, lists of different length, values of another type.
        A prompt that with `max_tokens` goes over the context, over `memory_bytes` or over what the system has, and one
        whose logits become non-finite, ends with `finish_reason` "error", which `error` explains; the others go on.
        (The only prompt that is too long raises UserError.) Requests whose results are not waited for are cancelled
        when the iterator is closed.
        """
        self._notice_new_weights()
        return self._run(self._intake.requests(prompts, sampling, exit, speculation, screen))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        exit: ExitPolicy | None = None,
        *,
        speculation: Speculation | None = None,
        screen: Screen | None = None,
    ) -> Iterator[Piece]:
        """Continues one prompt; yields pieces of the text as they are written, of all samples in turn.

        Needs a tokenizer. Raises UserError as `generate` does.
        """
        if self.tokenizer is None:
            raise UserError("Streaming gives text, but there is no tokenizer: give the engine one.")
        self._notice_new_weights()
        return self._stream(self._intake.requests([prompt], sampling, exit, speculation, screen), self.tokenizer)

    def prompt_token_ids(self, prompt: Prompt, sampling: SamplingParams) -> list[int]:
        """The token ids of one prompt. Raises UserError when it cannot be continued as `sampling` asks."""
        vocab_size = self.model.model.config.vocab_size
        parts = read_prompt(prompt, sampling, self.tokenizer, vocab_size, self.max_len)
        return [token for part in parts for token in part]

    # --- Requests that come and go ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        exit: ExitPolicy | None = None,
        *,
        speculation: Speculation | None = None,
        screen: Screen | None = None,
        index: int = 0,
    ) -> list[Request]:
        """Adds a prompt to those that run from the next step on; returns its requests, one for each sample.

        What they have so far can be read off them at any time. Raises UserError as `generate` does. What the system
        has not got the memory for ends with `finish_reason` "error".
        """
        self._notice_new_weights()
        requests = self._intake.requests([prompt], sampling, exit, speculation, screen)
        for request in requests:
            request.index = index
        self._add(requests)
        return requests

    def step(self) -> list[GenerationResult]:
        """One step for everything that runs: a pass over prompts, and one over texts. Returns what has finished.

        Results of requests that `generate` or `stream` waits for are not among them.
        """
        finished = [request for request in self._step() if request not in self._unlisted]
        return [result_of(request, self.tokenizer) for request in finished]

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests at once, whatever they are at; slot and memory are free for others. Finished ones stay so.

        Called by a screen, it takes effect at the end of the step. Raises UserError for a request of another engine.
        """
        for request in requests:
            if request.finish_reason is None and not self._scheduler.holds(request):
                raise UserError("This request is not one of this engine's; cancel it where it was submitted.")
            if self._stepping:
                self._cancelled.append(request)
            elif request.finish_reason is None:
                self._finish(request, "cancelled")

    def result(self, request: Request) -> GenerationResult:
        """The result of a request that has finished. Raises UserError for one that has not."""
        if request.finish_reason is None:
            raise UserError("The request has not finished; take steps until it has, or cancel it.")
        return result_of(request, self.tokenizer)

    # --- Running ------------------------------------------------------------------------------------------------

    def _add(self, requests: list[Request]) -> None:
        self._scheduler.add(request for request in requests if not request.refused)
        self._arrivals = True

    def _notice_new_weights(self) -> None:
        """What was computed or packed with weights that have changed in place since is not used again."""
        weights = weights_identity(self.model)
        if weights == self._weights:
            return
        if kind_of(self.model) != self._kind:
            raise UserError(
                "The model's dtype or device has changed since the engine was made; make a new engine of it."
            )
        self._weights = weights
        for request in self._scheduler.running:
            request.shared = False
        if self._packed is not None:
            self._packed.refresh()
        if self._graphed is not None:
            self._graphed.graphs.forget()
        self._intake.draft_heads.forget()
        while self._memory is not None and self._memory.prefixes.evict():
            pass

    def _run(self, requests: list[Request]) -> Iterator[GenerationResult]:
        self._unlisted.update(requests)
        self._add(requests)
        try:
            for request in requests:
                while request.finish_reason is None:
                    self._step()
                if request.refused and len(requests) == 1:
                    raise UserError(request.error or "")
                yield result_of(request, self.tokenizer)
        finally:
            self.cancel(requests)
            self._unlisted.difference_update(requests)

    def _stream(self, requests: list[Request], tokenizer: Tokenizer) -> Iterator[Piece]:
        self._unlisted.update(requests)
        self._add(requests)
        texts = {request: TextStream(tokenizer, request.sampling.stop) for request in requests}
        try:
            while texts:
                self._step()
                for request, text in list(texts.items()):
                    if request.refused:
                        raise UserError(request.error or "")
                    piece = next_piece(request, text)
                    if piece is not None:
                        yield piece
                    if request.finish_reason is not None:
                        del texts[request]
        finally:
            self.cancel(requests)
            self._unlisted.difference_update(requests)

    def _step(self) -> list[Request]:
        outer, self._stepping = self._stepping, True
        try:
            finished = self._advance()
        finally:
            self._stepping = outer
        if self._cancelled and not outer:
            asked, self._cancelled = self._cancelled, []
            self.cancel(asked)
        return finished

    # Not around the generators: the mode would leak into the caller between two results.
    @torch.inference_mode()
    def _advance(self) -> list[Request]:
        """Admits what can begin, one pass over prompts, one tick; returns the requests that have finished."""
        scheduler, stats = self._scheduler, self.stats
        finished: list[Request] = []
        while scheduler.waiting and (self._arrivals or not scheduler.running):
            try:
                self._take_memory()
                break
            except DoesNotFit as reason:
                # Whoever asks for most: what is left may fit.
                most = max(scheduler.waiting, key=lambda request: request.max_positions * request.max_loops)
                most.refuse(str(reason))
                self._release(most)
                finished.append(most)
        self._arrivals = False
        memory = self._memory
        if memory is None:
            return finished
        if scheduler.waiting:
            finished += self._admit(memory)
        if scheduler.prefilling:
            reading = list(scheduler.prefilling)
            work = prefill(self._run_by, memory, reading, self.chunk_size, self._clock, self._emit)
            stats.prompt_weight_passes += work.weight_passes
            stats.prompt_token_loops += work.token_loops
            stats.prompt_head_reads += work.head_reads
            for request in reading:
                if not request.prefilling:
                    stats.prompt_tokens += len(request.prompt_token_ids)
                    stats.shared_prompt_tokens += request.reused
                    scheduler.prompt_is_in(request, memory)
            self._measure()
            finished += self._sweep(reading)
        if scheduler.decoding:
            decoding = list(scheduler.decoding)
            drafting = [request for request in decoding if request.speculation is not None]
            before = _draft_counts(drafting)
            work = tick(self._run_by, memory, decoding, self.chunk_size, self._clock, self._emit)
            stats.weight_passes += work.weight_passes
            stats.token_loops += work.token_loops
            stats.head_reads += work.head_reads
            drafted, accepted, reads = (now - then for now, then in zip(_draft_counts(drafting), before, strict=True))
            stats.drafted_tokens += drafted
            stats.accepted_tokens += accepted
            stats.draft_head_reads += reads
            finished += self._sweep(decoding)
        return finished

    def _admit(self, memory: Memory) -> list[Request]:
        """Begins waiting requests; those whose prompt is in already get their first token. Returns the finished."""
        joined = self._scheduler.admit(memory, self._clock.now())
        self.stats.prompt_tokens += sum(len(request.prompt_token_ids) for request in joined)
        self.stats.shared_prompt_tokens += sum(request.reused for request in joined)
        choose(
            self._run_by,
            [Reading(r, r.flights[0], r.flights[0].logits, "exit") for r in joined if r.flights[0].logits is not None],
        )
        for request in joined:
            settle(request, self._emit)
        return self._sweep(joined)

    def _take_memory(self) -> None:
        scheduler = self._scheduler
        self._memory = ensure(
            self._memory,
            self.model.model,
            self.kv_cache,
            num_slots=self.max_batch,
            limit=self.memory_bytes,
            idle=not scheduler.holding,
            requests=[*scheduler.running, *scheduler.waiting],
        )
        self.stats.cache_bytes = max(self.stats.cache_bytes, self._memory.cache.bytes_allocated)
        self.stats.state_bytes = max(self.stats.state_bytes, self._memory.state_bytes)

    def _measure(self) -> None:
        """Asked before anything is released: until then what is in use only grows."""
        if self._memory is not None:
            in_use = self._memory.bytes_in_use(self._scheduler.prefilling, self._scheduler.decoding)
            self.stats.cache_bytes_in_use = max(self.stats.cache_bytes_in_use, in_use)

    def _sweep(self, requests: Sequence[Request]) -> list[Request]:
        """Releases those of `requests` that have finished."""
        done = [request for request in requests if request.finish_reason is not None]
        if done:
            self._measure()
        for request in done:
            self._release(request)
        return done

    def _release(self, request: Request) -> None:
        assert self._memory is not None or request.slot < 0
        request.flights.clear()
        self._scheduler.release(request, self._memory)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.slot >= 0:
            self._measure()
        self._release(request)

    def _emit(self, request: Request, flight: Flight, token: int) -> None:
        """Takes the next token of a text, and ends the text if it is complete."""
        assert flight.logits is not None
        logprob = 0.0
        if request.sampling.logprobs:
            logprob = token_logprobs(flight.logits[None], torch.tensor([token], device=flight.logits.device)).item()
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        request.loops.append(flight.loop)
        self.stats.generated_tokens += 1
        self.stats.claimed_loops += flight.loop
        stop = request.sampling.stop
        if token in request.end_token_ids or (
            stop and self.tokenizer is not None and find_stop(self.tokenizer, request.token_ids, stop)
        ):
            request.finish_reason = "stop"
        elif len(request.token_ids) >= request.sampling.max_tokens:
            request.finish_reason = "length"


def _draft_counts(requests: Sequence[Request]) -> tuple[int, int, int]:
    """Drafts tested, those that stood, and reads of a draft head."""
    return (
        sum(request.drafted for request in requests),
        sum(request.accepted for request in requests),
        sum(request.draft_reads for request in requests),
    )
