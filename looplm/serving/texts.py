"""Texts and chats: from a checked request to tickets in the engine, and from its events to an answer or a stream."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.speculative import Speculation
from looplm.model.language_model import LoopLM
from looplm.serving import answers
from looplm.serving.answers import ChatForm, CompletionForm, Form, Scored
from looplm.serving.depth import check_loops, exit_of, speculation_of
from looplm.serving.errors import Json, as_api_error
from looplm.serving.loops import prompt_scores
from looplm.serving.metrics import Metrics
from looplm.serving.prompts import PromptReader
from looplm.serving.schema import ChatRequest, CompletionRequest, Generation
from looplm.serving.streams import EventStream, while_connected
from looplm.serving.worker import Busy, Call, Delta, EngineWorker, Finished, Ticket

MOST_VIEWS = 64
"""Forwards over whole texts that may wait."""

Result = TypeVar("Result")
Head = tuple[str, Scored | None]
"""What a choice begins with: the text of its prompt, and the tokens where they are scored."""


class Aside:
    """Work beside the event loop and beside the engine: one thread for tokenizers, one for forwards over whole texts.

    One each: setting up a tokenizer is not for two threads at a time, and forwards would only slow each other down.
    """

    def __init__(self) -> None:
        self._reading = ThreadPoolExecutor(1, "looplm-tokenizer")
        self._viewing = ThreadPoolExecutor(1, "looplm-views")
        self._views = 0

    async def read(self, read: Callable[[Any], Result], given: Any) -> Result:
        """Tokenizes away from the event loop: a prompt may be long."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, read, given)

    async def view(self, view: Callable[[], Result]) -> Result:
        """A forward over a whole text. Raises Busy when too many wait."""
        if self._views >= MOST_VIEWS:
            raise Busy(f"{self._views} whole texts wait to be looked at. Try again later.")
        self._views += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._viewing, view)
        finally:
            self._views -= 1

    def close(self) -> None:
        """Ends both threads."""
        self._reading.shutdown(cancel_futures=True)
        self._viewing.shutdown(cancel_futures=True)


