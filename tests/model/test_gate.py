"""The gate's arithmetic: the exit distribution, and that it holds at the ends of the float range."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from looplm.model import gate

EVERY_FUNCTION = (
    gate.hazard,
    gate.log_survival,
    gate.survival,
    gate.log_exit_pdf,
    gate.exit_pdf,
    gate.exit_cdf,
    gate.exit_entropy,
    gate.expected_loops,
)


def naive_pdf(logits: Tensor) -> Tensor:
    """p_r as the paper writes it, a product over loops: the definition the log-space code must meet."""
    remaining, pdf = torch.ones_like(logits[0]), []
    for hazard in torch.sigmoid(logits[:-1]):
        pdf.append(remaining * hazard)
        remaining = remaining * (1 - hazard)
    return torch.stack([*pdf, remaining])


@pytest.fixture
def logits() -> Tensor:
    """(R, B, S) float64 gate logits, from sure to stay to sure to leave."""
    return 4 * torch.randn(5, 3, 7, dtype=torch.float64)


def test_exit_pdf_is_the_papers_product(logits: Tensor):
    torch.testing.assert_close(gate.exit_pdf(logits), naive_pdf(logits), rtol=1e-9, atol=0)
    torch.testing.assert_close(gate.log_exit_pdf(logits), naive_pdf(logits).log(), rtol=1e-9, atol=1e-12)


def test_exit_pdf_is_a_distribution_over_loops(logits: Tensor):
    pdf = gate.exit_pdf(logits)
    assert (pdf >= 0).all()
    torch.testing.assert_close(pdf.sum(0), torch.ones(3, 7, dtype=torch.float64), rtol=0, atol=1e-14)


def test_one_loop_has_all_the_mass_whatever_its_gate_says():
    logits = torch.tensor([[-50.0, 0.0, 50.0]])
    assert gate.exit_pdf(logits).tolist() == [[1.0, 1.0, 1.0]]
    assert gate.exit_cdf(logits).tolist() == [[1.0, 1.0, 1.0]]
    assert gate.exit_entropy(logits).tolist() == [0.0, 0.0, 0.0]
    assert gate.expected_loops(logits).tolist() == [1.0, 1.0, 1.0]


def test_one_loop_gives_the_gate_a_zero_gradient_rather_than_none():
    """Distributed training stops on a parameter that no loss reaches; R = 1 must train."""
    logits = torch.randn(1, 4, requires_grad=True)
    gate.exit_pdf(logits).sum().backward()
    assert logits.grad is not None and not logits.grad.any()


def test_hazard_zero_puts_all_mass_last():
    logits = torch.full((4, 2), -200.0)
    assert gate.exit_pdf(logits).tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]]
    assert gate.expected_loops(logits).tolist() == [4.0, 4.0]


def test_hazard_one_puts_all_mass_first():
    logits = torch.full((4, 2), 200.0)
    assert gate.exit_pdf(logits).tolist() == [[1.0, 1.0]] + [[0.0, 0.0]] * 3
    assert gate.expected_loops(logits).tolist() == [1.0, 1.0]


def test_last_gate_value_is_not_used(logits: Tensor):
    other = torch.cat((logits[:-1], -logits[-1:]))
    for function in (gate.exit_pdf, gate.exit_cdf, gate.exit_entropy, gate.expected_loops):
        assert torch.equal(function(logits), function(other))


def test_hazard_is_the_sigmoid(logits: Tensor):
    torch.testing.assert_close(gate.hazard(logits), 1 / (1 + (-logits).exp()), rtol=1e-13, atol=0)


def test_survival_is_the_product_of_staying(logits: Tensor):
    stays = (1 - torch.sigmoid(logits)).cumprod(0)
    torch.testing.assert_close(gate.survival(logits), stays, rtol=1e-9, atol=0)
    torch.testing.assert_close(gate.log_survival(logits), stays.log(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gate.survival(logits)[:-1], 1 - gate.exit_cdf(logits)[:-1], rtol=0, atol=1e-15)


def test_exit_cdf_accumulates_the_pdf(logits: Tensor):
    torch.testing.assert_close(gate.exit_cdf(logits), gate.exit_pdf(logits).cumsum(0), rtol=0, atol=1e-14)


def test_the_cdf_of_one_token_is_that_of_tensors():
    extreme = torch.tensor([[800.0], [-800.0], [0], [0], [0]], dtype=torch.float64)
    logits = torch.cat((20 * torch.randn(5, 300, dtype=torch.float64), extreme), 1)
    cdf = gate.exit_cdf(logits)
    for column, truth in zip(logits.T.tolist(), cdf.T.tolist(), strict=True):
        for loop in range(1, 5):
            assert gate.exit_cdf_of_one(column[:loop]) == pytest.approx(truth[loop - 1], rel=1e-14, abs=0)
    assert math.isnan(gate.exit_cdf_of_one([1.0, math.nan]))
    assert gate.exit_cdf_of_one([0.0]) == 0.5


@pytest.mark.parametrize("scale", [0.1, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_exit_cdf_never_falls_and_ends_at_exactly_one(dtype: torch.dtype, scale: float):
    cdf = gate.exit_cdf((scale * torch.randn(6, 5000)).to(dtype))
    assert (cdf.diff(dim=0) >= 0).all()
    assert (cdf >= 0).all() and (cdf <= 1).all()
    assert (cdf[-1] == 1).all()


def test_exit_cdf_keeps_small_chances_that_one_minus_survival_rounds_away():
    logits = torch.linspace(-30, -12, 4)[:, None]
    truth = naive_pdf(logits.double()).cumsum(0)[:-1]
    naive = 1 - (1 - torch.sigmoid(logits)).cumprod(0)[:-1]
    assert naive[0] == 0, "the naive form loses the first loop's chance altogether"
    torch.testing.assert_close(gate.exit_cdf(logits)[:-1].double(), truth, rtol=1e-6, atol=0)


def test_survival_keeps_small_chances_that_one_minus_hazard_rounds_away():
    logits = torch.linspace(15, 20, 4)[:, None]
    truth = (-logits.double()).sigmoid().cumprod(0)
    assert (1 - torch.sigmoid(logits))[-1] == 0, "the naive form has no chance to stay left"
    torch.testing.assert_close(gate.survival(logits).double(), truth, rtol=1e-5, atol=0)


def test_bfloat16_logits_do_not_leave_early():
    """In bfloat16 the cumulative sum reaches 1 at loop 1 for this logit, and the token would be let go."""
    logits = torch.full((4, 1), 6.5, dtype=torch.bfloat16)
    assert torch.sigmoid(logits)[0] == 1
    assert gate.exit_cdf(logits)[0] < 0.999


@pytest.mark.parametrize("function", EVERY_FUNCTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_give_float32(function: Callable[[Tensor], Tensor], dtype: torch.dtype):
    logits = torch.randn(4, 3).to(dtype)
    result = function(logits)
    assert result.dtype == torch.float32
    assert torch.equal(result, function(logits.float()))


@pytest.mark.parametrize("function", EVERY_FUNCTION)
def test_autocast_does_not_narrow_the_arithmetic(function: Callable[[Tensor], Tensor]):
    logits = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = function(logits)
    assert result.dtype == torch.float32
    assert torch.equal(result, function(logits))


def test_entropy_is_that_of_the_pdf_and_at_most_ln_r(logits: Tensor):
    pdf = naive_pdf(logits)
    entropy = gate.exit_entropy(logits)
    torch.testing.assert_close(entropy, -torch.special.xlogy(pdf, pdf).sum(0), rtol=1e-10, atol=1e-12)
    assert (entropy >= 0).all() and (entropy <= math.log(5) + 1e-12).all()


def test_entropy_reaches_ln_r_for_the_uniform_distribution():
    hazards = 1 / torch.arange(4, 0, -1, dtype=torch.float64)  # 1/4, 1/3, 1/2, 1
    logits = torch.logit(hazards, eps=1e-9)[:, None]
    torch.testing.assert_close(gate.exit_pdf(logits), torch.full((4, 1), 0.25, dtype=torch.float64))
    assert gate.exit_entropy(logits).item() == pytest.approx(math.log(4), abs=1e-12)


def test_everything_is_finite_with_finite_gradients_at_plus_minus_fifty():
    corners = torch.tensor([-50.0, 0.0, 50.0])
    logits = torch.cartesian_prod(corners, corners, corners, corners).T.clone().requires_grad_()  # (4, 81)
    for function in EVERY_FUNCTION:
        result = function(logits)
        assert torch.isfinite(result).all(), function.__name__
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert torch.isfinite(gradient).all(), function.__name__
    assert (gate.exit_entropy(logits) <= math.log(4) + 1e-6).all()


def test_entropy_survives_a_pdf_that_underflows():
    logits = torch.tensor([[60.0], [60.0], [-60.0]], requires_grad=True)
    assert gate.exit_pdf(logits)[2] == 0
    gate.exit_entropy(logits).sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("function", EVERY_FUNCTION)
def test_gradients_are_right(function: Callable[[Tensor], Tensor]):
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (logits,))


def test_expected_loops_is_the_mean_depth(logits: Tensor):
    depths = torch.arange(1, 6, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(gate.expected_loops(logits), (depths * naive_pdf(logits)).sum(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1.0, 10.0, 40.0])
def test_expected_loops_stays_between_one_and_r(scale: float):
    expected = gate.expected_loops(scale * torch.randn(7, 20_000))
    assert (expected >= 1).all() and (expected <= 7).all()
