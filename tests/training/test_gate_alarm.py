"""The alarm: what it calls collapsed, and what it advises."""

import math

import pytest

from looplm.training.gate_alarm import COLLAPSED_SHARE, gate_alarm


@pytest.mark.parametrize(
    "exit_pdf",
    [
        [1.0],
        [0.25, 0.25, 0.25, 0.25],
        [0.97, 0.01, 0.01, 0.01],
        [0.0, 0.5, 0.5],
        [0.01, 0.99],
    ],
)
def test_a_gate_that_uses_more_than_one_loop_is_healthy(exit_pdf: list[float]):
    assert gate_alarm(exit_pdf, 0.1) is None


@pytest.mark.parametrize(
    ("exit_pdf", "loop"),
    [([1.0, 0.0, 0.0], 1), ([0.0, 1.0], 2), ([0.001, 0.998, 0.001, 0.0], 2), ([1e-5, 1e-5, 1e-5, 1 - 3e-5], 4)],
)
def test_a_gate_on_one_loop_is_collapsed(exit_pdf: list[float], loop: int):
    alarm = gate_alarm(exit_pdf, 0.1)
    assert alarm is not None
    assert f"collapsed onto loop {loop}: mean exit pdf {exit_pdf[0]:.3f}, " in alarm
    assert "a longer warmup or a lower learning rate, or a beta above 0.1." in alarm


def test_the_border_is_a_share_of_the_largest_entropy():
    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    inside, outside = 0.998, 0.9985
    assert entropy(outside) < COLLAPSED_SHARE * math.log(2) < entropy(inside)
    assert gate_alarm([inside, 1 - inside], None) is None
    assert gate_alarm([outside, 1 - outside], None) is not None


def test_without_an_entropy_term_it_does_not_advise_a_larger_beta():
    alarm = gate_alarm([1.0, 0.0], None)
    assert alarm is not None and "beta" not in alarm
