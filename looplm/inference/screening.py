"""Screening: looking at what the model is about to say from a shallow loop, before anything is said (Ouro, 7.3).

A screen is a function that sees the next-token distribution of a shallow loop, with the text so far, drafted tokens
included. It may let it pass (None), end the text, forbid tokens, or put other tokens in place of the model's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.inference.request import Flight, Request


class Preview(NamedTuple):
    """What a screen sees: the distribution of the token that would come next."""

    index: int
    """Of the prompt in the list that was given."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated so far; the last `num_drafted` of them are drafts that are not out yet."""
    num_drafted: int
    logprobs: Tensor
    """(V,) float32 or wider, at loop `loop`."""
    loop: int


@dataclass(frozen=True)
class Stop:
    """The text ends before this token; its finish_reason is "screened"."""

    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise UserError(f"reason of Stop is {self.reason!r}; give a text.")


@dataclass(frozen=True)
class Mask:
    """These tokens may not come next."""

    token_ids: tuple[int, ...]

    def __init__(self, token_ids: Sequence[int]) -> None:
        object.__setattr__(self, "token_ids", tuple(token_ids))


@dataclass(frozen=True)
class Redirect:
    """These tokens come next, whatever the model would say; it goes on after them."""

    token_ids: tuple[int, ...]

    def __init__(self, token_ids: Sequence[int]) -> None:
        object.__setattr__(self, "token_ids", tuple(token_ids))


Verdict = Stop | Mask | Redirect


@dataclass(frozen=True)
class Screen:
    """When and by what a text is screened.

    look: sees every token's :class:`Preview` once and returns a verdict or None. If it raises, the request ends with
        finish_reason "error"; others go on.
    loops: the loop, from 1, whose distribution it sees; an earlier one where a token leaves, or is drafted, earlier.
        Costs a read of the LM head where there would be none.
    """

    look: Callable[[Preview], Verdict | None]
    loops: int = 1

    def __post_init__(self) -> None:
        if not callable(self.look):
            raise UserError(f"look of Screen is {self.look!r}; give a function that takes a Preview.")
        if not isinstance(self.loops, int) or isinstance(self.loops, bool) or self.loops < 1:
            raise UserError(f"loops of Screen is {self.loops!r}; depth counts loops from 1.")


@dataclass(frozen=True)
class Failed:
    """A screen that raised, or gave no verdict."""

    message: str


def apply_screen(request: "Request", flight: "Flight", loop: int, logits: Tensor) -> None:
    """Asks the request's screen about `flight` and writes down the verdict."""
    assert request.screen is not None
    generated = request.history(flight)[len(request.prompt_token_ids) :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    preview = Preview(
        index=request.index,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=generated,
        num_drafted=len(generated) - len(request.token_ids),
        logprobs=wide.log_softmax(-1),
        loop=loop,
    )
    flight.screened = True
    try:
        verdict = request.screen.look(preview)
        flight.verdict = None if verdict is None else checked(verdict, logits.shape[-1])
    except Exception as error:  # whatever a user's function does must not end the other requests
        flight.verdict = Failed(f"The screen failed: {type(error).__name__}: {error}")
    if isinstance(flight.verdict, Redirect):
        flight.forced = list(flight.verdict.token_ids)


def checked(verdict: object, vocab_size: int) -> Verdict:
    """`verdict`, if it is one whose tokens exist. Raises UserError otherwise."""
    if not isinstance(verdict, Stop | Mask | Redirect):
        raise UserError(f"it returned {verdict!r}; return None, Stop, Mask or Redirect.")
    if isinstance(verdict, Mask | Redirect):
        if not verdict.token_ids:
            raise UserError(f"{type(verdict).__name__} without tokens; return None to let a token pass.")
        for token in verdict.token_ids:
            if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise UserError(f"{type(verdict).__name__} has {token!r}, which is no token of {vocab_size}.")
        if isinstance(verdict, Mask) and len(set(verdict.token_ids)) == vocab_size:
            raise UserError("Mask forbids every token; return Stop to end the text.")
    return verdict
