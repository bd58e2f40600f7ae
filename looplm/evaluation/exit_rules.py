"""Rules by which a token leaves the loop, all in one form, replayed on a record.

A rule is a score for every token and every loop below the last; a token leaves at the first loop whose score reaches
a threshold, and at the last loop if none does. Minus infinity therefore stops all tokens at loop 1 and plus infinity
none before loop R: every rule's curve runs from the first fixed depth to the last, and rules differ in between.
"""

from dataclasses import dataclass
from math import inf, nextafter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.evaluation.record import DepthRecord
from looplm.model.gate import exit_cdf


@dataclass(kw_only=True, frozen=True)
class ExitRule:
    """One rule, with its scores for the tokens of one record."""

    name: str
    scores: Float[Tensor, "R-1 N"]
    """Of loop 1 to R - 1; minus infinity where the rule cannot decide yet."""
    head_every_loop: bool = False
    """Whether the rule reads the LM head at each loop a token passes, or only where the token leaves."""

    def loops(self, threshold: float) -> Int[Tensor, " N"]:
        """The loop, 1 to R, at which each token leaves."""
        return 1 + (self._reached() < threshold).sum(0)

    def covering_thresholds(self, count: int = 33) -> tuple[float, ...]:
        """At most `count` thresholds in ascending order, both infinities among them, that spread the mean depth
        evenly over what the rule can reach. Equal ones are given once."""
        return tuple(sorted({-inf, inf, *spread_thresholds(self._reached(), count)}))

    def _reached(self) -> Float[Tensor, "R-1 N"]:
        """The best score so far: a token has left by loop r where this reaches the threshold."""
        return self.scores.cummax(0).values if len(self.scores) else self.scores


def spread_thresholds(reached: Float[Tensor, "R-1 N"], count: int) -> tuple[float, ...]:
    """`count` - 2 evenly spaced quantiles of scores that do not fall from loop to loop.

    The mean depth at a threshold is 1 + (R - 1) F(threshold), F the distribution of all these scores: evenly spaced
    quantiles make even steps of depth, whatever the scores. None where R is 1.
    """
    ordered = reached.flatten().sort().values
    if ordered.numel() == 0:
        return ()
    index = torch.linspace(0, ordered.numel() - 1, count).round().long()[1:-1]
    return tuple(ordered[index].tolist())


def gate_exit(record: DepthRecord, num_loops: int | None = None, *, name: str = "gate") -> ExitRule:
    """The exit cdf reaches a threshold: :class:`~looplm.inference.exit_policy.QuantileExit`, decision for decision.

    As in all rules here, `num_loops` is the depth R among which it decides, the trained depth when None; UserError
    when the record is not as deep.
    """
    cdf = exit_cdf(record.gate_logits[: record.gated_loops(num_loops)])[:-1].double()
    # A cdf that rounds to 1 does not leave at a threshold of 1, but does at every one below.
    return ExitRule(name=name, scores=cdf.clamp(max=nextafter(1.0, 0.0)))


def hidden_change_exit(record: DepthRecord, num_loops: int | None = None) -> ExitRule:
    """||h_r - h_{r-1}||_2 falls to eps, from loop 2 on (Ouro, 5.4.1); the threshold is -eps.

    Raises UserError when the record was made without `changes`.
    """
    return ExitRule(name="hidden change", scores=_from_loop_two(record, record.hidden_change, num_loops))


def confidence_exit(record: DepthRecord, num_loops: int | None = None) -> ExitRule:
    """KL(p_{r-1} || p_r) falls to eps, from loop 2 on (Huginn, arXiv 2502.05171, section 6); the threshold is -eps.

    Pays the LM head at every loop. Raises UserError when the record was made without `changes`.
    """
    scores = _from_loop_two(record, record.prediction_kl, num_loops)
    return ExitRule(name="confidence", scores=scores, head_every_loop=True)


def stable_argmax_exit(record: DepthRecord, num_loops: int | None = None) -> ExitRule:
    """The most probable token is that of the loop before: one point, at the threshold 1, and no knob to turn."""
    loops = record.gated_loops(num_loops)
    stable = record.predictions[1 : loops - 1] == record.predictions[: max(0, loops - 2)]
    scores = torch.full((loops - 1, record.num_tokens), -inf, dtype=torch.float64)
    scores[1:] = torch.where(stable, 1.0, -inf)
    return ExitRule(name="stable argmax", scores=scores, head_every_loop=True)


def fixed_exit(record: DepthRecord, num_loops: int | None = None) -> ExitRule:
    """Every token at the same loop: the threshold r is depth r."""
    loops = record.gated_loops(num_loops)
    scores = torch.arange(1, loops, dtype=torch.float64)[:, None].expand(-1, record.num_tokens)
    return ExitRule(name="fixed depth", scores=scores)


def oracle_exit(record: DepthRecord, num_loops: int | None = None) -> ExitRule:
    """Knows every token's loss at every loop: no assignment of loops to tokens has a lower mean loss at its depth.

    With a price s on each loop a token does best at the loop that minimises L_r + s r. These loops are corners of the
    lower convex hull of L over r; the score of loop r is the hull's slope from r to r + 1 and the threshold is -s.
    The threshold 0 is the best loop of each token; beyond it depth is forced on tokens that it harms.
    """
    loss = record.cross_entropy[: record.gated_loops(num_loops)].double()
    return ExitRule(name="oracle", scores=hull_slopes(loss))


def hull_slopes(values: Float[Tensor, "R N"]) -> Float[Tensor, "R-1 N"]:
    """Slopes of the lower convex hull of each column, over steps of 1; they do not fall along the column.

    The slope over the step from i to i + 1 is max over a <= i of min over b > i of (v_b - v_a) / (b - a).
    """
    num_loops = len(values)
    slopes = values.new_empty(num_loops - 1, values.shape[1])
    for i in range(num_loops - 1):
        best = torch.full_like(values[0], -inf)
        for a in range(i + 1):
            steepest = torch.stack([(values[b] - values[a]) / (b - a) for b in range(i + 1, num_loops)]).amin(0)
            best = torch.maximum(best, steepest)
        slopes[i] = best
    return slopes


def _from_loop_two(record: DepthRecord, change: Tensor | None, num_loops: int | None) -> Tensor:
    """The negated change at loop 2 to R - 1, behind a loop 1 that has nothing to compare with."""
    if change is None:
        raise UserError("This record holds no changes between loops: make it with record(..., changes=True).")
    loops = record.gated_loops(num_loops)
    scores = torch.full((loops - 1, record.num_tokens), -inf, dtype=torch.float64)
    scores[1:] = -change[: max(0, loops - 2)].double()
    return scores
