"""What counts as divergence, and what becomes of such a step."""

import json
import math

import pytest

from looplm.training.divergence import LEAST_DEVIATION, DivergenceWatch
from looplm.training.stage_recipe import DivergenceRecipe


def watch(**options: object) -> DivergenceWatch:
    return DivergenceWatch(DivergenceRecipe.model_validate({"window": 8} | options))


STEADY = [2.0, 2.2, 1.8, 2.0, 2.1, 1.9, 2.0, 2.0]


def steady(**options: object) -> DivergenceWatch:
    """A watch whose window is full, mean 2 and deviation 0.112."""
    watched = watch(**options)
    assert {watched.judge(loss, 1.0).action for loss in STEADY} == {"go"}
    return watched


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_follows_on_nan(policy: str, loss: float, grad_norm: float) -> None:
    verdict = watch(on_nan=policy).judge(loss, grad_norm)
    assert verdict.action == policy
    assert verdict.reason == f"loss {loss}, gradient norm {grad_norm}"


@pytest.mark.parametrize("policy", ["warn", "skip", "stop"])
def test_a_jump_beyond_the_deviations_follows_on_spike(policy: str) -> None:
    border = 2.0 + 6 * math.sqrt(0.1 / 8)
    assert steady(on_spike=policy).judge(border - 1e-6, 1.0).action == "go"
    verdict = steady(on_spike=policy).judge(border + 0.01, 1.0)
    assert verdict.action == policy
    assert "6.1 standard deviations above the mean 2.0000 of the last 8 steps" in verdict.reason


def test_ignored_spikes_are_not_even_counted() -> None:
    watched = steady(on_spike="ignore")
    assert watched.judge(100.0, 1.0).action == "go" and watched.num_spikes == 0


def test_a_fall_is_no_spike_and_a_short_history_knows_none() -> None:
    assert steady(on_spike="stop").judge(0.1, 1.0).action == "go"
    young = watch(on_spike="stop")
    assert {young.judge(loss, 1.0).action for loss in (*STEADY[:7], 100.0)} == {"go"}


def test_a_loss_without_spread_is_given_some() -> None:
    for factor, action in ((5.9, "go"), (6.1, "warn")):
        flat = watch()
        for _ in range(8):
            flat.judge(2.0, 1.0)
        assert flat.judge(2.0 * (1 + factor * LEAST_DEVIATION), 1.0).action == action


def test_skips_in_a_row_end_the_run() -> None:
    watched = steady(on_nan="skip", max_skips=2)
    actions = [watched.judge(loss, 1.0).action for loss in (math.nan, math.nan, 2.0, math.nan, math.nan, math.nan)]
    assert actions == ["skip", "skip", "go", "skip", "skip", "stop"]
    assert watched.num_skipped == 5


def test_the_last_of_too_many_skips_says_so() -> None:
    watched = watch(on_nan="skip", max_skips=1)
    watched.judge(math.nan, 1.0)
    assert watched.judge(math.nan, 1.0).reason.endswith("after 1 skipped steps in a row")


def test_skipped_losses_stay_out_of_the_window_and_warned_ones_enter() -> None:
    """So a loss that has moved for good stops being reported."""
    skipping, warning = steady(on_spike="skip", max_skips=100), steady(on_spike="warn")
    assert [skipping.judge(3.0, 1.0).action for _ in range(4)] == ["skip"] * 4
    assert [warning.judge(3.0, 1.0).action for _ in range(4)] == ["warn", "go", "go", "go"]
    assert (skipping.num_spikes, warning.num_spikes) == (4, 1)


def test_a_watch_goes_on_from_its_state() -> None:
    first = steady(on_spike="skip")
    first.judge(9.0, 1.0)
    second = watch(on_spike="skip")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert (second.skips_in_a_row, second.num_skipped, second.num_spikes) == (1, 1, 1)
    assert second.judge(9.0, 1.0) == first.judge(9.0, 1.0)
