"""The depth of a step: a pure function, with the distribution the recipe names."""

import math
from collections import Counter

import numpy as np
import pytest

from looplm.training.depth import active_loops, depth_of_step, draw_depth
from looplm.training.stage_recipe import PoissonLognormalDepth, RoutingRecipe, StageRecipe, UniformDepth

DRAWS = 4000
GOLDEN = [[5, 3, 5, 4, 6, 7, 1, 5, 7, 5, 7, 3], [2, 14, 5, 1, 3, 3, 4, 9, 2, 5, 5, 10]]
"""Of seed 11, steps 0 to 11: even from 1 to 9, and Poisson-lognormal of mean 5."""


def chi_square(drawn: list[int], expected: dict[int, float]) -> float:
    """Sum over values of (counted - expected)^2 / expected; `expected` are probabilities."""
    counts = Counter(drawn)
    assert set(counts) <= set(expected)
    return sum((counts[value] - len(drawn) * p) ** 2 / (len(drawn) * p) for value, p in expected.items())


def test_a_fixed_depth_and_the_model_s_own_are_not_drawn():
    assert [draw_depth(3, 4, 0, step) for step in range(5)] == [3] * 5
    assert [draw_depth(None, 4, 0, step) for step in range(5)] == [4] * 5


def test_uniform_depths_are_even():
    recipe = UniformDepth(min=2, max=6)
    drawn = [draw_depth(recipe, 4, 7, step) for step in range(DRAWS)]
    assert chi_square(drawn, {depth: 0.2 for depth in range(2, 7)}) < 18.5  # 0.1 % of chi-square with 4 degrees
    assert {draw_depth(UniformDepth(min=3, max=3), 4, 0, step) for step in range(20)} == {3}


def poisson_lognormal(mean: float, sigma: float, most: int) -> dict[int, float]:
    """Probabilities of depths 1..most, by integrating the Poisson's over the normal on a fine grid."""
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    rate = np.exp(math.log(mean) - sigma**2 / 2 + sigma * z)
    pdf = {k + 1: float((density * np.exp(-rate + k * np.log(rate) - math.lgamma(k + 1))).sum()) for k in range(most)}
    pdf[most] = 1 - sum(p for depth, p in pdf.items() if depth < most)
    return pdf


@pytest.mark.parametrize(("mean", "sigma", "most"), [(3.0, 0.5, 8), (3.0, 0.0, 8), (1.0, 1.0, 4)])
def test_poisson_lognormal_depths_are_huginn_s_cut_off_at_the_most(mean: float, sigma: float, most: int):
    recipe = PoissonLognormalDepth(mean=mean, sigma=sigma, max=most)
    drawn = [draw_depth(recipe, 4, 3, step) for step in range(DRAWS)]
    assert chi_square(drawn, poisson_lognormal(mean, sigma, most)) < 24.4  # 0.1 % with 7 degrees
    # The test can tell: the same draws against a neighbouring mean.
    assert chi_square(drawn, poisson_lognormal(1.2 * mean, sigma, most)) > 24.4


def test_successive_depths_do_not_depend_on_each_other():
    drawn = np.array([draw_depth(UniformDepth(min=1, max=4), 4, 0, step) for step in range(DRAWS)])
    for lag in (1, 2):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 0.05


def test_seed_and_step_decide_and_nothing_else():
    recipe = PoissonLognormalDepth(mean=4, max=32)
    first = [draw_depth(recipe, 4, 5, step) for step in range(50)]
    np.random.seed(99)
    assert [draw_depth(recipe, 4, 5, step) for step in reversed(range(50))][::-1] == first
    assert [draw_depth(recipe, 4, 6, step) for step in range(50)] != first


def test_every_process_draws_these():
    """The ranks of a run, and a run resumed elsewhere: should NumPy ever draw otherwise, resuming is not exact."""
    recipes = (UniformDepth(min=1, max=9), PoissonLognormalDepth(mean=5, max=20))
    assert [[draw_depth(recipe, 4, 11, step) for step in range(12)] for recipe in recipes] == GOLDEN


def test_the_curriculum_adds_a_loop_a_phase_and_stops_at_the_last():
    recipe = RoutingRecipe(phase_steps=10)
    assert [active_loops(recipe, 3, step) for step in (0, 9, 10, 19, 20, 30, 1000)] == [1, 1, 2, 2, 3, 3, 3]


def test_the_depth_of_a_step_is_the_draw_or_what_the_curriculum_allows_of_it():
    def make_stage(num_loops: object, **overrides: object) -> StageRecipe:
        plain = {"name": "first", "num_steps": 9, "seq_len": 8, "batch_tokens": 8, "optimizer": {"lr": 1e-2}}
        objective = {"kind": "expected_loss", "beta": 0.1}
        return StageRecipe.model_validate({**plain, "objective": objective, "num_loops": num_loops, **overrides})

    stage = make_stage(num_loops=3, objective={"kind": "routing", "phase_steps": 2})
    assert [depth_of_step(stage, 4, 0, step) for step in range(7)] == [1, 1, 2, 2, 3, 3, 3]
    plain = make_stage(num_loops=UniformDepth(min=1, max=5))
    assert [depth_of_step(plain, 4, 2, s) for s in range(9)] == [
        draw_depth(plain.num_loops, 4, 2, s) for s in range(9)
    ]
    assert depth_of_step(make_stage(num_loops=None), 4, 0, 3) == 4
