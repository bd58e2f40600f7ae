"""Where two traces part: place by place, and in terms of what the models predict."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from looplm.conversion.trace import Place, Trace
from looplm.errors import UserError

TOLERANCE = 1e-3
"""Largest difference, as a share of the largest entry of both, that rounding in float32 is taken to explain."""

_CHUNK = 64
"""Positions whose distributions are compared at once."""


@dataclass(frozen=True)
class PlaceDifference:
    """Two values of one place."""

    place: Place
    largest: float
    """Largest difference of two entries; infinite where one is not finite and the other is."""
    relative: float
    """The same as a share of the largest entry."""


@dataclass(frozen=True)
class LogitsDifference:
    """Two sets of logits of one loop, in terms of the next token."""

    num_loops: int
    largest: float
    top1_agreement: float
    """Share of positions at which the likeliest token is the same."""
    kl_nats: float
    """Mean over positions of KL(a || b)."""
    loss: tuple[float, float]
    """Mean cross entropy of the next token, of each side, nats."""


@dataclass(frozen=True)
class Comparison:
    """All places that two traces share."""

    names: tuple[str, str]
    tolerance: float
    places: tuple[PlaceDifference, ...]
    logits: tuple[LogitsDifference, ...]

    @property
    def first_parting(self) -> PlaceDifference | None:
        """The first place whose relative difference is above the tolerance; None where there is none."""
        return next((place for place in self.places if not place.relative <= self.tolerance), None)

    def at(self, part: str, loop: int) -> PlaceDifference | None:
        """The largest relative difference among the places of one kind and loop; None where there is none."""
        found = [p for p in self.places if (p.place.part, p.place.loop) == (part, loop)]
        return max(found, key=lambda p: p.relative, default=None)


def compare(a: Trace, b: Trace, tolerance: float = TOLERANCE) -> Comparison:
    """Compares two traces of the same token ids at every place that both have.

    Raises UserError when they are not of the same ids, a place has other sizes, or no place is shared.
    """
    if not torch.equal(a.input_ids, b.input_ids):
        raise UserError(f"{a.name} and {b.name} were run on other token ids; they cannot be compared.")
    mask = a.attention_mask if a.attention_mask is not None else b.attention_mask
    kept = torch.ones_like(a.input_ids, dtype=torch.bool) if mask is None else mask.bool()
    places: list[PlaceDifference] = []
    logits: list[LogitsDifference] = []
    for place, value in a.values.items():
        other = b.values.get(place)
        if other is None:
            continue
        if value.shape != other.shape:
            raise UserError(
                f"{a.name} and {b.name} differ in shape at {place}: {list(value.shape)} and {list(other.shape)}. "
                "Models of another size or vocabulary cannot be compared."
            )
        places.append(difference(place, value[kept], other[kept]))
        if place.part == "logits":
            logits.append(compare_logits(place.loop, value, other, a.input_ids, kept, places[-1].largest))
    if not places:
        raise UserError(f"{a.name} and {b.name} have no place in common that could be compared.")
    return Comparison((a.name, b.name), tolerance, tuple(places), tuple(logits))


def difference(place: Place, a: Tensor, b: Tensor) -> PlaceDifference:
    """How far two values of one place are apart; infinitely far where any of them is not finite."""
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        # Also where both hold the same: nothing that could be compared has been.
        return PlaceDifference(place, math.inf, math.inf)
    largest = (a - b).abs().max().item()
    size = max(a.abs().max().item(), b.abs().max().item())
    return PlaceDifference(place, largest, largest / size if size else 0.0)


def compare_logits(
    num_loops: int, a: Tensor, b: Tensor, input_ids: Tensor, kept: Tensor, largest: float
) -> LogitsDifference:
    """Next-token predictions of two sets of logits (B, S, V), over the positions `kept` (B, S)."""
    rows_a, rows_b = a[kept], b[kept]  # (N, V)
    agreement = (rows_a.argmax(-1) == rows_b.argmax(-1)).double().mean().item()
    kl = 0.0
    for first in range(0, len(rows_a), _CHUNK):  # the distributions of all positions at once would be large
        log_a, log_b = (log_softmax(rows[first : first + _CHUNK].double(), -1) for rows in (rows_a, rows_b))
        kl += (log_a.exp() * (log_a - log_b)).sum().item()
    losses = (next_token_loss(a, input_ids, kept), next_token_loss(b, input_ids, kept))
    return LogitsDifference(num_loops, largest, agreement, max(kl, 0.0) / len(rows_a), losses)


def next_token_loss(logits: Tensor, input_ids: Tensor, kept: Tensor | None = None) -> float:
    """Mean cross entropy in nats of every token but the first of a row, from logits (B, S, V)."""
    targets = input_ids[:, 1:]
    if kept is not None:
        targets = targets.masked_fill(~(kept[:, 1:] & kept[:, :-1]), -100)
    losses = [
        cross_entropy(row[first : first + _CHUNK].float(), target[first : first + _CHUNK], reduction="sum").item()
        for row, target in zip(logits[:, :-1].cpu(), targets.cpu(), strict=True)
        for first in range(0, len(target), _CHUNK)
    ]
    count = int((targets != -100).sum())
    return math.fsum(losses) / count if count else math.nan


def loop_losses(trace: Trace) -> list[float]:
    """Next-token loss of every loop of a trace, in nats."""
    kept = None if trace.attention_mask is None else trace.attention_mask.bool()
    return [
        next_token_loss(trace.values[Place(loop, "logits")], trace.input_ids, kept)
        for loop in range(1, trace.num_loops + 1)
    ]