class Texts:
    """Answers requests for text."""

    def __init__(
        self,
        worker: EngineWorker,
        prompts: PromptReader,
        aside: Aside,
        metrics: Metrics,
        *,
        model_name: str,
        request_seconds: float,
    ) -> None:
        engine = worker.engine
        self._worker, self._prompts, self._aside, self._metrics = worker, prompts, aside, metrics
        self._name, self._seconds = model_name, request_seconds
        self._lm: LoopLM = engine.model
        self._default_exit, self._trained = engine.default_exit, engine.model.model.config.num_loops

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        started = asyncio.get_running_loop().time()
        exit, speculation = self._depth(body)
        self._worker.check_size(len(body.prompts) * (body.n or 1))
        for prompt in body.prompts:
            self._prompts.check_size(prompt)
        read = await self._aside.read(self._prompts.completion, body)
        tickets = [
            Ticket(prompt=ids, sampling=params, exit=exit, speculation=speculation, top=body.top)
            for ids, params in read
        ]
        heads: list[Head] = []
        if body.echo:
            heads = await while_connected(request, self._heads(body, tickets, started))
        if body.max_tokens == 0:
            return Json(self._echoes(body, tickets, heads))
        form = CompletionForm(self._prompts.tokenizer)
        return await self._answer(request, body, tickets, form, heads, started)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers in a conversation."""
        started = asyncio.get_running_loop().time()
        exit, speculation = self._depth(body)
        self._worker.check_size(body.n or 1)
        ids, params = await self._aside.read(self._prompts.chat, body)
        ticket = Ticket(prompt=ids, sampling=params, exit=exit, speculation=speculation, top=body.top)
        return await self._answer(request, body, [ticket], ChatForm(self._prompts.tokenizer), [], started)

    def _depth(self, body: Generation) -> tuple[ExitPolicy | None, Speculation | None]:
        """When tokens leave, and what is drafted. Raises UserError when impossible."""
        check_loops(body.num_loops, self._trained)
        exit = exit_of(body)
        return exit, speculation_of(body, exit or self._default_exit)

    async def _answer(
        self,
        request: Request,
        body: Generation,
        tickets: list[Ticket],
        form: Form,
        heads: list[Head],
        started: float,
    ) -> Response:
        """Runs tickets; `heads`: for each prompt, the text and tokens that its choices begin with; `started`: when
        the request came, on the clock of the event loop."""
        for ticket in tickets:
            ticket.streaming = bool(body.stream)
        call = Call(tickets)
        call.started = started
        self._worker.submit(call)
        handed_over = False
        try:
            if not body.stream:
                return Json(await while_connected(request, self._whole(body, call, form, heads)))
            # Whatever fails before the first token still has a status of its own.
            first = await while_connected(request, self._next(call))
            events = self._events(body, call, form, heads, first)
            handed_over = True
            return EventStream(events, partial(self._worker.release, call))
        finally:
            if not handed_over:
                self._worker.release(call)

    async def _whole(self, body: Generation, call: Call, form: Form, heads: list[Head]) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        done: list[Finished] = []
        while call.open_samples:
            ticket, event = await self._next(call)
            assert isinstance(event, Finished)
            done.append(event)
            result, index = event.result, choice_index(call, ticket, event.sample)
            text, tokens = heads[call.tickets.index(ticket)] if heads else ("", None)
            if body.scored:
                own = answers.scored(form.tokenizer, result.token_ids, result.logprobs or [], event.alternatives)
                tokens = own if tokens is None else tokens + own
            choice = form.choice(index, text + (result.text or ""), tokens, answers.finish_reason(result), 0)
            choices[index] = choice | (answers.depths(event) if body.return_depths else {})
        whole = self._frame(form, form.object)
        whole["choices"] = [choices[index] for index in sorted(choices)]
        whole["usage"] = answers.usage([ticket.prompt for ticket in call.tickets], done)
        return whole

    async def _events(
        self,
        body: Generation,
        call: Call,
        form: Form,
        heads: list[Head],
        first: tuple[Ticket, Delta | Finished],
    ) -> AsyncIterator[bytes]:
        """The stream of a call. A failure is its last event: the status is out already."""
        frame = self._frame(form, form.chunk_object)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        if with_usage:
            frame["usage"] = None
        written: dict[int, int] = {}
        texts: dict[int, answers.TokenTexts] = {}
        for ticket in call.tickets:
            for sample in range(ticket.sampling.n):
                index = choice_index(call, ticket, sample)
                written[index], texts[index] = 0, answers.TokenTexts(form.tokenizer)
                text, tokens = heads[call.tickets.index(ticket)] if heads else ("", None)
                opening = form.chunk(index, text, tokens, None, 0) if text else form.opening(index)
                written[index] += len(text)
                if opening is not None:
                    yield answers.event(frame | {"choices": [opening]})
        done: list[Finished] = []
        try:
            ticket, event = first
            while True:
                index = choice_index(call, ticket, event.sample)
                if isinstance(event, Delta):
                    chunk = self._piece(body, form, index, event, texts[index], written[index])
                    written[index] += sum(len(text) for text in (chunk["logprobs"] or {}).get("tokens", []))
                else:
                    done.append(event)
                    chunk = form.chunk(index, "", None, answers.finish_reason(event.result), 0)
                    if body.return_depths:
                        chunk |= answers.depths(event)
                yield answers.event(frame | {"choices": [chunk]})
                if not call.open_samples:
                    break
                ticket, event = await self._next(call)
        except Exception as error:
            yield answers.event(as_api_error(error).body())
            return
        if with_usage:
            told = answers.usage([ticket.prompt for ticket in call.tickets], done)
            yield answers.event(frame | {"choices": [], "usage": told})
        yield answers.DONE

    def _piece(
        self, body: Generation, form: Form, index: int, delta: Delta, texts: answers.TokenTexts, offset: int
    ) -> dict[str, Any]:
        tokens = None
        if body.scored:
            tokens = Scored(
                texts=texts.add(delta.token_ids),
                token_ids=delta.token_ids,
                logprobs=list(delta.logprobs),
                alternatives=delta.alternatives,
            )
        chunk = form.chunk(index, delta.text, tokens, None, offset)
        return chunk | ({"token_ids": delta.token_ids, "loops": delta.loops} if body.return_depths else {})

    async def _next(self, call: Call) -> tuple[Ticket, Delta | Finished]:
        """The next event. Raises TimeoutError when the call has had its time."""
        async with asyncio.timeout_at(call.started + self._seconds):
            ticket, event = await self._worker.next(call)
        if not call.answered and ticket.streaming:
            self._metrics.first_token(asyncio.get_running_loop().time() - call.started)
        call.answered = True
        return ticket, event

    # --- Prompts that are given back ----------------------------------------------------------------------------

    async def _heads(self, body: CompletionRequest, tickets: list[Ticket], started: float) -> list[Head]:
        """What choices begin with. Raises TimeoutError when the request has had its time."""
        async with asyncio.timeout_at(started + self._seconds):
            return [await self._echo(body, ticket.prompt, ticket.exit) for ticket in tickets]

    async def _echo(self, body: CompletionRequest, ids: list[int], exit: ExitPolicy | None) -> Head:
        """The text of a prompt, and its tokens with their log-probabilities where asked for."""
        tokenizer = self._prompts.tokenizer
        if not body.scored:
            return tokenizer.decode(ids), None
        logprobs, alternatives = [], []
        if len(ids) > 1:
            score = partial(prompt_scores, self._lm, ids, exit or self._default_exit, body.top)
            logprobs, alternatives = await self._aside.view(score)
        given = answers.scored(tokenizer, ids, [None, *logprobs], [[], *alternatives] if body.top else [])
        return "".join(given.texts), given

    def _echoes(self, body: CompletionRequest, tickets: list[Ticket], heads: list[Head]) -> dict[str, Any]:
        """An answer in which nothing is generated."""
        form = CompletionForm(self._prompts.tokenizer)
        choices = [form.choice(index, text, tokens, "length", 0) for index, (text, tokens) in enumerate(heads)]
        usage = answers.usage([ticket.prompt for ticket in tickets], [])
        return self._frame(form, form.object) | {"choices": choices, "usage": usage}

    def _frame(self, form: Form, kind: str) -> dict[str, Any]:
        frame = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        return frame | {"model": self._name}


def choice_index(call: Call, ticket: Ticket, sample: int) -> int:
    """The place of a sample among the choices: all samples of the first prompt, then of the next."""
    return call.tickets.index(ticket) * ticket.sampling.n + sample
