"""Planted clusters and planted contractions."""

import pytest
import torch

from looplm.analysis.geometry import convergence, geometry
from looplm.errors import UserError

N, D = 60, 10


def clusters(distance: float) -> torch.Tensor:
    """Two loops: at the first no difference between groups, at the second one along the last channel."""
    states = torch.randn(2, N, D)
    states[1, N // 2 :, -1] += distance
    return states


GROUPS = [0] * (N // 2) + [1] * (N // 2)


def test_planted_clusters_are_separated_by_pca_and_probe():
    found = geometry(clusters(12.0), GROUPS, ("a", "b"), trained_loops=2, scores=[1.0] * N)
    first, second = found.planes
    assert second.separability == 1.0
    assert first.separability == pytest.approx(0.5, abs=0.25)
    left = [point[0] for point, group in zip(second.points, GROUPS, strict=True) if group == 0]
    right = [point[0] for point, group in zip(second.points, GROUPS, strict=True) if group == 1]
    assert max(left) < min(right) or max(right) < min(left)
    assert second.explained[0] > 0.6 > first.explained[0]
    assert second.centroid_distance > 3 > 1 > first.centroid_distance
    assert found.convergence is None


def test_joint_axes_are_shared():
    found = geometry(clusters(12.0), GROUPS, ("a", "b"), trained_loops=2, joint=True)
    xs = [[point[0] for point in plane.points] for plane in found.planes]
    middle = sum(xs[1][: N // 2]) / (N // 2)
    # On the shared axis the first loop's points all lie with the group that has not moved.
    assert sum(xs[0]) / N == pytest.approx(middle, abs=1.5)


def test_a_contraction_of_one_half_is_measured():
    fixed, start = torch.randn(N, D, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    states = torch.stack([fixed + 0.5**r * start for r in range(1, 31)])
    found = convergence(states)
    assert found.reference_loop == 30
    for low, middle, high in found.rates[:20]:
        assert (low, middle, high) == pytest.approx((0.5, 0.5, 0.5), rel=1e-6)
    distance = ((states[0] - fixed).norm(dim=-1) / fixed.norm(dim=-1)).median().item()
    assert found.distances[0][1] == pytest.approx(distance, rel=0.05)
    assert [row[1] for row in found.distances] == sorted((row[1] for row in found.distances), reverse=True)


def test_states_that_have_arrived_have_rate_zero():
    found = convergence(torch.ones(4, N, D))
    assert found.rates == ((0.0, 0.0, 0.0),) * 2


def test_too_little_is_refused():
    with pytest.raises(UserError, match="at least two prompts"):
        geometry(torch.randn(2, 3, D), [0, 0, 1], ("a", "b"), trained_loops=2)
    with pytest.raises(UserError, match="three loops"):
        convergence(torch.randn(2, 3, D))
