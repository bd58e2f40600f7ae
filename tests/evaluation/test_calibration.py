"""Thresholds for a depth, and for a price."""

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.calibration import DEPTH_TOLERANCE, calibrate_depth, calibrate_loss
from looplm.evaluation.exit_rules import gate_exit, hidden_change_exit


@pytest.mark.parametrize("target", [1.0, 1.7, 2.5, 3.3, 4.0])
def test_the_mean_depth_is_the_target(random_record, target):
    record = random_record(num_tokens=4000)
    found = calibrate_depth(record, gate_exit(record), target)
    assert found.mean_loops == pytest.approx(target, abs=0.02)
    assert sum(loop * share for loop, share in enumerate(found.exit_shares, 1)) == pytest.approx(found.mean_loops)
    assert 0 <= found.threshold < 1
    assert (found.threshold == 0) == (target == 1)  # leave at once


def test_epsilon_has_the_other_sign(random_record):
    record = random_record(num_tokens=4000, hidden_change=torch.rand(3, 4000) + 1)
    found = calibrate_depth(record, hidden_change_exit(record), 3.0)
    assert found.mean_loops == pytest.approx(3.0, abs=0.02)
    assert 1 < -found.threshold < 2


def test_the_smallest_depth_within_the_price(random_record):
    # Loss falls by 1, 0.1, 0.01 nats: any exit after loop 2 costs at most 0.11 of 3.89.
    losses = torch.tensor([5.0, 4.0, 3.9, 3.89])[:, None].expand(4, 4000)
    record = random_record(num_tokens=4000, cross_entropy=losses)
    rule = gate_exit(record)
    cheap, dear = calibrate_loss(record, rule, 0.01), calibrate_loss(record, rule, 0.15)
    assert dear.mean_loops < cheap.mean_loops
    for found, most in ((cheap, 0.01), (dear, 0.15)):
        assert 0 < found.loss_increase.value <= most
        assert found.loss_nats <= found.full_loss_nats * (1 + most)
        assert found.loss_increase.low <= found.loss_increase.value <= found.loss_increase.high
        # A little less depth would cost too much.
        shallower = calibrate_depth(record, rule, found.mean_loops - 0.05)
        assert shallower.loss_increase.value > most


def test_targets_that_cannot_be_reached_are_refused(random_record):
    record = random_record(num_tokens=400)
    with pytest.raises(UserError, match="loops 1 to 4"):
        calibrate_depth(record, gate_exit(record), 4.5)
    with pytest.raises(UserError, match="loops 1 to 4"):
        calibrate_depth(record, gate_exit(record), 0.5)
    alike = random_record(num_tokens=400, gate_logits=torch.tensor([-9.0, 9.0, 0.0, 0.0])[:, None].expand(4, 400))
    with pytest.raises(UserError, match="nearest that this gate can do are 2.00 and 3.00"):
        calibrate_depth(alike, gate_exit(alike), 2.5)
    assert DEPTH_TOLERANCE < 0.5
    falling = torch.tensor([5.0, 4.0, 3.0, 2.0])[:, None].expand(4, 400)
    steep = random_record(num_tokens=400, cross_entropy=falling)
    with pytest.raises(UserError, match="least that early exits cost"):
        calibrate_loss(steep, gate_exit(steep), -0.1)
