"""The one thread that runs the engine, and the way of tokens back to asyncio.

Only this thread touches the engine. Requests come to it by an inbox, and after every step what is new goes back in
one call to the event loop. How many may wait is decided on the side of the event loop, so that it is never guessed.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from looplm.errors import UserError
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.request import Request
from looplm.inference.results import GenerationResult, next_piece
from looplm.inference.sampling import SAMPLE_SEED_STRIDE, SEED_LIMIT, SamplingParams
from looplm.inference.screening import Preview, Screen
from looplm.inference.speculative import Speculation
from looplm.inference.text import TextStream

log = logging.getLogger("looplm.serving")

Alternatives = list[tuple[int, float]]
"""Token ids and their log-probabilities, the likeliest first."""
CLOSING = "The server is shutting down."
ANY_LOOP = 2**31
"""A screen that looks at this loop sees each token at the loop it leaves at."""


class Busy(Exception):
    """No more requests can wait."""


class EngineFailed(Exception):
    """The engine could not go on with a request. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a step has added to one sample."""

    sample: int
    text: str
    token_ids: list[int]
    loops: list[int]
    logprobs: list[float]
    alternatives: list[Alternatives]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One sample is complete."""

    sample: int
    result: GenerationResult
    alternatives: list[Alternatives]
    """For every token, where asked for."""
    weight_passes: int
    """Applications of the core's weights that this text took part in, its prompt apart."""


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One prompt on its way through the engine, with its n samples."""

    prompt: list[int]
    sampling: SamplingParams
    exit: ExitPolicy | None = None
    """None: as the checkpoint says."""
    speculation: Speculation | None = None
    streaming: bool = False
    """Whether deltas are wanted, and not only the end."""
    top: int = 0
    """How many alternatives to give for every token."""
    call: "Call | None" = None


Event = Delta | Finished | Exception


class Call:
    """The prompts of one HTTP request, and the way back to who waits for them. Belongs to the event loop."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.tickets = list(tickets)
        for ticket in self.tickets:
            ticket.call = self
        self.events: asyncio.Queue[tuple[Ticket, Event]] = asyncio.Queue()
        self.open_samples = 0
        """Samples that count against the limit of the queue."""
        self.started = asyncio.get_running_loop().time()
        self.answered = False
        """Whether anything has come back yet."""


@dataclass(eq=False)
class _Sample:
    """A request in the engine. Belongs to the engine's thread."""

    ticket: Ticket
    number: int
    request: Request
    text: TextStream | None
    alternatives: list[Alternatives]
    told: int = 0
    weight_passes: int = 0


