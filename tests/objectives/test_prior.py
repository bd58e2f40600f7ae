"""Priors over exit loops: their shape, and what drawing the exit distribution towards one does."""

import math

import pytest
import torch

from looplm.errors import UserError
from looplm.model.gate import exit_entropy, exit_pdf
from looplm.objectives import expected_loss, geometric_prior, uniform_prior


class Head:
    """A head without a model, with an even output: the language-model term is ln 13 at every loop."""

    def apply_head(self, function, *args):
        return function(torch.zeros(13, 8, dtype=torch.float64), *args)


def penalty(output, labels, prior):
    """The regulariser at beta 1, alone."""
    return expected_loss(Head(), output, labels, beta=1.0, prior=prior)[0] - math.log(13)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_the_uniform_prior_is_even(num_loops: int):
    assert uniform_prior(num_loops).tolist() == [1 / num_loops] * num_loops


@pytest.mark.parametrize("stop", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num_loops", [1, 2, 4, 8])
def test_the_geometric_prior_falls_by_one_ratio_and_sums_to_one(num_loops: int, stop: float):
    prior = geometric_prior(num_loops, stop)
    assert prior.sum().item() == pytest.approx(1, abs=1e-14)
    torch.testing.assert_close(prior[1:] / prior[:-1], torch.full_like(prior[1:], 1 - stop), atol=1e-12, rtol=0)
    whole = sum((1 - stop) ** r * stop for r in range(num_loops))
    assert prior[0].item() == pytest.approx(stop / whole)


@pytest.mark.parametrize("stop", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_chance_to_stop_outside_0_to_1_is_refused(stop: float):
    with pytest.raises(UserError, match="lies between 0 and 1"):
        geometric_prior(4, stop)


def test_the_penalty_is_the_divergence_from_the_prior(make_output, make_batch):
    _, labels = make_batch()
    output, prior = make_output(), geometric_prior(3, 0.3)
    predicted = labels[:, 1:] != -100
    pdf = exit_pdf(output.gate_logits)[:, :, :-1][:, predicted]  # (R, tokens)
    divergence = torch.nn.functional.kl_div(prior[:, None].log().expand_as(pdf), pdf, reduction="none").sum(0).mean()
    torch.testing.assert_close(penalty(output, labels, prior), divergence, rtol=0, atol=1e-12)


def test_towards_uniform_it_is_ln_r_less_the_entropy(make_output, make_batch):
    _, labels = make_batch()
    output = make_output()
    entropy = exit_entropy(output.gate_logits)[:, :-1][labels[:, 1:] != -100].mean()
    found = penalty(output, labels, uniform_prior(3))
    torch.testing.assert_close(found, math.log(3) - entropy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stop", [0.2, 0.7])
def test_the_exit_distribution_goes_to_the_prior(make_output, make_batch, stop: float):
    """Where p is the prior, penalty and gradient are zero; elsewhere a step along the gradient brings it closer."""
    _, labels = make_batch()
    prior = geometric_prior(3, stop)
    survival = torch.cat((torch.ones(1).double(), 1 - prior.cumsum(0)[:-1]))
    hazard = (prior / survival)[:-1]
    at_prior = torch.cat((torch.logit(hazard), torch.zeros(1).double()))[:, None, None].expand(3, 2, 7)
    output = make_output(at_prior.contiguous())
    value = penalty(output, labels, prior)
    (grad,) = torch.autograd.grad(value, output.gate_logits)
    assert abs(value.item()) < 1e-12 and grad.abs().max() < 1e-12
    away = make_output()
    value = penalty(away, labels, prior)
    (grad,) = torch.autograd.grad(value, away.gate_logits)
    closer = make_output((away.gate_logits - grad).detach())
    assert penalty(closer, labels, prior) < value
