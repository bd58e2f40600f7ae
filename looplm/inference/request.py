"""A request: one sample of one prompt, how far it has got, and the tokens it has in flight."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from looplm.inference.blocks import Prefix
from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.layout import Segment
from looplm.inference.sampling import SamplingParams

if TYPE_CHECKING:
    from looplm.inference.screening import Failed, Screen, Verdict
    from looplm.inference.speculative import DraftHead, Speculation

FinishReason = Literal["stop", "length", "error", "screened", "cancelled"]
"""stop: an end token or stop string; length: max_tokens; error: the model gave non-finite logits, a screen failed, or
the request was too long for context or memory; screened: a screen ended the text; cancelled: `Engine.cancel` was
called."""


@dataclass(eq=False)
class Flight:
    """A position whose next token is not out yet: on its way through the loops, or waiting for those before it.

    Without speculation a request has one at a time. A draft puts more behind it, each fed with a token that was chosen
    for the position before.
    """

    position: int
    started: float
    """Seconds on the engine's clock."""
    loop: int = 0
    """The loop, from 1, at which it has left; 0 until then."""
    logits: Tensor | None = None
    """(V,), at the loop it has left at."""
    token: int | None = None
    """What has been chosen to follow it."""
    final: bool = False
    """Whether `token` was drawn from `logits`: nothing is left to test."""
    draft_probs: Tensor | None = None
    """(V,) float64: what a drafted token was drawn from; None when greedy."""
    previous: Tensor | None = None
    """(V,) logits of the loop before, for ConfidenceExit."""
    stable: int = 0
    hiddens: list[Tensor] = field(default_factory=list)
    """(D,) hidden state of every loop, where a coda has to wait for the rest of a prompt."""
    likeliest: int = -1
    """The likeliest token after it, under the model itself; -1 until it is read, and where logits are not finite."""
    screened: bool = False
    """Whether the screen has seen it."""
    verdict: "Verdict | Failed | None" = None
    forced: list[int] = field(default_factory=list)
    """Tokens that a screen wants from here on."""


