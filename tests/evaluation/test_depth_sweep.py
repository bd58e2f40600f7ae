"""Vectorised figures against loops in plain Python."""

import math
from collections.abc import Callable

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.bootstrap import resample_weights
from looplm.evaluation.depth_sweep import depth_sweep, twin_difference
from looplm.evaluation.record import DepthRecord

RecordBuilder = Callable[..., DepthRecord]


def plain_bits_per_byte(record: DepthRecord, loop: int, documents: list[int]) -> float:
    """Bits per byte of a list of documents, in which one may appear twice."""
    nats = size = 0.0
    for document in documents:
        size += record.document_bytes[document].item()
        for token in range(record.num_tokens):
            if record.document_ids[token] == document:
                nats += record.cross_entropy[loop, token].item()
    return nats / math.log(2) / size


def test_every_figure_equals_plain_python(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=5, num_documents=4, trained_loops=3)
    sweep = depth_sweep(record, num_resamples=40, seed=1)
    draws = [
        [document for document, count in enumerate(row) for _ in range(int(count))]
        for row in resample_weights(4, 40, seed=1).tolist()
    ]
    tokens = range(record.num_tokens)
    assert sweep.reference_loops == 3
    for loop, point in enumerate(sweep.points):
        assert point.num_loops == loop + 1
        assert point.bits_per_byte == pytest.approx(plain_bits_per_byte(record, loop, [0, 1, 2, 3]))
        resampled = torch.tensor([plain_bits_per_byte(record, loop, draw) for draw in draws], dtype=torch.float64)
        assert point.bits_per_byte_stderr == pytest.approx(resampled.std().item(), rel=1e-6)
        guess = record.predictions[loop].tolist()
        assert point.agreement == sum(guess[i] == record.predictions[2, i].item() for i in tokens) / len(tokens)
        assert point.accuracy == sum(guess[i] == record.targets[i].item() for i in tokens) / len(tokens)
        assert point.loss_nats == pytest.approx(sum(record.cross_entropy[loop].tolist()) / len(tokens))
        if loop == 4:
            assert point.loss_change_nats is point.loss_change_nats_stderr is point.worsened_share is None
            continue
        change = [(record.cross_entropy[loop + 1, i] - record.cross_entropy[loop, i]).item() for i in tokens]
        assert point.loss_change_nats == pytest.approx(sum(change) / len(tokens))
        assert point.worsened_share == sum(value > 0 for value in change) / len(tokens)
        by_document = [[change[i] for i in tokens if record.document_ids[i] == m] for m in range(4)]
        means = [
            sum(sum(by_document[m]) for m in draw) / max(1, sum(len(by_document[m]) for m in draw)) for draw in draws
        ]
        spread = torch.tensor(means, dtype=torch.float64).std().item()
        assert point.loss_change_nats_stderr == pytest.approx(spread, rel=1e-5)


def test_agreement_of_a_shallow_record_is_with_its_own_last_loop(random_record: RecordBuilder) -> None:
    sweep = depth_sweep(random_record(num_loops=2, trained_loops=4))
    assert sweep.reference_loops == 2
    assert sweep.points[-1].agreement == 1
    assert sweep.trained_loops == 4


def test_best_depth_and_its_gain(random_record: RecordBuilder) -> None:
    loss = torch.tensor([2.0, 1.0, 1.5, 1.0])[:, None].expand(4, 80)
    sweep = depth_sweep(random_record(cross_entropy=loss))
    assert sweep.best.num_loops == 2
    assert sweep.gain_share == pytest.approx(0.5)


def test_change_from_the_first_loop_is_paired(random_record: RecordBuilder) -> None:
    # Documents differ wildly in difficulty, depths by a constant: only the standard error sees the documents.
    record = random_record(num_documents=6, document_bytes=torch.full((6,), 40))
    loss = record.document_ids * 5.0 + torch.tensor([1.0, 0.5])[:, None]
    sweep = depth_sweep(
        random_record(
            num_documents=6,
            document_ids=record.document_ids,
            document_bytes=record.document_bytes,
            cross_entropy=loss,
        )
    )
    first, second = sweep.points
    change = second.change_from_first_bits_per_byte
    assert change.value == pytest.approx(-40 / math.log(2) / 240)
    assert 2 * change.value < change.low < change.high < 0.5 * change.value
    assert first.bits_per_byte_stderr > 10 * (change.high - change.low) / 4
    assert first.change_from_first_bits_per_byte.low == first.change_from_first_bits_per_byte.high == 0


def test_one_recorded_loop_has_no_next_one(random_record: RecordBuilder) -> None:
    (point,) = depth_sweep(random_record(num_loops=1)).points
    assert point.loss_change_nats is point.loss_change_nats_stderr is point.worsened_share is None


def test_twin_difference_is_paired(random_record: RecordBuilder) -> None:
    # Documents differ wildly in difficulty, the two models by a constant: the interval must not see the documents.
    record = random_record(num_documents=6, document_bytes=torch.full((6,), 40))
    hard = record.document_ids.float()[None] * 5
    ours = random_record(
        num_documents=6,
        document_ids=record.document_ids,
        document_bytes=record.document_bytes,
        cross_entropy=hard.expand(4, 80),
    )
    twin = random_record(
        num_documents=6,
        document_ids=record.document_ids,
        document_bytes=record.document_bytes,
        cross_entropy=hard + 1,
        num_loops=1,
    )
    difference = twin_difference(ours, 4, twin)
    assert difference.value == pytest.approx(-80 / math.log(2) / 240)
    assert difference.high < 0
    assert difference.low > 2 * difference.value


def test_twins_on_other_documents_are_refused(random_record: RecordBuilder) -> None:
    with pytest.raises(UserError, match="different held-out documents"):
        twin_difference(random_record(num_documents=3), 1, random_record(num_documents=4))


def test_one_document_has_no_standard_error(random_record: RecordBuilder) -> None:
    with pytest.raises(UserError, match="at least two"):
        depth_sweep(random_record(num_documents=1))
