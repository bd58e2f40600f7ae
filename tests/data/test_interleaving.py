"""Mixtures keep their shares at every prefix, not on average."""

import random

import pytest

from looplm.data.interleaving import Interleaving
from looplm.errors import UserError


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [0.7, 0.3], [3, 2, 1], [0.9, 0.05, 0.05], [1e-4, 1], [0.62, 0.15, 0.09, 0.08, 0.06], [1] * 9],
)
def test_every_source_is_within_one_of_its_share_at_every_prefix(weights):
    interleaving = Interleaving(weights)
    drawn = [0] * len(weights)
    for n in range(1, 3001):
        drawn[interleaving.draw()] += 1
        assert all(abs(count - weight / sum(weights) * n) < 1 for count, weight in zip(drawn, weights, strict=True))
    assert drawn == interleaving.counts


def test_the_bound_of_the_chairman_assignment_holds_for_many_sources():
    """Within 1 - 1 / (2 (K - 1)), where always taking the source furthest behind exceeds 1."""
    generator = random.Random(0)
    for _ in range(60):
        weights = [generator.random() ** 3 + 1e-3 for _ in range(generator.randint(2, 12))]
        bound = 1 - 1 / (2 * (len(weights) - 1)) + 1e-6
        interleaving = Interleaving(weights)
        for n in range(1, 400):
            interleaving.draw()
            for count, weight in zip(interleaving.counts, weights, strict=True):
                assert abs(count - weight / sum(weights) * n) <= bound


def test_whole_numbers_come_out_exactly():
    interleaving = Interleaving([17, 5, 40])
    for _ in range(62):
        interleaving.draw()
    assert interleaving.counts == [17, 5, 40]


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1]])
def test_weights_must_be_positive(weights):
    with pytest.raises(UserError, match="must be positive"):
        Interleaving(weights)
