"""Scaling fits of losses made from known laws."""

import numpy as np
import pytest

from looplm.analysis.power_law import LOOP_LAW, PARCAE_LAW, Law, Points, fit_law
from looplm.analysis.runs import RunPoint
from looplm.analysis.scaling import bootstrap, falling_curves, law_report, scaling_study, step_points
from looplm.errors import UserError

TRUTH = {"E": 1.7, "A": 400.0, "alpha": 0.34, "t1": 5e6, "B": 1200.0, "beta": 0.36, "t2": 3e8}
TRUTH |= {"C": 0.6, "gamma": 0.9, "t3": 0.5}
SIZES, DEPTHS = (53e6, 134e6, 374e6, 778e6, 1364e6), (1, 2, 4, 8)
PUBLISHED_PARCAE = {
    "140M": {"E": 2.662, "A": 522733.307, "a": 0.771, "B": 25420.102, "b": 0.525},
    "370M": {"E": 2.439, "A": 832134.346, "a": 0.775, "B": 6386.865, "b": 0.448},
}
"""Parcae, arXiv 2604.12946, section 5.2."""


def grid(law: Law, truth: dict[str, float], noise: float, *axes: tuple[float, ...], seed: int = 0) -> Points:
    """Losses on the whole grid, with independent relative errors; a curve is all data sizes of the rest."""
    columns = [column.ravel() for column in np.meshgrid(*axes, indexing="ij")]
    values = {term.variable: column for term, column in zip(law.terms, columns, strict=True)}
    rest = np.stack([column for name, column in values.items() if name != "tokens"])
    curves = np.unique(rest, axis=1, return_inverse=True)[1].ravel()
    errors = noise * np.random.default_rng(seed).standard_normal(len(curves))
    return Points(values, law.predict(truth, values) * np.exp(errors), curves)


def total_grid(noise: float, depths: tuple[float, ...] = DEPTHS, seed: int = 0) -> Points:
    return grid(LOOP_LAW, TRUTH, noise, SIZES, tuple(np.geomspace(1e9, 2e10, 8)), depths, seed=seed)


@pytest.fixture(scope="module")
def report():
    """The fit of a full grid with errors of 0.02 %."""
    return law_report("total", LOOP_LAW, total_grid(2e-4), num_resamples=60)


def test_held_out_sizes_data_and_depths_are_predicted_within_one_percent(report):
    assert [hold_out.by for hold_out in report.hold_outs] == ["size", "data", "depth"]
    for hold_out in report.hold_outs:
        assert hold_out.worst_error < 0.01
        assert hold_out.r2 > 0.99
    by_size = report.hold_outs[0]
    assert (by_size.limit, by_size.num_fitted, by_size.num_held_out) == (778e6, 4 * 8 * 4, 8 * 4)


def test_exponents_come_back_inside_narrow_intervals(report):
    for name in ("alpha", "beta", "gamma"):
        parameter = report.parameters[name]
        assert parameter.identified
        assert parameter.interval.low <= TRUTH[name] <= parameter.interval.high
        assert parameter.interval.high - parameter.interval.low < 0.2 * TRUTH[name]
    assert report.parameters["E"].value == pytest.approx(TRUTH["E"], rel=0.01)
    assert report.r2 > 0.9999


def test_without_errors_every_parameter_comes_back():
    fit = fit_law(LOOP_LAW, total_grid(0.0))
    assert fit.parameters == pytest.approx(TRUTH, rel=1e-6)
    assert fit.r2 == pytest.approx(1.0)
    assert not fit.free


def test_errors_that_hide_a_parameter_get_it_named():
    report = law_report("total", LOOP_LAW, total_grid(5e-3), num_resamples=60)
    assert {"gamma", "t3", "C", "t1", "t2"} <= set(report.unidentified)
    for name in report.unidentified:
        assert report.parameters[name].note
    # The losses themselves are still predicted.
    assert report.mean_error < 0.005


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    inside = []
    for seed in range(10):
        points = grid(
            PARCAE_LAW, PUBLISHED_PARCAE["140M"], 2e-3, (1e8, 2e8, 4e8, 8e8), (1e9, 3e9, 1e10, 3e10), seed=seed
        )
        intervals = bootstrap(
            fit_law(PARCAE_LAW, points, num_starts=60, num_refined=2), points, num_resamples=40, seed=seed
        )
        inside += [intervals[name].low <= PUBLISHED_PARCAE["140M"][name] <= intervals[name].high for name in "ab"]
    assert sum(inside) >= 16  # of 20