@dataclass(eq=False)
class Family:
    """Samples of one prompt, which is computed for the first of them."""

    waiting: "list[Request]"
    """Those that have not begun yet."""
    first: "Request | None" = None
    """The one that computes the prompt."""
    places: list[int] | None = None
    """Of the prompt, once it is in; its blocks are held until the last sample has begun."""
    logits: Tensor | None = None
    """(V,) after the prompt."""
    loop: int = 0
    """The loop they were read out at."""
    prefix: Prefix | None = None
    prompt_logprobs: list[float] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Request:
    """One sample of one prompt.

    `filled[r]` counts the positions whose keys of loop r (0-based) are in the cache. It never grows with r, so the
    positions that wait for loop r are the run from `filled[r]` to `filled[r - 1]`; a token that goes on to loop r
    takes them along.
    """

    index: int
    """Of its prompt."""
    sample: int
    """Of the prompt's n samples."""
    parts: list[list[int]]
    """The prompt, as one or more pieces that are each read as a prompt of its own."""
    sampling: SamplingParams
    exit: ExitPolicy
    max_loops: int
    """The deepest loop its tokens may reach."""
    end_token_ids: frozenset[int]
    generator: torch.Generator | None
    """None when greedy."""
    catches_up: bool = True
    """Whether positions that left early are computed deeper when a later token needs them (`per_loop`)."""
    speculation: "Speculation | None" = None
    draft_head: "DraftHead | None" = None
    """What drafts are read with, where that is not the LM head."""
    screen: "Screen | None" = None
    family: "Family | None" = None
    """The samples of its prompt, where one computation serves them all."""

    slot: int = -1
    """-1 while waiting, and again when finished."""
    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    reused: int = 0
    """Prompt positions that had been computed already."""
    filled: list[int] = field(default_factory=list)
    part: int = 0
    """Of the prompt, being read; `len(parts)` once the prompt is in."""
    loop_idx: int = 0
    """The loop that its foremost positions pass next; during a prompt, `max_loops` stands for the coda."""
    coda_filled: int = 0
    """Prompt positions that the coda has read."""
    flights: list[Flight] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    """Tokens that a screen wants next."""
    verifying: bool = True
    """Whether all flights go deeper together; False while the last one is drafted on."""
    token_ids: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    """The loop, from 1, at which each generated token was read out."""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    refused: bool = False
    """Whether it has never begun, being too long for the context or for memory: `error` says which."""
    prefix: Prefix | None = None
    """What is kept of its prompt for others."""
    draft_length: int = 0
    """Most tokens drafted in this round."""
    drafted: int = 0
    """Tokens drafted and tested so far, for an adaptive draft length."""
    accepted: int = 0
    draft_reads: int = 0
    """Rows that `draft_head` has read."""
    dropped_loops: int = 0
    """Computed at positions that have been forgotten again."""
    shared: bool = True
    """Whether what is computed for it may serve others; not once the weights have changed on the way."""

    def __post_init__(self) -> None:
        self.prompt_token_ids = [token for part in self.parts for token in part]

    def refuse(self, error: str) -> None:
        """Ends it before it has begun."""
        self.refused, self.error, self.finish_reason = True, error, "error"

    @property
    def prefilling(self) -> bool:
        """Whether its prompt is not in yet."""
        return self.part < len(self.parts)

    @property
    def part_stop(self) -> int:
        """Where the part of the prompt that is being read ends."""
        return sum(len(part) for part in self.parts[: self.part + 1])

    @property
    def num_positions(self) -> int:
        """Positions so far: the prompt, every generated token, and those in flight behind them."""
        return len(self.prompt_token_ids) + len(self.token_ids) + max(0, len(self.flights) - 1)

    @property
    def max_positions(self) -> int:
        """Positions it may come to; the last token generated is never run itself."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens at some positions: of the prompt, generated, and drafted."""
        known = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        if stop <= known:
            return prompt
        start, stop = max(start - known, 0), stop - known
        out = len(self.token_ids)
        drafted = [flight.token for flight in self.flights[:-1]] if stop > out else []
        return [*prompt, *self.token_ids[start:stop], *drafted[max(start - out, 0) : stop - out]]  # type: ignore[list-item]

    def history(self, flight: Flight) -> list[int]:
        """All tokens up to the position of `flight`."""
        return self.tokens(0, flight.position + 1)

    def decoding_segment(self, chunk_size: int) -> Segment:
        """The positions to run through loop `loop_idx` next: the oldest `chunk_size` of those that wait for it."""
        start = self.filled[self.loop_idx]
        return Segment(self.slot, self.loop_idx, start, min(start + chunk_size, self.decoding_stop))

    @property
    def decoding_stop(self) -> int:
        """One past the foremost position that goes on: nothing behind the last undecided flight has to go deeper."""
        if not self.verifying:
            return self.flights[-1].position + 1
        return max(flight.position for flight in self.flights if not flight.loop) + 1

    # --- Drafting -----------------------------------------------------------------------------------------------

    def draws_draft(self, loop: int) -> bool:
        """Whether the flight being drafted on gives a draft at `loop`; the last of a round does not."""
        speculation = self.speculation
        return speculation is not None and loop == speculation.draft_loops and self._room

    def wants_more(self, token: int) -> bool:
        """Whether to put a position behind the one that `token` was just chosen for."""
        return self._room and token not in self.end_token_ids

    @property
    def _room(self) -> bool:
        """Whether one more flight fits into this round and into the text."""
        left = self.sampling.max_tokens - len(self.token_ids)
        return len(self.flights) <= self.draft_length and len(self.flights) < left

    def truncate(self, num_positions: int) -> None:
        """Forgets what was computed for positions from `num_positions` on."""
        self.dropped_loops += sum(max(0, count - num_positions) for count in self.filled)
        self.filled = [min(count, num_positions) for count in self.filled]

    def token_loops(self) -> list[int]:
        """For each generated token, the loops computed by now at the position that it was read out at."""
        if not self.catches_up:
            # The first is read out at the end of the prompt, which has run all loops.
            return [self.max_loops, *self.loops[1:]][: len(self.loops)]
        first = len(self.prompt_token_ids) - 1
        return [sum(n > first + i for n in self.filled) for i in range(len(self.token_ids))]

    def rejected_token_loops(self) -> int:
        """Loops computed by now at positions of drafts that did not stand, or came after the end."""
        if self.speculation is None:
            return 0
        read_out = len(self.prompt_token_ids) - 1 + len(self.token_ids)
        return self.dropped_loops + sum(max(0, count - read_out) for count in self.filled)
