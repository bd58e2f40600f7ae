"""Runs of positions from different requests, laid out as the rectangle that one pass of the model takes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from looplm.model.cache import LoopIndex

ROW_COST = 4
"""What one more row costs a pass, in columns of one row: its keys have to be brought together."""


class Segment(NamedTuple):
    """Consecutive positions of one request that pass the same loop together."""

    slot: int
    loop_idx: int
    start: int
    stop: int

    @property
    def num_positions(self) -> int:
        return self.stop - self.start


class Layout(NamedTuple):
    """Rows of one pass. A row holds a piece of a segment, right-aligned, with padding to its left."""

    pieces: list[Segment]
    """One per row; the pieces of a segment follow each other."""
    loop_idx: LoopIndex
    """One for all rows where they agree."""
    rows: Int[Tensor, "B 4"]
    """The pieces as numbers."""
    slots: Int[Tensor, " B"]
    positions: Int[Tensor, "B S"]
    """0 at padding."""
    real: Bool[Tensor, "B S"] | None
    """False at padding; None when there is none."""
    num_keys: int
    """Positions that the furthest row may read."""
    last_rows: list[int]
    """For each segment, the row that ends with its last position."""

    def mask(self) -> Bool[Tensor, "B 1 S M"] | None:
        """True where the key's position is not after the query's; None where plain attention does the same."""
        width = self.positions.shape[1]
        whole = self.real is None and all(piece.stop == self.num_keys for piece in self.pieces)
        if whole and width in (1, self.num_keys):
            return None
        keys = torch.arange(self.num_keys, device=self.positions.device)
        return (keys <= self.positions[:, :, None])[:, None]


def lay_out(segments: Sequence[Segment], device: torch.device, width: int | None = None) -> Layout:
    """Lays out `segments`, cutting long ones into pieces where padding the others to their length would cost more.

    width: columns; None finds the cheapest. With 1, every position is a row.
    """
    width = width or piece_width([segment.num_positions for segment in segments])
    pieces: list[Segment] = []
    last_rows: list[int] = []
    for slot, loop_idx, start, stop in segments:
        # Cut from the end, so that only the first piece may be short.
        ends = range(stop - (stop - start - 1) // width * width, stop + 1, width)
        pieces += [Segment(slot, loop_idx, max(start, end - width), end) for end in ends]
        last_rows.append(len(pieces) - 1)
    rows = torch.tensor(pieces, device=device)
    slots, loops, starts, stops = rows.T
    positions = stops[:, None] + torch.arange(-width, 0, device=device)
    real = None
    if any(piece.num_positions < width for piece in pieces):
        real = positions >= starts[:, None]
        positions = torch.where(real, positions, 0)
    alike = all(piece.loop_idx == pieces[0].loop_idx for piece in pieces)
    loop_idx = pieces[0].loop_idx if alike else loops
    return Layout(pieces, loop_idx, rows, slots, positions, real, max(piece.stop for piece in pieces), last_rows)


def piece_width(lengths: Sequence[int]) -> int:
    """Columns of the cheapest rectangle: a power of two, or the longest length.

    Padding every row to the longest would let one request that catches up on many positions multiply the work of
    all; one position a row would gather its keys anew for each.
    """
    longest = max(lengths)
    if longest == 1 or len(lengths) == 1:
        return longest
    widths = [*(2**i for i in range((longest - 1).bit_length())), longest]
    return min(widths, key=lambda width: sum(-(-n // width) for n in lengths) * (width + ROW_COST))
