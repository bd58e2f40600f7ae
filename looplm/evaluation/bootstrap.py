"""Uncertainty over documents: every figure is a ratio of sums over documents, so a resample is one row of weights.

Tokens of one text are not independent, and an interval that took them so would be far too narrow. Here documents are
drawn with replacement; sums per document are taken once, and all resamples are then a few matrix products.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and its percentile interval over resampled documents."""

    value: float
    low: float
    high: float


def document_sums(
    values: Float[Tensor, "*rows N"], document_ids: Int[Tensor, " N"], num_documents: int
) -> Float[Tensor, "*rows M"]:
    """Sums `values` over the tokens of each document, in float64; documents without a token get 0."""
    sums = torch.zeros(*values.shape[:-1], num_documents, dtype=torch.float64, device=values.device)
    return sums.index_add_(-1, document_ids, values.double())


def resample_weights(num_documents: int, num_resamples: int, seed: int) -> Float[Tensor, "W M"]:
    """How often each document appears in each resample of `num_documents` drawn with replacement.

    The same arguments give the same weights, so that figures bootstrapped with one seed are paired.
    Raises UserError below two documents, of which there is no spread to measure.
    """
    if num_documents < 2:
        raise UserError(
            f"The held-out text has {num_documents} document(s); an interval over documents needs at least two. "
            "Give the held-out text as several documents."
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_documents, (num_resamples, num_documents), generator=generator)
    ones = torch.ones(drawn.shape, dtype=torch.float64)
    return torch.zeros(num_resamples, num_documents, dtype=torch.float64).scatter_add_(1, drawn, ones)


def standard_error(resampled: Float[Tensor, "W *figures"]) -> Float[Tensor, "*figures"]:
    """Standard deviation of each figure over its resamples."""
    return ((resampled - resampled.mean(0)).square().sum(0) / (resampled.shape[0] - 1)).sqrt()


def percentile_interval(value: float, resampled: Float[Tensor, " W"], confidence: float = CONFIDENCE) -> Interval:
    """`value` with the central `confidence` of its resamples."""
    tail = (1 - confidence) / 2
    low, high = torch.quantile(resampled.double(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value, low, high)
