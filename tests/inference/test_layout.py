"""How runs of positions become the rectangle of one pass."""

import pytest
import torch

from looplm.inference.layout import Segment, lay_out, piece_width

CPU = torch.device("cpu")


def covered(segments):
    """Every (slot, loop, position) of the layout's real columns, in order."""
    layout = lay_out(segments, CPU)
    real = torch.ones_like(layout.positions, dtype=torch.bool) if layout.real is None else layout.real
    loops = torch.as_tensor(layout.loop_idx).expand_as(layout.slots)
    return [
        (slot, loop, position)
        for slot, loop, positions, keep in zip(layout.slots, loops, layout.positions, real, strict=True)
        for position in positions[keep]
    ]


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 0, 7, 8)],
        [Segment(2, 1, 3, 9)],
        [Segment(0, 0, 7, 8), Segment(1, 2, 3, 8), Segment(2, 1, 0, 2)],
        [Segment(slot, 0, 5, 6) for slot in range(9)] + [Segment(9, 3, 0, 50)],
        [Segment(0, 0, 0, 100), Segment(1, 0, 0, 99), Segment(2, 0, 0, 1)],
    ],
)
def test_every_position_stands_in_it_once(segments):
    expected = [(s.slot, s.loop_idx, position) for s in segments for position in range(s.start, s.stop)]
    assert covered(segments) == expected
    layout = lay_out(segments, CPU)
    for segment, row in zip(segments, layout.last_rows, strict=True):
        assert layout.positions[row, -1] == segment.stop - 1 and layout.slots[row] == segment.slot
    assert layout.num_keys == max(segment.stop for segment in segments)


def test_padding_stands_on_the_left():
    layout = lay_out([Segment(0, 1, 4, 7), Segment(1, 1, 8, 10)], CPU)
    assert layout.positions.tolist() == [[4, 5, 6], [0, 8, 9]]
    assert layout.real is not None and layout.real.tolist() == [[True] * 3, [False, True, True]]


def test_one_loop_for_all_rows_where_they_agree():
    assert lay_out([Segment(0, 2, 0, 1), Segment(1, 2, 0, 4)], CPU).loop_idx == 2
    mixed = lay_out([Segment(0, 2, 0, 1), Segment(1, 0, 3, 4)], CPU).loop_idx
    assert torch.equal(torch.as_tensor(mixed), torch.tensor([2, 0]))


@pytest.mark.parametrize(
    ("segments", "needs_mask"),
    [
        ([Segment(0, 0, 5, 6)], False),  # a new token reads all there is
        ([Segment(0, 0, 0, 6)], False),  # a prompt from its start is plainly causal
        ([Segment(0, 0, 3, 6)], True),
        ([Segment(0, 0, 5, 6), Segment(1, 0, 5, 6)], False),
        ([Segment(0, 0, 5, 6), Segment(1, 0, 4, 5)], True),
        ([Segment(0, 0, 0, 6), Segment(1, 0, 0, 5)], True),
    ],
)
def test_the_mask_hides_what_comes_after(segments, needs_mask):
    layout = lay_out(segments, CPU)
    mask = layout.mask()
    assert (mask is not None) == needs_mask
    if mask is not None:
        keys = torch.arange(layout.num_keys)
        assert torch.equal(mask[:, 0], keys <= layout.positions[..., None])


@pytest.mark.parametrize(
    ("lengths", "width"),
    [
        ([1, 1, 1], 1),
        ([37], 37),  # a single row has nothing to pad
        ([20, 20, 20], 20),
        ([1] * 31 + [25], 2),  # not 31 rows of 24 columns of padding
        ([1, 400], 32),  # nor 400 rows that gather their keys one by one
    ],
)
def test_the_width_is_a_bargain_between_padding_and_rows(lengths, width):
    assert piece_width(lengths) == width
