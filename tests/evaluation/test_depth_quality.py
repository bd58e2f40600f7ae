"""Planted gates: one that knows, one that guesses, one that is wrong; and the arithmetic by hand."""

import math
from collections.abc import Callable

import pytest
import torch

from looplm.evaluation.depth_quality import depth_quality_gain, mixture_line
from looplm.evaluation.record import DepthRecord

RecordBuilder = Callable[..., DepthRecord]
NUM_TOKENS = 4000


def planted(random_record: RecordBuilder, gate_logits: torch.Tensor, easy: torch.Tensor) -> DepthRecord:
    """Easy tokens lose nothing by leaving at once; hard ones gain the same with every loop."""
    ramp = torch.tensor([3.0, 2.0, 1.0, 0.0])[:, None]
    loss = torch.where(easy, torch.zeros(()), ramp) + torch.rand(NUM_TOKENS) * 0.1
    return random_record(
        num_documents=20,
        num_tokens=NUM_TOKENS,
        cross_entropy=loss,
        gate_logits=gate_logits,
        document_ids=torch.arange(20).repeat_interleave(200),
        document_bytes=torch.full((20,), 600),
    )


def test_a_gate_that_knows_wins(random_record: RecordBuilder) -> None:
    easy = torch.rand(NUM_TOKENS) < 0.5
    logits = torch.where(easy, 3.0, -3.0) + torch.randn(4, NUM_TOKENS)
    quality = depth_quality_gain(planted(random_record, logits, easy))
    assert quality.mean_gain_bits_per_byte.low > 0.05
    assert quality.wins and not quality.loses
    assert quality.worst_gain_bits_per_byte > -1e-9
    assert quality.mean_gain_over_hull_bits_per_byte.low > 0.05


def test_a_gate_that_guesses_neither_wins_nor_loses(random_record: RecordBuilder) -> None:
    easy = torch.rand(NUM_TOKENS) < 0.5
    quality = depth_quality_gain(planted(random_record, torch.randn(4, NUM_TOKENS) * 3, easy))
    interval = quality.mean_gain_bits_per_byte
    assert interval.low < 0 < interval.high
    assert interval.value == pytest.approx(0, abs=0.01)
    assert interval.high - interval.low < 0.05
    assert not quality.wins and not quality.loses


def test_a_gate_that_is_wrong_loses(random_record: RecordBuilder) -> None:
    easy = torch.rand(NUM_TOKENS) < 0.5
    logits = torch.where(easy, -3.0, 3.0) + torch.randn(4, NUM_TOKENS)
    quality = depth_quality_gain(planted(random_record, logits, easy))
    assert quality.loses and not quality.wins
    assert quality.worst_gain_bits_per_byte < -0.05


def test_a_constant_gate_lies_on_the_fixed_depths(random_record: RecordBuilder) -> None:
    quality = depth_quality_gain(random_record(gate_logits=torch.zeros(4, 80)), thresholds=(0.5, 0.75, 0.875))
    assert [gap.mean_loops for gap in quality.gaps] == pytest.approx([1, 1, 2, 3, 4])
    assert [gap.gain_bits_per_byte.value for gap in quality.gaps] == pytest.approx([0] * 5, abs=1e-12)
    assert quality.mean_gain_bits_per_byte.value == pytest.approx(0, abs=1e-12)


def test_two_tokens_by_hand(random_record: RecordBuilder) -> None:
    # Token 0 is right at once, token 1 needs the second loop, and the gate knows: depth 1.5 at no loss.
    record = random_record(
        num_loops=2,
        num_documents=2,
        num_tokens=2,
        cross_entropy=torch.tensor([[0.0, 2.0], [0.0, 0.0]]) * math.log(2),
        gate_logits=torch.tensor([[4.0, -4.0], [0.0, 0.0]]),
        document_ids=torch.tensor([0, 1]),
        sequence_ids=torch.tensor([0, 1]),
        document_bytes=torch.tensor([1, 1]),
    )
    quality = depth_quality_gain(record, thresholds=(0.5,))
    at_one, middle, at_two = quality.gaps
    assert (at_one.mean_loops, middle.mean_loops, at_two.mean_loops) == (1, 1.5, 2)
    assert (at_one.bits_per_byte, middle.bits_per_byte, at_two.bits_per_byte) == pytest.approx((1, 0, 0))
    assert middle.line_bits_per_byte == pytest.approx(0.5)
    assert middle.gain_bits_per_byte.value == pytest.approx(0.5)
    # A triangle of height 1/2 over one loop of depth.
    assert quality.mean_gain_bits_per_byte.value == pytest.approx(0.25)
    # Both documents alike in depth: a resample that draws one of them twice has no gain.
    assert middle.gain_bits_per_byte.low == pytest.approx(0)


