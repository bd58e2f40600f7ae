"""What a threshold on the exit cdf gives: depth, quality, and the work that is really done, on one recorded pass.

The counts are those of batch 1 under the exact per-loop cache, each position taken as decoded in turn:

    weight passes   the sum of exit loops: a token's own pass through loop r carries along what earlier positions
                    still lack there, so catching up adds no pass
    token-loops     position p is computed to the largest exit loop among p and all later positions of its sequence,
                    since each of them reads the keys of p at its own last loop
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.evaluation.bootstrap import NUM_RESAMPLES, resample_weights, standard_error
from looplm.evaluation.depth_sweep import bits_per_byte
from looplm.evaluation.exit_rules import spread_thresholds
from looplm.evaluation.record import DepthRecord
from looplm.inference.exit_policy import QuantileExit, exit_loops
from looplm.model.gate import exit_cdf, exit_entropy, exit_pdf, expected_loops

TABLE_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Round thresholds, for a table."""


@dataclass(kw_only=True, frozen=True)
class ExitPoint:
    """All tokens leave at the first loop whose exit cdf reaches `threshold`."""

    threshold: float
    mean_loops: float
    """Claimed depth: the loop a token is read out at, on average."""
    weight_passes_per_token: float
    token_loops_per_token: float
    bits_per_byte: float
    bits_per_byte_stderr: float
    """Over documents."""
    exit_shares: tuple[float, ...]
    """Share of tokens that leave at loop 1, 2, ..., R."""


@dataclass(kw_only=True, frozen=True)
class GateStatistics:
    """Whether the gate decides anything, over all recorded tokens."""

    mean_exit_pdf: tuple[float, ...]
    mean_entropy_nats: float
    """Mean over tokens of H(p), at most ln R; near 0 the gate has collapsed."""
    mean_expected_loops: float
    expected_loops_std: float
    """Standard deviation across tokens; near 0 every token gets the same depth."""


def gate_statistics(record: DepthRecord, num_loops: int | None = None) -> GateStatistics:
    """Entropy and spread of the exit distribution over the first `num_loops` loops (the trained depth when None)."""
    logits = record.gate_logits[: record.gated_loops(num_loops)]
    expected = expected_loops(logits).double()
    return GateStatistics(
        mean_exit_pdf=tuple(exit_pdf(logits).double().mean(1).tolist()),
        mean_entropy_nats=exit_entropy(logits).double().mean().item(),
        mean_expected_loops=expected.mean().item(),
        expected_loops_std=expected.std(correction=0).item(),
    )


def loops_at(record: DepthRecord, threshold: float, num_loops: int) -> Int[Tensor, " N"]:
    """The loop, 1 to `num_loops`, at which each token leaves: the very decision of the engine.

    Raises UserError for a negative threshold or NaN.
    """
    return exit_loops(QuantileExit(threshold), record.gate_logits[:num_loops], num_loops)


def suffix_max(loops: Int[Tensor, " N"], sequence_ids: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """For each position, the largest value among it and all later positions of its sequence.

    `sequence_ids` must be sorted. These are the loops a position is computed to under the exact cache.
    """
    # Later sequences get a lower floor, so that one running maximum from the right serves them all.
    span = int(loops.max()) + 1
    floor = (sequence_ids.max() - sequence_ids) * span
    return (loops + floor).flip(0).cummax(0).values.flip(0) - floor


def covering_thresholds(record: DepthRecord, num_loops: int | None = None, count: int = 33) -> tuple[float, ...]:
    """0, 1, and at most `count` - 2 thresholds between them that spread the mean depth evenly over 1 to R.

    See :func:`~looplm.evaluation.exit_rules.spread_thresholds`. Equal thresholds are given once.
    """
    cdf = exit_cdf(record.gate_logits[: record.gated_loops(num_loops)])[:-1]
    return tuple(sorted({0.0, 1.0, *spread_thresholds(cdf, count)}))


def exit_curve(
    record: DepthRecord,
    thresholds: Sequence[float] | None = None,
    num_loops: int | None = None,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[ExitPoint, ...]:
    """Depth, quality and work at each threshold (:func:`covering_thresholds` when None), in the order given.

    The gate decides among the first `num_loops` loops, the trained depth when None. Raises UserError for an
    impossible threshold and below two documents.
    """
    num_loops = record.gated_loops(num_loops)
    thresholds = covering_thresholds(record, num_loops) if thresholds is None else thresholds
    weights = resample_weights(record.num_documents, num_resamples, seed)
    points: list[ExitPoint] = []
    for threshold in thresholds:
        loops = loops_at(record, threshold, num_loops)  # (N,)
        bpb, resampled = bits_per_byte(record, cross_entropy_at(record, loops), weights)
        shares = torch.bincount(loops - 1, minlength=num_loops).double() / record.num_tokens
        mean_loops = loops.double().mean().item()
        points.append(
            ExitPoint(
                threshold=threshold,
                mean_loops=mean_loops,
                weight_passes_per_token=mean_loops,
                token_loops_per_token=suffix_max(loops, record.sequence_ids).double().mean().item(),
                bits_per_byte=bpb.item(),
                bits_per_byte_stderr=standard_error(resampled).item(),
                exit_shares=tuple(shares.tolist()),
            )
        )
    return tuple(points)


def cross_entropy_at(record: DepthRecord, loops: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Nats of each token read out at its own loop, 1 to R."""
    return record.cross_entropy.gather(0, loops[None] - 1)[0]
