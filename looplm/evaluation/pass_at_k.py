"""pass@k: the chance that at least one of k samples is right, without bias, from n samples a problem."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt

from looplm.errors import UserError


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its standard error."""

    value: float
    stderr: float | None
    """None for a single problem, of which there is no spread to measure."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of the sets of k among n samples that hold one of the c that passed.

    Source: Chen et al., arXiv 2107.03374, equation 1. Raises UserError for k over n and c outside of 0 to n.
    """
    if not 1 <= k <= num_samples:
        raise UserError(
            f"pass@{k} needs at least {max(k, 1)} samples a problem and k from 1; there are {num_samples}."
        )
    if not 0 <= num_passed <= num_samples:
        raise UserError(f"{num_passed} of {num_samples} samples cannot have passed.")
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Estimate:
    """Over problems with (samples, passed) each. Raises UserError as `pass_at_k`, and without a problem."""
    if not counts:
        raise UserError("There is no problem to score.")
    values = [pass_at_k(samples, passed, k) for samples, passed in counts]
    mean, count = sum(values) / len(values), len(values)
    if count == 1:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, sqrt(variance / count))
