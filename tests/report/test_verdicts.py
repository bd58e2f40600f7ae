"""Every finding in every direction it can fall."""

from dataclasses import replace

import pytest

from looplm.evaluation.bootstrap import Interval
from looplm.evaluation.exit_curve import GateStatistics
from looplm.report import verdicts
from looplm.report.schema import QuickstartReport

ABOVE, BELOW, ACROSS = Interval(0.02, 0.01, 0.03), Interval(-0.02, -0.03, -0.01), Interval(0.001, -0.01, 0.012)
ACROSS_BELOW = Interval(-0.001, -0.012, 0.01)


def with_bits(report: QuickstartReport, *bits: float, interval: Interval = BELOW):  # noqa: ANN201
    points = tuple(
        replace(point, bits_per_byte=value, change_from_first_bits_per_byte=interval)
        for point, value in zip(report.trained.sweep.points, bits, strict=False)
    )
    return replace(report.trained.sweep, points=points, trained_loops=4)


def test_depth_that_pays_and_depth_that_does_not(report: QuickstartReport) -> None:
    pays = verdicts.depth_verdict(with_bits(report, 2.0, 1.9, 1.8, 1.85))
    assert pays.good is True and "loop 3 needs 10.0% fewer" in pays.text
    unsure = verdicts.depth_verdict(with_bits(report, 2.0, 1.9, 1.8, 1.85, interval=ACROSS))
    assert unsure.good is None and "if at all" in unsure.text
    assert verdicts.depth_verdict(with_bits(report, 1.7, 1.9, 1.8, 1.85)).good is False
    # A better depth beyond training is no merit of the trained depth.
    assert verdicts.depth_verdict(with_bits(report, 1.7, 1.9, 1.8, 1.85, 1.2)).good is False


def test_beyond_the_trained_depth(report: QuickstartReport) -> None:
    worse = verdicts.beyond_verdict(with_bits(report, 2.0, 1.9, 1.8, 1.8, 1.9, 1.98))
    assert worse is not None and "10.0% higher at loop 6" in worse.text
    better = verdicts.beyond_verdict(with_bits(report, 2.0, 1.9, 1.8, 1.8, 1.62))
    assert better is not None and "10.0% lower at loop 5" in better.text
    assert verdicts.beyond_verdict(with_bits(report, 2.0, 1.9, 1.8, 1.8)) is None


def test_anytime(report: QuickstartReport) -> None:
    sweep = report.trained.sweep
    falls = replace(sweep, points=tuple(replace(point, loss_change_nats=-0.1) for point in sweep.points))
    assert verdicts.anytime_verdict(falls).good is True
    rises = verdicts.anytime_verdict(sweep)
    assert rises.good is False and "loop 3 to 4:" in rises.text


@pytest.mark.parametrize(
    ("interval", "good", "words"),
    [
        (BELOW, True, "beats its one-loop twin"),
        (ABOVE, False, "twin is better"),
        (ACROSS, None, "too close"),
        (ACROSS_BELOW, None, "too close"),
    ],
)
def test_twin(report: QuickstartReport, interval: Interval, good: bool | None, words: str) -> None:
    assert report.trained.twin is not None
    twin = report.trained.twin.model_copy(update={"difference_bits_per_byte": interval})
    verdict = verdicts.twin_verdict(twin, 4)
    assert verdict.good is good and words in verdict.text and f"{interval.low:+.4f}" in verdict.text


def test_entropy_and_spread_at_their_floors(report: QuickstartReport) -> None:
    gate = report.trained.gate
    assert verdicts.entropy_verdict(replace(gate, mean_entropy_nats=0.42)).good is True  # 0.3 ln 4 is 0.4159
    collapsed = verdicts.entropy_verdict(replace(gate, mean_entropy_nats=0.41))
    assert collapsed.good is False and "has collapsed" in collapsed.text
    assert verdicts.spread_verdict(replace(gate, expected_loops_std=0.1)).good is True
    assert verdicts.spread_verdict(replace(gate, expected_loops_std=0.099)).good is False


@pytest.mark.parametrize(
    ("interval", "good", "words"),
    [
        (ABOVE, True, "gate beats"),
        (BELOW, False, "Fixed depths beat"),
        (ACROSS, None, "too close"),
        (ACROSS_BELOW, None, "too close"),
    ],
)
def test_quality_and_hull(report: QuickstartReport, interval: Interval, good: bool | None, words: str) -> None:
    quality = replace(
        report.trained.quality, mean_gain_bits_per_byte=interval, mean_gain_over_hull_bits_per_byte=interval
    )
    assert verdicts.quality_verdict(quality).good is good and words in verdicts.quality_verdict(quality).text
    assert verdicts.hull_verdict(quality).good is good


def test_curve_above_the_line(report: QuickstartReport) -> None:
    quality = report.trained.quality
    first, inner, last = quality.gaps[0], quality.gaps[5], quality.gaps[-1]

    def verdict(*gains: Interval) -> verdicts.Verdict:
        inside = tuple(replace(inner, gain_bits_per_byte=gain) for gain in gains)
        return verdicts.curve_verdict(replace(quality, gaps=(first, *inside, last)))

    assert verdict(ABOVE, ABOVE).good is True
    assert verdict(ABOVE, Interval(-0.001, -0.01, 0.01)).good is None
    clearly = verdict(ABOVE, BELOW, Interval(-0.001, -0.01, 0.01))
    assert clearly.good is False and "2 of 3 thresholds (beyond the interval at 1)" in clearly.text


def test_fold_depth_must_grow_with_k(report: QuickstartReport) -> None:
    easy, *middle, hard = report.fold.groups
    deeper = (replace(easy, expected_loops=1.2), *middle, replace(hard, expected_loops=3.4))
    assert verdicts.fold_verdict(report.fold.model_copy(update={"groups": deeper})).good is True
    level = (replace(easy, expected_loops=2.0), *middle, replace(hard, expected_loops=2.0))
    assert verdicts.fold_verdict(report.fold.model_copy(update={"groups": level})).good is False


def test_all_findings_of_a_model_with_and_without_twin(report: QuickstartReport) -> None:
    assert len(verdicts.text_model_verdicts(report.trained)) == len(verdicts.text_model_verdicts(report.shipped)) + 1


def test_work_tells_passes_from_token_loops(report: QuickstartReport) -> None:
    point = replace(
        report.trained.thresholds[5],
        threshold=0.5,
        mean_loops=2.5,
        weight_passes_per_token=2.5,
        token_loops_per_token=3.6,
    )
    text = verdicts.work_verdict((report.trained.thresholds[0], point, report.trained.thresholds[-1])).text
    assert "threshold 0.5" in text and "saves 38% of the weight passes, and 10% of the token-loops: 3.60" in text


def test_a_loop_left_behind_in_training_is_said() -> None:
    even = GateStatistics(
        mean_exit_pdf=(0.2, 0.3, 0.3, 0.2), mean_entropy_nats=1.3, mean_expected_loops=2.5, expected_loops_std=0.2
    )
    assert verdicts.first_loop_verdict(even) is None
    left = replace(even, mean_exit_pdf=(0.03, 0.24, 0.35, 0.38))
    found = verdicts.first_loop_verdict(left)
    assert found is not None and found.good is None and "only 3% of the exit probability" in found.text
    assert verdicts.first_loop_verdict(replace(even, mean_exit_pdf=(1.0,))) is None
