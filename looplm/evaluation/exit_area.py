"""Exit rules beside each other: depth, quality and FLOPs at every threshold, and one figure for the whole curve.

The area under a depth-quality curve is the mean of its bits per byte over mean depths from 1 to R:

    1 / (R - 1) * integral from 1 to R of b(d) dd

b runs straight between the measured points, as they are: a coin that sends each token by one of two thresholds lands
on the line between them on average. No lower hull is taken: it would let a rule skip thresholds that serve it badly.
A rule that reaches no depth below 2 begins with the line from loop 1 to there, which the same coin gives. All rules
meet at both ends, loop 1 and loop R for every token; the area compares what lies between, and less is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.evaluation.bootstrap import NUM_RESAMPLES, Interval, document_sums, percentile_interval, resample_weights
from looplm.evaluation.depth_sweep import bits_per_byte, mean_depth
from looplm.evaluation.exit_curve import cross_entropy_at, suffix_max
from looplm.evaluation.exit_rules import ExitRule
from looplm.evaluation.record import DepthRecord
from looplm.model.config import LoopedConfig
from looplm.model.flops import inference_flops


@dataclass(kw_only=True, frozen=True)
class RulePoint:
    """One rule at one threshold."""

    threshold: float
    mean_loops: float
    """The loop a token is read out at, on average."""
    bits_per_byte: float
    loss_nats: float
    """Mean cross entropy of a token."""
    shuffled_bits_per_byte: float
    """Expected, if the same exit loops were dealt to the tokens at random."""
    exit_shares: tuple[float, ...]
    """Share of tokens that leave at loop 1, 2, ..., R."""
    flops_per_token: float
    """Of `mean_loops` loops and the LM head, at every loop if the rule reads it there; without attention scores."""
    flops_per_token_exact_cache: float
    """The same for the loops computed under the exact per-loop cache, where later tokens catch earlier ones up."""


@dataclass(kw_only=True, frozen=True)
class RuleCurve:
    """One rule at all its thresholds. Intervals are over documents."""

    name: str
    head_every_loop: bool
    points: tuple[RulePoint, ...]
    """In order of threshold, from depth 1 to depth R."""
    area_bits_per_byte: Interval
    shuffled_gain_bits_per_byte: Interval
    """Area of the shuffled curve less that of the rule: above 0 where it matters which token gets which depth."""


@dataclass(kw_only=True, frozen=True)
class AreaDifference:
    """Area of `name` less that of `other`, resampled together: below 0 where `name` is the better rule."""

    name: str
    other: str
    bits_per_byte: Interval


@dataclass(kw_only=True, frozen=True)
class RuleComparison:
    """What :func:`compare_exit_rules` finds."""

    num_loops: int
    num_tokens: int
    num_documents: int
    curves: tuple[RuleCurve, ...]
    """In the order of the rules."""
    differences: tuple[AreaDifference, ...]
    """Of every pair of rules, the later less the earlier."""

    def curve(self, name: str) -> RuleCurve:
        """The curve of one rule. Raises KeyError for a rule that was not compared."""
        return {curve.name: curve for curve in self.curves}[name]

    def difference(self, name: str, other: str) -> Interval:
        """Area of `name` less that of `other`. Raises KeyError for a rule that was not compared."""
        for found in self.differences:
            if (found.name, found.other) == (name, other):
                return found.bits_per_byte
            if (found.name, found.other) == (other, name):
                pair = found.bits_per_byte
                return Interval(-pair.value, -pair.high, -pair.low)
        raise KeyError((name, other))


def compare_exit_rules(
    record: DepthRecord,
    rules: Sequence[ExitRule],
    config: LoopedConfig,
    num_loops: int | None = None,
    *,
    count: int = 33,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> RuleComparison:
    """Replays every rule on `record` at up to `count` thresholds, and compares their areas.

    Args:
        record: the losses. Scores may come from another record of the same tokens, so that the gates of Stage I and
            Stage II are compared over one frozen language model.
        rules: with scores for loops 1 to R - 1 and the tokens of `record`.
        config: of the model, for the FLOPs.
        num_loops: R, the trained depth as far as it was recorded when None.

    Each resample of the documents moves all curves together. Raises UserError below two documents, and when a rule's
    scores are not of this record's shape or two rules have one name.
    """
    num_loops = record.gated_loops(num_loops)
    _check(rules, (num_loops - 1, record.num_tokens))
    every = torch.ones(1, record.num_documents, dtype=torch.float64)
    # Resample 0 is the text itself: every document once.
    weights = torch.cat((every, resample_weights(record.num_documents, num_resamples, seed)))
    replayed = [_replay(record, rule, config, num_loops, count, weights) for rule in rules]
    areas = [area for _, area in replayed]
    return RuleComparison(
        num_loops=num_loops,
        num_tokens=record.num_tokens,
        num_documents=record.num_documents,
        curves=tuple(curve for curve, _ in replayed),
        differences=tuple(
            AreaDifference(
                name=rules[later].name,
                other=rules[earlier].name,
                bits_per_byte=_interval(areas[later] - areas[earlier]),
            )
            for earlier, later in combinations(range(len(rules)), 2)
        ),
    )


def _check(rules: Sequence[ExitRule], shape: tuple[int, int]) -> None:
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise UserError(f"Two exit rules have the same name: {', '.join(names)}. Give each its own.")
    for rule in rules:
        if rule.scores.shape != shape:
            raise UserError(
                f"The scores of exit rule {rule.name!r} are for {tuple(rule.scores.shape)} (loops, tokens) and the "
                f"record for {shape}. Make the rule from a record of the same tokens, with the same num_loops."
            )


def _replay(
    record: DepthRecord, rule: ExitRule, config: LoopedConfig, num_loops: int, count: int, weights: Tensor
) -> tuple[RuleCurve, Tensor]:
    """The curve of one rule, and its area in every resample, (W,)."""
    thresholds = rule.covering_thresholds(count)
    loops = torch.stack([rule.loops(threshold) for threshold in thresholds])  # (Q, N)
    loss = torch.stack([cross_entropy_at(record, row) for row in loops])  # (Q, N)
    _, curve = bits_per_byte(record, loss, weights)  # (W, Q)
    depth = mean_depth(record, loops, weights)  # (W, Q)
    shares = _exit_shares(record, loops, num_loops, weights)  # (W, Q, R)
    _, fixed = bits_per_byte(record, record.cross_entropy[:num_loops], weights)  # (W, R)
    shuffled = (shares * fixed[:, None]).sum(-1)  # (W, Q)
    area = mean_over_depth(depth, curve)  # (W,)
    points: list[RulePoint] = []
    for i, threshold in enumerate(thresholds):
        mean_loops = loops[i].double().mean().item()
        computed = suffix_max(loops[i], record.sequence_ids).double().mean().item()
        heads = mean_loops if rule.head_every_loop else 1
        points.append(
            RulePoint(
                threshold=threshold,
                mean_loops=mean_loops,
                bits_per_byte=curve[0, i].item(),
                loss_nats=loss[i].double().mean().item(),
                shuffled_bits_per_byte=shuffled[0, i].item(),
                exit_shares=tuple(shares[0, i].tolist()),
                flops_per_token=inference_flops(config, mean_loops, heads),
                flops_per_token_exact_cache=inference_flops(config, computed, heads),
            )
        )
    found = RuleCurve(
        name=rule.name,
        head_every_loop=rule.head_every_loop,
        points=tuple(points),
        area_bits_per_byte=_interval(area),
        shuffled_gain_bits_per_byte=_interval(mean_over_depth(depth, shuffled) - area),
    )
    return found, area


def _exit_shares(record: DepthRecord, loops: Int[Tensor, "Q N"], num_loops: int, weights: Tensor) -> Tensor:
    """Share of tokens that leave at each loop, in every resample: (W, Q, R)."""
    sums = [
        document_sums((loops == r).double(), record.document_ids, record.num_documents)
        for r in range(1, num_loops + 1)
    ]
    counted = torch.einsum("wm,rqm->wqr", weights, torch.stack(sums))
    return counted / counted.sum(-1, keepdim=True)


def mean_over_depth(depth: Float[Tensor, "W Q"], quality: Float[Tensor, "W Q"]) -> Float[Tensor, " W"]:
    """Trapezoidal area under `quality` over `depth`, which must not fall along Q, divided by the depth spanned.

    0 where all depths are one.
    """
    span = (depth[:, -1] - depth[:, 0]).clamp(min=torch.finfo(depth.dtype).tiny)
    return torch.trapezoid(quality, depth, dim=1) / span


def _interval(resampled: Tensor) -> Interval:
    """Of a figure whose first resample is the text itself."""
    return percentile_interval(resampled[0].item(), resampled[1:])