def test_the_line_and_the_hull_by_hand() -> None:
    fixed = torch.tensor([[4.0, 3.8, 1.0, 2.0]], dtype=torch.float64)
    depth = torch.tensor([[1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 4.0]], dtype=torch.float64)
    line = mixture_line(fixed, depth, [(0, 1), (1, 2), (2, 3)])
    assert line[0].tolist() == pytest.approx([4, 3.9, 3.8, 2.4, 1.0, 1.25, 2])
    hull = mixture_line(fixed, depth, [(i, j) for i in range(4) for j in range(i + 1, 4)])
    assert hull[0].tolist() == pytest.approx([4, 3.25, 2.5, 1.75, 1.0, 1.25, 2])


def test_a_depth_that_rounds_past_the_last_loop_stays_on_the_line() -> None:
    fixed = torch.tensor([[3.0, 2.0]], dtype=torch.float64)
    depth = torch.tensor([[1 - 1e-15, 2 + 1e-15]], dtype=torch.float64)
    assert mixture_line(fixed, depth, [(0, 1)])[0].tolist() == pytest.approx([3, 2])


def test_the_hull_is_the_harder_rival_where_a_middle_loop_is_bad(random_record: RecordBuilder) -> None:
    # Loop 2 is the worst of all: the line bends up to it, a coin between loops 1 and 3 does not, nor does this gate.
    record = random_record(
        num_loops=3,
        num_documents=2,
        num_tokens=4,
        cross_entropy=torch.tensor([2.0, 5.0, 0.0])[:, None].expand(3, 4) * math.log(2),
        gate_logits=torch.tensor([[20.0, -20.0, 20.0, -20.0], [-20.0] * 4, [0.0] * 4]),
        document_ids=torch.tensor([0, 0, 1, 1]),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        document_bytes=torch.tensor([2, 2]),
    )
    quality = depth_quality_gain(record, thresholds=(0.5,))
    assert [gap.mean_loops for gap in quality.gaps] == [1, 2, 3]
    assert [gap.bits_per_byte for gap in quality.gaps] == pytest.approx([2, 1, 0])
    assert [gap.line_bits_per_byte for gap in quality.gaps] == pytest.approx([2, 5, 0])
    # A triangle of height 4 over two loops of depth, and none.
    assert quality.mean_gain_bits_per_byte.value == pytest.approx(2)
    assert quality.mean_gain_over_hull_bits_per_byte.value == pytest.approx(0, abs=1e-6)


def test_resampling_moves_as_drawing_documents_by_hand_does(random_record: RecordBuilder) -> None:
    # The interval of a text of four documents, twice in a row, is narrower by about the square root of two.
    record = random_record(num_documents=10, num_tokens=400)
    twice = random_record(
        num_documents=20,
        num_tokens=800,
        cross_entropy=record.cross_entropy.repeat(1, 2),
        gate_logits=record.gate_logits.repeat(1, 2),
        document_ids=torch.cat((record.document_ids, record.document_ids + 10)),
        document_bytes=record.document_bytes.repeat(2),
    )
    once, more = (depth_quality_gain(r, thresholds=(0.3, 0.6)).mean_gain_bits_per_byte for r in (record, twice))
    assert once.value == pytest.approx(more.value)
    assert (once.high - once.low) / (more.high - more.low) == pytest.approx(2**0.5, rel=0.15)


def test_one_loop_has_nothing_to_gain(random_record: RecordBuilder) -> None:
    quality = depth_quality_gain(random_record(num_loops=1))
    assert quality.mean_gain_bits_per_byte.value == 0
    assert not quality.wins and not quality.loses
