import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.bootstrap import document_sums, percentile_interval, resample_weights, standard_error


def test_document_sums_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    sums = document_sums(values, torch.tensor([2, 0, 2, 0]), 3)
    assert sums.tolist() == [[6.0, 0.0, 4.0], [60.0, 0.0, 40.0]]


def test_every_resample_draws_as_many_documents_as_there_are() -> None:
    weights = resample_weights(7, 300, seed=3)
    assert weights.shape == (300, 7)
    assert weights.sum(1).eq(7).all()
    assert abs(weights.mean().item() - 1) < 1e-12
    # Multinomial with equal chances: variance of one count is 1 - 1/7.
    assert weights.var(correction=0).item() == pytest.approx(6 / 7, rel=0.1)
    assert torch.equal(weights, resample_weights(7, 300, seed=3))
    assert not torch.equal(weights, resample_weights(7, 300, seed=4))


def test_standard_error_of_a_mean_is_that_of_statistics() -> None:
    values = torch.randn(50, dtype=torch.float64)
    resampled = resample_weights(50, 4000, seed=0) @ values / 50
    assert standard_error(resampled).item() == pytest.approx(values.std(correction=0).item() / 50**0.5, rel=0.05)


def test_percentile_interval_of_a_ramp() -> None:
    interval = percentile_interval(0.4, torch.linspace(0, 1, 1001), confidence=0.9)
    assert (interval.value, interval.low, interval.high) == (0.4, pytest.approx(0.05), pytest.approx(0.95))


def test_one_document_is_refused() -> None:
    with pytest.raises(UserError, match="at least two"):
        resample_weights(1, 10, seed=0)
