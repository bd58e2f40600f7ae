"""pass@k against counting all sets of k samples."""

from itertools import combinations
from math import sqrt

import pytest

from looplm.errors import UserError
from looplm.evaluation.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_it_is_the_share_of_sets_with_a_sample_that_passed(num_samples):
    for num_passed in range(num_samples + 1):
        passed = [i < num_passed for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            sets = list(combinations(passed, k))
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, sets)) / len(sets), abs=1e-12)


def test_mean_and_standard_error():
    estimate = mean_pass_at_k([(4, 0), (4, 4), (4, 2)], 1)
    assert estimate.value == pytest.approx(0.5)
    assert estimate.stderr == pytest.approx(sqrt((0.25 + 0.25) / 2 / 3))
    assert mean_pass_at_k([(2, 1)], 2).stderr is None


@pytest.mark.parametrize("k", [0, 3])
def test_impossible_k(k):
    with pytest.raises(UserError):
        pass_at_k(2, 1, k)


@pytest.mark.parametrize("num_passed", [-1, 3])
def test_impossible_number_of_passes(num_passed):
    with pytest.raises(UserError, match="cannot have passed"):
        pass_at_k(2, num_passed, 1)


def test_no_problem():
    with pytest.raises(UserError):
        mean_pass_at_k([], 1)
