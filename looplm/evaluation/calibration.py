"""Choosing an exit threshold on held-out text: for a mean depth, or for the largest loss one is willing to pay."""

from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.evaluation.bootstrap import (
    NUM_RESAMPLES,
    Interval,
    document_sums,
    percentile_interval,
    resample_weights,
)
from looplm.evaluation.exit_curve import cross_entropy_at
from looplm.evaluation.exit_rules import ExitRule
from looplm.evaluation.record import DepthRecord

NUM_THRESHOLDS = 513
"""Tried, spread evenly over mean depths."""
DEPTH_TOLERANCE = 0.1
"""Loops by which the mean depth may miss its target."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A threshold, and what it does to the text it was chosen on."""

    threshold: float
    """Of the rule's own score: the cdf for the gate, minus epsilon for hidden change."""
    mean_loops: float
    exit_shares: tuple[float, ...]
    """Share of tokens that leave at loop 1, 2, ..., R."""
    loss_nats: float
    full_loss_nats: float
    """With all loops."""
    loss_increase: Interval
    """Relative, over all loops' loss: 0.01 is 1 %; over documents."""
    num_tokens: int


def calibrate_depth(record: DepthRecord, rule: ExitRule, target_loops: float) -> Calibration:
    """The threshold whose mean depth is nearest to `target_loops`.

    Raises UserError when none comes within DEPTH_TOLERANCE, as with a gate that treats all tokens alike.
    """
    loops = len(rule.scores) + 1
    if not 1 <= target_loops <= loops:
        raise UserError(f"A mean depth of {target_loops:g} cannot be reached: the model has loops 1 to {loops}.")
    tried = _tried(rule)
    threshold = min(tried, key=lambda one: (abs(tried[one] - target_loops), tried[one]))
    if abs(tried[threshold] - target_loops) > DEPTH_TOLERANCE:
        below = max((depth for depth in tried.values() if depth <= target_loops), default=1.0)
        above = min((depth for depth in tried.values() if depth >= target_loops), default=float(loops))
        raise UserError(
            f"No threshold gives a mean depth of {target_loops:g}: the nearest that this gate can do are {below:.2f} "
            f"and {above:.2f} loops. It treats too many tokens alike; train it (looplm gate), or use a fixed depth."
        )
    return _calibration(record, rule, threshold)


def calibrate_loss(record: DepthRecord, rule: ExitRule, max_increase: float) -> Calibration:
    """The threshold of the smallest mean depth whose loss is at most (1 + `max_increase`) that of all loops.

    Raises UserError when no token may leave early at that price.
    """
    full = record.cross_entropy[len(rule.scores)].double().mean().item()
    tried = _tried(rule)
    allowed = [
        threshold
        for threshold in tried
        if cross_entropy_at(record, rule.loops(threshold)).double().mean().item() <= full * (1 + max_increase) + 1e-12
    ]
    loops = len(rule.scores) + 1
    best = min(allowed, key=lambda one: tried[one], default=inf)
    if best not in tried or tried[best] >= loops:
        least = (
            min(
                cross_entropy_at(record, rule.loops(one)).double().mean().item() for one in tried if tried[one] < loops
            )
            if any(depth < loops for depth in tried.values())
            else full
        )
        raise UserError(
            f"No threshold below all {loops} loops keeps the loss within {max_increase:+.2%} of theirs, {full:.4f} "
            f"nats: the least that early exits cost here is {least / full - 1:+.2%}. Allow more."
        )
    return _calibration(record, rule, best)


def _tried(rule: ExitRule) -> dict[float, float]:
    """Finite thresholds and their mean depths, between neighbouring scores so that rounding decides nothing."""
    scores = rule.covering_thresholds(NUM_THRESHOLDS)
    between = [(low + high) / 2 for low, high in zip(scores, scores[1:], strict=False) if -inf < low and high < inf]
    first = [0.0] if rule.name == "gate" else []  # leave at once, which lies below all scores
    return {threshold: rule.loops(threshold).double().mean().item() for threshold in (*first, *between)}


def _calibration(record: DepthRecord, rule: ExitRule, threshold: float) -> Calibration:
    loops: Int[Tensor, " N"] = rule.loops(threshold)
    last = len(rule.scores)
    loss, full = cross_entropy_at(record, loops).double(), record.cross_entropy[last].double()
    weights = resample_weights(record.num_documents, NUM_RESAMPLES, 0)

    def resampled(values: Float[Tensor, " N"]) -> Float[Tensor, " W"]:
        return weights @ document_sums(values, record.document_ids, record.num_documents)

    increase = (loss.sum() / full.sum() - 1).item()
    return Calibration(
        threshold=threshold,
        mean_loops=loops.double().mean().item(),
        exit_shares=tuple((torch.bincount(loops - 1, minlength=last + 1).double() / record.num_tokens).tolist()),
        loss_nats=loss.mean().item(),
        full_loss_nats=full.mean().item(),
        loss_increase=percentile_interval(increase, resampled(loss) / resampled(full) - 1),
        num_tokens=record.num_tokens,
    )
