"""Scores of a group of answers: their mean, the share of the highest, how sure both are, and how many are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import torch

from looplm.evaluation.bootstrap import CONFIDENCE, NUM_RESAMPLES, Interval, percentile_interval, resample_weights
from looplm.evaluation.judge import Judgment
from looplm.evaluation.rubrics import HIGHEST, LOWEST


@dataclass(frozen=True)
class ScoreSummary:
    """What a judge made of a group of answers."""

    num_scored: int
    num_missing: int
    mean: Interval | None
    """With the percentile interval over resampled answers; the rubric's whole range for a single one."""
    highest_rate: Interval | None
    """Share of the scored answers with the highest score, with Wilson's interval. Both None without a score."""
    counts: dict[int, int]
    """Answers by score."""


def summarise(judgments: Sequence[Judgment], seed: int = 0) -> ScoreSummary:
    """A summary; missing judgments are counted, and enter nothing else."""
    scores = [one.score for one in judgments if one.score is not None]
    counts = {score: scores.count(score) for score in range(LOWEST, HIGHEST + 1)}
    if not scores:
        return ScoreSummary(0, len(judgments), None, None, counts)
    return ScoreSummary(
        len(scores), len(judgments) - len(scores), mean_interval(scores, seed),
        wilson_interval(counts[HIGHEST], len(scores)), counts,
    )  # fmt: skip


def mean_interval(scores: Sequence[int], seed: int) -> Interval:
    """The mean, and its interval over scores drawn with replacement."""
    mean = sum(scores) / len(scores)
    if len(scores) == 1:
        return Interval(mean, LOWEST, HIGHEST)
    weights = resample_weights(len(scores), NUM_RESAMPLES, seed)
    return percentile_interval(mean, weights @ torch.tensor(scores, dtype=torch.float64) / len(scores))


def wilson_interval(num_hits: int, num_trials: int, confidence: float = CONFIDENCE) -> Interval:
    """A share, and the interval of all shares that are not refuted by it (Wilson, 1927): of use at 0 of n, too."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = num_hits / num_trials, z * z / num_trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * sqrt(share * (1 - share) / num_trials + weight / (4 * num_trials))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
