from collections.abc import Callable

import pytest
import torch

from looplm.evaluation.groups import accuracy_by_group
from looplm.evaluation.record import DepthRecord


def test_groups_by_hand(random_record: Callable[..., DepthRecord]) -> None:
    record = random_record(
        num_loops=2,
        num_tokens=4,
        predictions=torch.tensor([[1, 0, 0, 2], [1, 1, 0, 2]]),
        targets=torch.tensor([1, 1, 2, 2]),
        # Hazard of loop 1: 1/2, 1/2, 0.75, 0.25, so expected loops 1.5, 1.5, 1.25, 1.75.
        gate_logits=torch.tensor([[0.0, 0.0, 1.0986123, -1.0986123], [0.0, 0.0, 0.0, 0.0]]),
    )
    first, second = accuracy_by_group(record, [7, 3, 7, 3])
    assert (first.group, second.group) == (3, 7)
    assert (first.num_tokens, second.num_tokens) == (2, 2)
    assert first.accuracy_by_loop == (0.5, 1.0)
    assert second.accuracy_by_loop == (0.5, 0.5)
    assert (first.expected_loops, second.expected_loops) == pytest.approx((1.625, 1.375))
    assert (first.expected_loops_std, second.expected_loops_std) == pytest.approx((0.125, 0.125))
