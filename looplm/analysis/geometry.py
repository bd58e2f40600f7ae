"""Where states lie: two groups of prompts in the plane of their principal components, and the way to a fixed point."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from sklearn.decomposition import PCA
from torch import Tensor

from looplm.analysis.probes import NUM_FOLDS, probe_auc
from looplm.errors import UserError

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Plane:
    """States of one loop in two principal components."""

    loop: int
    points: tuple[tuple[float, float], ...]
    """(N, 2)."""
    explained: tuple[float, float]
    """Share of the states' variance along each component."""
    separability: float | None
    """Cross-validated AUC of a linear probe for the group, on the whole state."""
    centroid_distance: float | None
    """Distance of the groups' means over the root mean square distance of states from their own group's mean;
    None where the latter is 0."""


@dataclass(frozen=True)
class Convergence:
    """How states move as loops go on. Each row holds the 5 %, 50 % and 95 % quantile over points."""

    reference_loop: int
    """The deepest loop recorded, taken for the fixed point."""
    distances: tuple[tuple[float, float, float], ...]
    """(reference - 1, 3): ||h_r - h_end|| / ||h_end||."""
    steps: tuple[tuple[float, float, float], ...]
    """(reference - 1, 3): ||h_{r+1} - h_r|| / ||h_end||."""
    rates: tuple[tuple[float, float, float], ...]
    """(reference - 2, 3): ||h_{r+2} - h_{r+1}|| / ||h_{r+1} - h_r||; below 1 the loop contracts."""


@dataclass(frozen=True)
class Geometry:
    """Planes of all loops, and convergence."""

    group_names: tuple[str, str]
    groups: tuple[int, ...]
    scores: tuple[float, ...] | None
    """(N,), to colour points by."""
    joint: bool
    """Whether all loops share one plane."""
    trained_loops: int
    planes: tuple[Plane, ...]
    convergence: Convergence | None
    """None below three loops."""


def geometry(
    states: Float[Tensor, "R N D"],
    groups: Sequence[int],
    group_names: tuple[str, str],
    *,
    trained_loops: int,
    planes: int | None = None,
    scores: Sequence[float] | None = None,
    joint: bool = False,
    seed: int = 0,
) -> Geometry:
    """Looks at the states of N points in two groups (0 and 1).

    planes: how many loops get a plane, the trained ones when None; convergence takes all that were recorded.
    joint: fit the components to all these loops together, so that planes share their axes.

    Raises UserError unless both groups have two points.
    """
    where = np.array(groups)
    if min((where == 0).sum(), (where == 1).sum()) < 2:
        raise UserError("Each of the two groups needs at least two prompts.")
    shown = states[: min(trained_loops, len(states)) if planes is None else planes].double().numpy()
    shared = PCA(2, svd_solver="full").fit(shown.reshape(-1, shown.shape[-1])) if joint else None
    found = tuple(
        _plane(loop, state, where, shared or PCA(2, svd_solver="full").fit(state), seed)
        for loop, state in enumerate(shown, start=1)
    )
    return Geometry(
        group_names=group_names,
        groups=tuple(where.tolist()),
        scores=None if scores is None else tuple(scores),
        joint=joint,
        trained_loops=trained_loops,
        planes=found,
        convergence=convergence(states) if len(states) >= 3 else None,
    )


def _plane(loop: int, state: np.ndarray, where: np.ndarray, pca: PCA, seed: int) -> Plane:
    centres = np.stack([state[where == group].mean(0) for group in (0, 1)])
    spread = np.sqrt(np.square(state - centres[where]).sum(1).mean())
    folds = min(NUM_FOLDS, int(np.bincount(where).min()))
    points = pca.transform(state)
    # Shares of this loop's own variance, also along axes fitted to all loops.
    explained = points.var(0) / state.var(0).sum()
    return Plane(
        loop=loop,
        points=tuple((float(x), float(y)) for x, y in points),
        explained=(float(explained[0]), float(explained[1])),
        separability=probe_auc(state, where, num_folds=folds, seed=seed),
        centroid_distance=float(np.linalg.norm(centres[1] - centres[0]) / spread) if spread else None,
    )


def convergence(states: Float[Tensor, "R N D"]) -> Convergence:
    """Distances to the deepest state, and how steps shrink. Raises UserError below three loops."""
    if len(states) < 3:
        raise UserError("Convergence takes at least three loops; record more.")
    states = states.double()
    end = states[-1].norm(dim=-1)  # (N,)
    steps = states.diff(dim=0).norm(dim=-1)  # (R - 1, N)
    return Convergence(
        reference_loop=len(states),
        distances=_quantiles((states[:-1] - states[-1]).norm(dim=-1) / end),
        steps=_quantiles(steps / end),
        # A step of exactly 0 has arrived: it contracts fully, and so does what follows it.
        rates=_quantiles(torch.where(steps[:-1] > 0, steps[1:] / steps[:-1].clamp(min=1e-300), 0.0)),
    )


def _quantiles(values: Float[Tensor, "m N"]) -> tuple[tuple[float, float, float], ...]:
    found = torch.quantile(values, torch.tensor(QUANTILES, dtype=values.dtype), dim=1).T.tolist()
    return tuple((low, middle, high) for low, middle, high in found)
