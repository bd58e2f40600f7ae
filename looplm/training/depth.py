"""How many loops a step runs: fixed, drawn anew each step, or grown by a curriculum.

All of it is a pure function of the recipe, the seed and the step. Every rank finds the same number without
asking the others, and a resumed run draws what the straight run would have: there is nothing to save.
"""

import math

import numpy as np

from looplm.training.stage_recipe import (
    LastLoopRecipe,
    Objective,
    PoissonLognormalDepth,
    RoutingRecipe,
    StageRecipe,
    UniformDepth,
)

_STREAM = 0x6465707468
"""Keeps these draws apart from others that start from the same seed."""


def draw_depth(
    num_loops: int | UniformDepth | PoissonLognormalDepth | None, default: int, seed: int, step: int
) -> int:
    """Loops of optimizer step `step` (from 0): `num_loops` itself, a draw from it, or `default` when None."""
    if num_loops is None:
        return default
    if isinstance(num_loops, int):
        return num_loops
    random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, step)))
    if isinstance(num_loops, UniformDepth):
        return int(random.integers(num_loops.min, num_loops.max, endpoint=True))
    rate = random.lognormal(math.log(num_loops.mean) - num_loops.sigma**2 / 2, num_loops.sigma)
    return min(int(random.poisson(rate)) + 1, num_loops.max)


def active_loops(recipe: RoutingRecipe, num_loops: int, step: int) -> int:
    """Loops the routing curriculum allows at a step (from 0): one more each phase, until `num_loops`."""
    return min(num_loops, 1 + step // recipe.phase_steps)


def depth_of_step(stage: StageRecipe, default: int, seed: int, step: int) -> int:
    """Loops of the forward of step `step` (from 0), alike on all ranks; `default` is the model's own depth.

    Under routing, loops beyond the curriculum's carry no loss and are not run.
    """
    depth = draw_depth(stage.num_loops, default, seed, step)
    if isinstance(stage.objective, RoutingRecipe):
        return active_loops(stage.objective, depth, step)
    return depth


def head_passes(objective: Objective, num_loops: int) -> int:
    """How often a step multiplies a state with the head's weight: once where a loss is measured, and twice more in the
    backward pass where it is trained."""
    if isinstance(objective, RoutingRecipe):
        return num_loops + 3  # all loops are read to find the one that is trained
    if isinstance(objective, LastLoopRecipe):
        return num_loops + 2
    return 3 * num_loops
