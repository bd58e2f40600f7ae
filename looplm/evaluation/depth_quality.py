"""Does the gate choose well? Its depth-quality curve against fixed depths at the same mean depth.

Between two neighbouring fixed depths lies a straight line: a coin that sends each token to one or the other, knowing
nothing of it, lands there on average. A gate whose curve lies below that line spends its loops where they help. Where
bits per byte do not fall convexly with depth, mixing depths further apart can beat the line; the lower hull of the
fixed depths is the best such coin, and the harder rival.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.evaluation.bootstrap import NUM_RESAMPLES, Interval, percentile_interval, resample_weights
from looplm.evaluation.depth_sweep import bits_per_byte, mean_depth
from looplm.evaluation.exit_area import mean_over_depth
from looplm.evaluation.exit_curve import covering_thresholds, cross_entropy_at, loops_at
from looplm.evaluation.record import DepthRecord


@dataclass(kw_only=True, frozen=True)
class QualityGap:
    """One threshold beside a coin of the same mean depth."""

    threshold: float
    mean_loops: float
    bits_per_byte: float
    line_bits_per_byte: float
    """The line between the neighbouring fixed depths, at `mean_loops`."""
    gain_bits_per_byte: Interval
    """Line less gate: above 0, the gate wins."""


@dataclass(kw_only=True, frozen=True)
class DepthQuality:
    """The gate's gain over fixed depths. All intervals are over documents."""

    gaps: tuple[QualityGap, ...]
    """In order of threshold."""
    mean_gain_bits_per_byte: Interval
    """Area between line and curve over depths 1 to R, divided by R - 1."""
    mean_gain_over_hull_bits_per_byte: Interval
    """The same against the lower hull of the fixed depths."""
    worst_gain_bits_per_byte: float
    """The smallest gain of any threshold: 0 or more when the whole curve lies at or below the line."""

    @property
    def wins(self) -> bool:
        """Whether the interval of the mean gain lies above 0."""
        return self.mean_gain_bits_per_byte.low > 0

    @property
    def loses(self) -> bool:
        """Whether the interval of the mean gain lies below 0."""
        return self.mean_gain_bits_per_byte.high < 0


def depth_quality_gain(
    record: DepthRecord,
    thresholds: Sequence[float] | None = None,
    num_loops: int | None = None,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> DepthQuality:
    """Compares the gate with fixed depths at every threshold (:func:`covering_thresholds` when None).

    Each resample of the documents moves the curve, its depths and the fixed depths together. 0 and 1, where curve and
    line meet by construction, are always among the thresholds. Raises UserError below two documents.
    """
    num_loops = record.gated_loops(num_loops)
    thresholds = covering_thresholds(record, num_loops) if thresholds is None else thresholds
    thresholds = sorted({0.0, 1.0, *thresholds})
    every = torch.ones(1, record.num_documents, dtype=torch.float64)
    # Resample 0 is the text itself: every document once.
    weights = torch.cat((every, resample_weights(record.num_documents, num_resamples, seed)))
    loops = torch.stack([loops_at(record, threshold, num_loops) for threshold in thresholds])  # (Q, N)
    loss = torch.stack([cross_entropy_at(record, row) for row in loops])
    _, fixed = bits_per_byte(record, record.cross_entropy[:num_loops], weights)  # (W + 1, R)
    _, curve = bits_per_byte(record, loss, weights)  # (W + 1, Q)
    depth = mean_depth(record, loops, weights)  # (W + 1, Q)
    line = mixture_line(fixed, depth, _neighbours(num_loops))
    hull = mixture_line(fixed, depth, _all_pairs(num_loops))
    gain = line - curve
    area, area_hull = mean_over_depth(depth, gain), mean_over_depth(depth, hull - curve)  # (W + 1,)
    return DepthQuality(
        gaps=tuple(
            QualityGap(
                threshold=threshold,
                mean_loops=depth[0, i].item(),
                bits_per_byte=curve[0, i].item(),
                line_bits_per_byte=line[0, i].item(),
                gain_bits_per_byte=percentile_interval(gain[0, i].item(), gain[1:, i]),
            )
            for i, threshold in enumerate(thresholds)
        ),
        mean_gain_bits_per_byte=percentile_interval(area[0].item(), area[1:]),
        mean_gain_over_hull_bits_per_byte=percentile_interval(area_hull[0].item(), area_hull[1:]),
        worst_gain_bits_per_byte=gain[0].min().item(),
    )


def mixture_line(
    fixed: Float[Tensor, "W R"], depth: Float[Tensor, "W Q"], pairs: Sequence[tuple[int, int]]
) -> Float[Tensor, "W Q"]:
    """The least that a coin between two fixed depths gives at mean `depth`, over those `pairs` that span it.

    Pairs hold 0-based loops, the shallower first; depths are 1 to R. With neighbours only this is the line between
    fixed depths, with all pairs their lower convex hull.
    """
    depth = depth.clamp(1, fixed.shape[1])  # a weighted mean of R can be a rounding error above R
    best = torch.full_like(depth, float("inf"))
    for shallow, deep in pairs:
        share = (depth - (shallow + 1)) / max(deep - shallow, 1)  # (W, Q), of tokens sent to the deeper one
        mixed = torch.lerp(fixed[:, shallow, None], fixed[:, deep, None], share)
        best = torch.where((share >= 0) & (share <= 1), torch.minimum(best, mixed), best)
    return best


def _neighbours(num_loops: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(num_loops - 1)] or [(0, 0)]


def _all_pairs(num_loops: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(num_loops) for j in range(i + 1, num_loops)] or [(0, 0)]
