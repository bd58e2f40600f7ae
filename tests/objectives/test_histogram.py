"""Quantiles of the exit distribution over tokens, from histograms that add up."""

import pytest
import torch

from looplm.model.gate import exit_pdf, expected_loops
from looplm.objectives.cross_entropy import IGNORE, shift_labels, token_weights
from looplm.objectives.expected_loss import HISTOGRAM_BINS, depth_metrics, histogram_quantiles

LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]


def metrics_of(gate_logits: torch.Tensor, labels: torch.Tensor, num_tokens: int | None = None):
    targets = shift_labels(labels)
    per_token = token_weights(targets, num_tokens, torch.float64)
    return depth_metrics(torch.zeros_like(gate_logits), gate_logits, per_token), targets != IGNORE


def test_quantiles_are_those_of_the_predicted_tokens_to_one_bin():
    gate_logits = 2 * torch.randn(4, 3, 400, dtype=torch.float64)
    labels = torch.where(torch.rand(3, 400) < 0.7, 1, IGNORE)
    metrics, predicted = metrics_of(gate_logits, labels)
    wanted = torch.tensor(LEVELS, dtype=torch.float64)
    found = histogram_quantiles(metrics["exit_pdf_histogram"], LEVELS)
    true = exit_pdf(gate_logits)[:, predicted].quantile(wanted, dim=1).T  # (R, q)
    torch.testing.assert_close(found, true, rtol=0, atol=1.5 / HISTOGRAM_BINS)
    found = histogram_quantiles(metrics["expected_loops_histogram"], LEVELS, low=1.0, high=4.0)
    true = expected_loops(gate_logits)[predicted].quantile(wanted)
    torch.testing.assert_close(found, true, rtol=0, atol=3 * 1.5 / HISTOGRAM_BINS)


def test_histograms_are_shares_and_add_up_over_micro_batches():
    gate_logits = torch.randn(3, 4, 50, dtype=torch.float64)
    labels = torch.where(torch.rand(4, 50) < 0.5, 1, IGNORE)
    labels[2] = IGNORE
    whole, predicted = metrics_of(gate_logits, labels)
    torch.testing.assert_close(whole["exit_pdf_histogram"].sum(-1), torch.ones(3).double())
    assert whole["expected_loops_histogram"].sum().item() == pytest.approx(1)
    parts = [metrics_of(gate_logits[:, [b]], labels[[b]], int(predicted.sum()))[0] for b in range(4)]
    for name in ("exit_pdf_histogram", "expected_loops_histogram"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("logit", "loops"), [(60.0, 1), (-60.0, 3)])
def test_a_gate_on_one_loop_has_its_quantiles_there(logit: float, loops: int):
    metrics, _ = metrics_of(torch.full((3, 2, 30), logit, dtype=torch.float64), torch.ones(2, 30, dtype=torch.long))
    found = histogram_quantiles(metrics["expected_loops_histogram"], LEVELS, low=1.0, high=3.0)
    assert (found - loops).abs().max() <= 2 / HISTOGRAM_BINS


def test_a_single_loop_and_no_tokens_at_all():
    for labels in (torch.ones(1, 5, dtype=torch.long), torch.full((1, 5), IGNORE)):
        metrics, _ = metrics_of(torch.randn(1, 1, 5, dtype=torch.float64), labels)
        for quantile in histogram_quantiles(metrics["exit_pdf_histogram"], LEVELS)[0]:
            assert 0 <= quantile <= 1


def test_quantiles_within_a_bin_are_spread_evenly():
    histogram = torch.tensor([0.0, 0.5, 0.0, 0.5])
    assert histogram_quantiles(histogram, [0.25, 0.5, 0.75]).tolist() == pytest.approx([0.375, 0.5, 0.875])
    assert histogram_quantiles(histogram, [0.25], low=1.0, high=5.0).tolist() == pytest.approx([2.5])