class EngineWorker:
    """Runs an engine in a thread of its own.

    engine: nobody else may use it from now on.
    max_waiting: samples that may wait for a place beside those that run.
    on_finished: called in the engine's thread with the request of every sample that ends, cancelled ones included.
    """

    def __init__(
        self, engine: Engine, *, max_waiting: int = 128, on_finished: Callable[[Request], None] | None = None
    ) -> None:
        if engine.tokenizer is None:
            raise UserError("A server answers in text, but the engine has no tokenizer: give it one.")
        self.engine = engine
        self.capacity = engine.max_batch + max_waiting
        self.open_samples = 0
        """Samples that wait or run, as the event loop sees it."""
        self._on_finished = on_finished
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: list[_Sample] = []
        self._outbox: list[tuple[Ticket, Event]] = []
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="looplm-engine", daemon=True)

    # --- On the event loop --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive() and not self._closing

    def check_size(self, wanted: int) -> None:
        """Raises UserError for a request of more texts than can ever be here at one time."""
        if wanted > self.capacity:
            raise UserError(f"This asks for {wanted} texts; at most {self.capacity} may run or wait. Ask for fewer.")

    def submit(self, call: Call) -> None:
        """Puts prompts in line, all or none. Raises Busy when there is no room, EngineFailed when it has ended."""
        if not self.alive:
            raise EngineFailed(CLOSING)
        wanted = sum(ticket.sampling.n for ticket in call.tickets)
        if self.open_samples + wanted > self.capacity:
            raise Busy(
                f"{self.open_samples} texts run or wait, at most {self.capacity} may, and this asks for {wanted} "
                "more. Try again later."
            )
        self.open_samples += wanted
        call.open_samples = wanted
        for ticket in call.tickets:
            self._inbox.put(partial(self._begin, ticket))

    async def next(self, call: Call) -> tuple[Ticket, Delta | Finished]:
        """The next event of a call. Raises UserError for a prompt that cannot be run, EngineFailed for a failure."""
        ticket, event = await call.events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Finished):
            call.open_samples -= 1
            self.open_samples -= 1
        return ticket, event

    def release(self, call: Call) -> None:
        """Ends what is still open of a call; its room is free at once. For a finished one it does nothing."""
        if call.open_samples:
            self.open_samples -= call.open_samples
            call.open_samples = 0
            if self.alive:  # or it ends everything anyway, and nobody looks into the inbox
                self._inbox.put(partial(self._cancel, call))

    def stop(self) -> None:
        """Has the thread end; who still waits for a text is told so."""
        self._closing = True
        self._inbox.put(lambda: None)

    async def close(self) -> None:
        """Cancels everything and waits for the thread to end."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    # --- In the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = CLOSING
        try:
            while not self._closing:
                self._take_in()
                if self._samples and not self._closing:
                    self._step()
                self._send()
        except Exception as error:
            log.exception("The engine's thread has ended")
            reason = f"The engine has ended: {type(error).__name__}: {error}"
        finally:
            self._closing = True
            while not self._inbox.empty():
                self._inbox.get()()
            self._outbox += [(ticket, EngineFailed(reason)) for ticket in {s.ticket for s in self._samples}]
            self._samples = []
            self._send()

    def _take_in(self) -> None:
        """Does all that has come in; waits for something when there is nothing to run."""
        if not self._samples:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _begin(self, ticket: Ticket) -> None:
        if self._closing:
            self._outbox.append((ticket, EngineFailed(CLOSING)))
            return
        try:
            if ticket.top:
                self._samples += [self._with_alternatives(ticket, number) for number in range(ticket.sampling.n)]
                return
            requests = self.engine.submit(ticket.prompt, ticket.sampling, ticket.exit, speculation=ticket.speculation)
            self._samples += [self._sample(ticket, number, request, []) for number, request in enumerate(requests)]
        except UserError as error:
            self._outbox.append((ticket, error))
        except Exception as error:  # must not end the thread, and with it the requests of others
            log.exception("A request could not be begun")
            self._outbox.append((ticket, EngineFailed(f"The engine failed: {type(error).__name__}: {error}")))

    def _with_alternatives(self, ticket: Ticket, number: int) -> _Sample:
        """One sample whose distributions are looked at. A screen sees them; it cannot tell samples apart, so each is
        a request of its own, with the seed that sample `number` would have had."""
        alternatives: list[Alternatives] = []

        def look(preview: Preview) -> None:
            found = preview.logprobs.topk(min(ticket.top, preview.logprobs.shape[-1]))
            alternatives.append(list(zip(found.indices.tolist(), found.values.tolist(), strict=True)))

        seed = ticket.sampling.seed
        if seed is not None:
            seed = (seed + number * SAMPLE_SEED_STRIDE) % SEED_LIMIT
        (request,) = self.engine.submit(
            ticket.prompt,
            replace(ticket.sampling, n=1, seed=seed),
            ticket.exit,
            speculation=ticket.speculation,
            screen=Screen(look, loops=ANY_LOOP),
        )
        return self._sample(ticket, number, request, alternatives)

    def _sample(self, ticket: Ticket, number: int, request: Request, alternatives: list[Alternatives]) -> _Sample:
        assert self.engine.tokenizer is not None
        text = TextStream(self.engine.tokenizer, ticket.sampling.stop) if ticket.streaming else None
        return _Sample(ticket, number, request, text, alternatives)

    def _cancel(self, call: Call) -> None:
        self._drop([sample for sample in self._samples if sample.ticket.call is call])

    def _step(self) -> None:
        before = self.engine.stats.weight_passes
        try:
            self.engine.step()
        except Exception as error:
            log.exception("A step of the engine failed; the requests in it are ended")
            self._fail(self._samples, EngineFailed(f"The engine failed: {type(error).__name__}: {error}"))
            return
        passes = self.engine.stats.weight_passes - before
        for sample in self._samples:
            self._report(sample, passes)
        self._samples = [sample for sample in self._samples if sample.request.finish_reason is None]

    def _report(self, sample: _Sample, passes: int) -> None:
        """Says what a step has brought to a sample. Its first token is read out of the prompt."""
        request = sample.request
        begun = sample.told > 0 or len(request.token_ids) > 1
        if begun or (request.token_ids and request.finish_reason is None):
            sample.weight_passes += passes
        if sample.text is not None:
            self._tell(sample, sample.text)
        if request.finish_reason is not None:
            finished = Finished(
                sample=sample.number,
                result=self.engine.result(request),
                alternatives=sample.alternatives,
                weight_passes=sample.weight_passes,
            )
            self._outbox.append((sample.ticket, finished))
            self._note(sample)
        sample.told = len(request.token_ids)

    def _tell(self, sample: _Sample, text: TextStream) -> None:
        request, told = sample.request, sample.told
        piece = next_piece(request, text)
        if piece is None:
            return
        delta = Delta(
            sample=sample.number,
            text=piece.text,
            token_ids=piece.token_ids,
            loops=piece.loops,
            logprobs=request.logprobs[told:] if request.sampling.logprobs else [],
            alternatives=sample.alternatives[told : told + len(piece.token_ids)],
        )
        self._outbox.append((sample.ticket, delta))

    def _fail(self, samples: list[_Sample], error: EngineFailed) -> None:
        """Ends some samples, and with them all others of their prompts."""
        tickets = {sample.ticket for sample in samples}
        self._outbox += [(ticket, error) for ticket in tickets]
        self._drop([sample for sample in self._samples if sample.ticket in tickets])

    def _drop(self, samples: list[_Sample]) -> None:
        self._samples = [sample for sample in self._samples if sample not in samples]
        self.engine.cancel([sample.request for sample in samples])
        for sample in samples:
            self._note(sample)

    def _note(self, sample: _Sample) -> None:
        if self._on_finished is not None:
            self._on_finished(sample.request)

    def _send(self) -> None:
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_deliver, events)
        except RuntimeError:  # the event loop has been closed: nobody listens any more
            self._closing = True


def _deliver(events: list[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        assert ticket.call is not None
        ticket.call.events.put_nowait((ticket, event))