def test_two_depths_leave_their_term_open():
    fit = fit_law(LOOP_LAW, total_grid(0.0, depths=(2, 4)))
    assert {"E", "C", "gamma"} <= fit.free
    assert not {"alpha", "beta"} & fit.free
    assert "2 values of loops" in fit.dropped["t3"]
    report = law_report("total", LOOP_LAW, total_grid(1e-4, depths=(2, 4)), num_resamples=20)
    assert {"E", "C", "gamma", "t3"} <= set(report.unidentified)
    assert report.parameters["alpha"].identified


def test_one_depth_is_part_of_the_floor():
    fit = fit_law(LOOP_LAW, total_grid(0.0, depths=(4,)))
    assert set(fit.dropped) == {"C", "gamma", "t3"}
    assert fit.parameters["E"] == pytest.approx(TRUTH["E"] + TRUTH["C"] / 4.5 ** TRUTH["gamma"], rel=1e-5)


def test_outliers_move_nothing():
    points = total_grid(0.0)
    spoiled = points.loss.copy()
    spoiled[::20] *= 1.5
    fit = fit_law(LOOP_LAW, points.with_loss(spoiled))
    assert fit.parameters["alpha"] == pytest.approx(TRUTH["alpha"], rel=0.02)
    assert fit.parameters["beta"] == pytest.approx(TRUTH["beta"], rel=0.02)


@pytest.mark.parametrize("size", PUBLISHED_PARCAE)
def test_the_published_parcae_constants_come_back(size):
    core = 1e8 if size == "140M" else 3e8
    unrolled = tuple(4e7 + core * loops for loops in (1, 2, 4, 6, 8, 12))
    tokens = tuple(np.geomspace(2e9, 3e10, 6))
    exact = fit_law(PARCAE_LAW, grid(PARCAE_LAW, PUBLISHED_PARCAE[size], 0.0, unrolled, tokens))
    assert exact.parameters == pytest.approx(PUBLISHED_PARCAE[size], rel=1e-5)
    noisy = law_report("Parcae", PARCAE_LAW, grid(PARCAE_LAW, PUBLISHED_PARCAE[size], 3e-4, unrolled, tokens))
    for name in ("a", "b", "E"):
        assert noisy.parameters[name].identified
        interval = noisy.parameters[name].interval
        assert interval.low <= PUBLISHED_PARCAE[size][name] <= interval.high


def runs_of(depths: tuple[int, ...], noise: float = 0.0) -> list[RunPoint]:
    """Runs whose loops follow the law in r, and whose total is what their exit pdf makes of it."""
    rng = np.random.default_rng(0)
    found = []
    for depth in depths:
        pdf = tuple((np.arange(1, depth + 1) / (depth * (depth + 1) / 2)).tolist())
        for size in SIZES:
            for tokens in np.geomspace(1e9, 2e10, 6):
                at = {"parameters": np.full(depth, size), "tokens": np.full(depth, tokens)}
                at["loops"] = np.arange(1.0, depth + 1)
                losses = LOOP_LAW.predict(TRUTH, at) * np.exp(noise * rng.standard_normal(depth))
                found.append(
                    RunPoint(
                        f"{size}-{depth}", int(size), int(tokens), depth, tuple(losses.tolist()), pdf, int(size / 2)
                    )
                )
    return found


def test_the_total_loss_follows_from_the_steps():
    study = scaling_study(runs_of((2, 4, 8), noise=1e-4), num_resamples=2)
    assert sorted(study.steps) == [2, 4, 8]
    for depth, found in study.total_from_steps.items():
        assert found.r2 > 0.999
        assert found.mean_error < 1e-3
        assert len(found.mean_exit_pdf) == depth
    assert study.steps[8].parameters["gamma"].value == pytest.approx(TRUTH["gamma"], rel=0.05)
    assert study.total is not None and study.parcae is not None
    assert study.parcae.formula == "E + A/(unrolled_parameters)^a + B/(tokens)^b"


def test_what_cannot_be_fitted_is_said():
    blind = [
        RunPoint(run.run, run.num_parameters, run.num_tokens, 4, run.loop_losses, loss=3.0) for run in runs_of((4,))
    ]
    study = scaling_study(blind, num_resamples=2)
    assert study.parcae is None and not study.total_from_steps
    assert any("core_parameters" in note for note in study.notes)
    assert any("exit pdf" in note for note in study.notes)
    with pytest.raises(UserError, match="No law can be fitted"):
        scaling_study(runs_of((4,))[:1])


def test_curves_that_rise_are_left_out():
    points = step_points(runs_of((4,)))
    loss = points.loss.copy()
    rising = points.curves == points.curves[0]
    loss[rising] = np.sort(loss[rising])
    kept, dropped = falling_curves(points.with_loss(loss))
    assert dropped == 1
    assert len(kept) == len(points) - rising.sum()
