"""Exit decisions and counts of work against loops in plain Python and literal examples."""

import math
from collections.abc import Callable

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.exit_curve import (
    covering_thresholds,
    exit_curve,
    gate_statistics,
    loops_at,
    suffix_max,
)
from looplm.evaluation.record import DepthRecord

RecordBuilder = Callable[..., DepthRecord]


def plain_pdf(logits: list[float]) -> list[float]:
    """Exit distribution of one token."""
    pdf, survival = [], 1.0
    for logit in logits[:-1]:
        leave = 1 / (1 + math.exp(-logit))
        pdf.append(survival * leave)
        survival *= 1 - leave
    return [*pdf, survival]


def plain_exit_loop(logits: list[float], threshold: float) -> int:
    total = 0.0
    for loop, p in enumerate(plain_pdf(logits), start=1):
        total += p
        if total >= threshold:
            return loop
    return len(logits)


@pytest.mark.parametrize("threshold", [0.0, 0.123, 0.5, 0.77, 0.999, 1.0, 1.5])
def test_loops_at_a_threshold_equal_plain_python(random_record: RecordBuilder, threshold: float) -> None:
    logits = torch.randn(5, 200, dtype=torch.float64) * 2
    wanted = [plain_exit_loop(column, threshold) if threshold < 1 else 4 for column in logits[:4].T.tolist()]
    assert loops_at(random_record(gate_logits=logits), threshold, 4).tolist() == wanted


def test_one_loop_leaves_after_it(random_record: RecordBuilder) -> None:
    for threshold in (0.0, 0.5, 1.0):
        assert loops_at(random_record(), threshold, 1).eq(1).all()


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_impossible_thresholds_are_refused(random_record: RecordBuilder, threshold: float) -> None:
    with pytest.raises(UserError, match="threshold"):
        exit_curve(random_record(), [threshold])


@pytest.mark.parametrize(
    ("loops", "sequences", "wanted"),
    [
        ([1, 3, 2, 1], [0, 0, 0, 0], [3, 3, 2, 1]),
        ([1, 1, 1, 4], [0, 0, 0, 0], [4, 4, 4, 4]),
        ([4, 1, 1, 1], [0, 0, 0, 0], [4, 1, 1, 1]),
        ([1, 2, 1, 4], [0, 0, 1, 1], [2, 2, 4, 4]),
        ([1, 4, 3, 2], [0, 1, 2, 2], [1, 4, 3, 2]),
        ([2, 1, 3, 1, 2], [3, 3, 7, 7, 9], [2, 1, 3, 1, 2]),
        ([2], [5], [2]),
    ],
)
def test_suffix_max_examples(loops: list[int], sequences: list[int], wanted: list[int]) -> None:
    assert suffix_max(torch.tensor(loops), torch.tensor(sequences)).tolist() == wanted


def test_suffix_max_equals_plain_python() -> None:
    loops, sequences = torch.randint(1, 5, (60,)), torch.randint(6, (60,)).sort().values
    wanted = [
        max(loops[j].item() for j in range(i, 60) if sequences[j] == sequences[i])  # every later position
        for i in range(60)
    ]
    assert suffix_max(loops, sequences).tolist() == wanted


def test_every_figure_equals_plain_python(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=5, trained_loops=4)
    tokens = range(record.num_tokens)
    thresholds = (0.0, 0.4, 0.8, 1.0)
    for threshold, point in zip(thresholds, exit_curve(record, thresholds), strict=True):
        loops = [
            plain_exit_loop(record.gate_logits[:4, i].tolist(), threshold) if threshold < 1 else 4 for i in tokens
        ]
        nats = sum(record.cross_entropy[loops[i] - 1, i].item() for i in tokens)
        computed = [max(loops[j] for j in tokens if j >= i and j // 4 == i // 4) for i in tokens]
        assert point.threshold == threshold
        assert point.mean_loops == pytest.approx(sum(loops) / len(tokens))
        assert point.weight_passes_per_token == point.mean_loops
        assert point.token_loops_per_token == pytest.approx(sum(computed) / len(tokens))
        assert point.bits_per_byte == pytest.approx(nats / math.log(2) / record.document_bytes.sum().item())
        assert point.exit_shares == pytest.approx([loops.count(r) / len(tokens) for r in (1, 2, 3, 4)])


def test_the_ends_of_the_curve_are_fixed_depths(random_record: RecordBuilder) -> None:
    first, *_, last = exit_curve(random_record())
    assert (first.threshold, first.mean_loops, first.token_loops_per_token) == (0, 1, 1)
    assert (last.threshold, last.mean_loops, last.token_loops_per_token) == (1, 4, 4)


def test_covering_thresholds_spread_the_depth_evenly(random_record: RecordBuilder) -> None:
    # A gate with nearly all its mass at the end: round thresholds would all give the same depth.
    logits = torch.randn(4, 8000) - 8
    record = random_record(num_tokens=8000, gate_logits=logits)
    thresholds = covering_thresholds(record, count=21)
    depths = [loops_at(record, threshold, 4).double().mean().item() for threshold in thresholds]
    assert thresholds[0] == 0 and thresholds[-1] == 1
    assert len(thresholds) == 21
    steps = torch.tensor(depths).diff()
    assert steps.max() < 0.16 and depths[0] == 1 and depths[-1] == 4


def test_covering_thresholds_of_one_loop(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=1)
    assert covering_thresholds(record) == (0, 1)
    assert [point.mean_loops for point in exit_curve(record)] == [1, 1]


def test_gate_statistics_equal_plain_python(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=5, trained_loops=4)
    pdfs = [plain_pdf(column) for column in record.gate_logits[:4].T.tolist()]
    expected = [sum(r * p for r, p in enumerate(pdf, start=1)) for pdf in pdfs]
    mean = sum(expected) / len(expected)
    got = gate_statistics(record)
    assert got.mean_exit_pdf == pytest.approx([sum(column) / len(pdfs) for column in zip(*pdfs, strict=True)])
    entropies = [-sum(p * math.log(p) for p in pdf) for pdf in pdfs]
    assert got.mean_entropy_nats == pytest.approx(sum(entropies) / len(pdfs))
    assert got.mean_expected_loops == pytest.approx(mean)
    spread = (sum((value - mean) ** 2 for value in expected) / len(expected)) ** 0.5
    assert got.expected_loops_std == pytest.approx(spread)


def test_more_loops_than_recorded_are_refused(random_record: RecordBuilder) -> None:
    with pytest.raises(UserError, match="the record holds loops 1 to 4"):
        exit_curve(random_record(), num_loops=5)
