"""Figures hold together at the sizes a smoke run gives them, and take their colours from the page."""

import re
from xml.etree import ElementTree

import pytest

from looplm.evaluation.depth_quality import depth_quality_gain
from looplm.evaluation.depth_sweep import depth_sweep
from looplm.evaluation.exit_curve import exit_curve, gate_statistics
from looplm.report import plots
from looplm.report.schema import QuickstartReport, TextModel

from .conftest import synthetic_record, synthetic_training


def all_figures(model: TextModel) -> list[str]:
    return [
        plots.depth_figure(model),
        plots.loss_figure("x", model.training),
        plots.exit_pdf_figure("x", model.training),
        plots.quality_figure(model),
        plots.work_figure(model),
    ]


def test_figures_are_well_formed_and_without_fixed_colours(report: QuickstartReport) -> None:
    for svg in [*all_figures(report.trained), plots.fold_depth_figure(report.fold)]:
        ElementTree.fromstring(svg)
        colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", svg))
        assert not colours, colours
        assert "var(--ink)" in svg and "<text" in svg
        assert "http" not in svg and "<script" not in svg


@pytest.mark.parametrize("num_points", [1, 2, 121])
@pytest.mark.parametrize("num_loops", [1, 2, 9])
def test_any_number_of_loops_and_logged_steps(report: QuickstartReport, num_loops: int, num_points: int) -> None:
    record = synthetic_record((2.0,) * num_loops, num_loops, 0.3)
    model = report.trained.model_copy(
        update={
            "sweep": depth_sweep(record),
            "gate": gate_statistics(record),
            "curve": exit_curve(record),
            "quality": depth_quality_gain(record),
            "training": synthetic_training(num_loops, num_points),
        }
    )
    for svg in all_figures(model):
        ElementTree.fromstring(svg)


def test_the_same_numbers_give_the_same_figure(report: QuickstartReport) -> None:
    assert plots.quality_figure(report.trained) == plots.quality_figure(report.trained)
