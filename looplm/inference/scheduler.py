"""Requests from waiting to finished, and the slots they hold while running."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from looplm.inference.exit_policy import ExitPolicy
from looplm.inference.layout import Segment
from looplm.inference.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]
"""stop: an end token or stop string; length: max_tokens; error: the model gave non-finite logits."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One sample of one prompt, and how far it has got.

    `filled[r]` counts the positions whose keys of loop r (0-based) are in the cache. It never grows with r, so the
    positions that wait for loop r are the run from `filled[r]` to `filled[r - 1]`; a token that goes on to loop r
    takes them along.
    """

    index: int
    """Of its prompt."""
    sample: int
    """Of the prompt's n samples."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    exit: ExitPolicy
    max_loops: int
    """The deepest loop its tokens may reach."""
    end_token_ids: frozenset[int]
    generator: torch.Generator | None
    """None when greedy."""

    slot: int = -1
    """-1 while waiting, and again when finished."""
    filled: list[int] = field(default_factory=list)
    loop_idx: int = 0
    """The loop that its newest position passes next."""
    token_ids: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    """The loop, from 1, at which each generated token was read out."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_positions(self) -> int:
        """Positions so far: the prompt, and every generated token."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def max_positions(self) -> int:
        """Positions it may come to; the last token generated is never run itself."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1

    def pending(self, chunk_size: int) -> Segment:
        """The positions to run through loop `loop_idx` next: the oldest `chunk_size` of those that wait for it."""
        start = self.filled[self.loop_idx]
        return Segment(self.slot, self.loop_idx, start, min(start + chunk_size, self.num_positions))

    def append(self, token: int, logprob: float, loop: int) -> None:
        """Takes a new token, read out at `loop`; its own first loop is next."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.loops.append(loop)
        self.loop_idx = 0

    def token_loops(self) -> list[int]:
        """For each generated token, the loops computed by now at the position that it was read out at."""
        first = len(self.prompt_token_ids) - 1
        return [sum(n > first + i for n in self.filled) for i in range(len(self.token_ids))]


class Scheduler:
    """First come, first served: a waiting request runs as soon as a slot is free, and keeps it until it finishes."""

    def __init__(self, requests: Iterable[Request], num_slots: int) -> None:
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.free_slots = list(range(num_slots))

    def admit(self) -> list[Request]:
        """Moves waiting requests into free slots and returns them; their prompts are yet to be run."""
        admitted: list[Request] = []
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            request.filled = [0] * request.max_loops
            admitted.append(request)
        self.running += admitted
        return admitted

    def release(self, request: Request) -> None:
        """Takes a finished request out and frees its slot."""
        self.running.remove(request)
        self.free_slots.append(request.slot)
        request.slot = -1
