"""What the numbers say, a plain sentence each, whichever way they fall. The page and the terminal print the same."""

import math
from dataclasses import dataclass

from looplm.evaluation.bootstrap import Interval
from looplm.evaluation.depth_quality import DepthQuality
from looplm.evaluation.depth_sweep import DepthSweep
from looplm.evaluation.exit_curve import ExitPoint, GateStatistics
from looplm.report.schema import FoldModel, TextModel, Twin

ENTROPY_FLOOR = 0.3
"""Share of ln R that the mean entropy of the exit distribution should exceed after Stage I."""
FAIR_SHARE = 0.4
"""Share of an even part of the exit probability below which loop 1 counts as left behind in training."""
DEPTH_SPREAD_FLOOR = 0.1
"""Standard deviation of the expected depth across tokens that the gate should reach after Stage II."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Verdict:
    """A finding, and whether it is what one would hope for (None: neither good nor bad)."""

    text: str
    good: bool | None


def text_model_verdicts(model: TextModel) -> list[Verdict]:
    """All findings about a model of text, in the order of the page."""
    found = [
        depth_verdict(model.sweep),
        first_loop_verdict(model.stage_one_gate),
        anytime_verdict(model.sweep),
        beyond_verdict(model.sweep),
        twin_verdict(model.twin, model.sweep.trained_loops) if model.twin is not None else None,
        entropy_verdict(model.stage_one_gate),
        spread_verdict(model.gate),
        quality_verdict(model.quality),
        curve_verdict(model.quality),
        hull_verdict(model.quality),
        work_verdict(model.thresholds),
    ]
    return [verdict for verdict in found if verdict is not None]


def depth_verdict(sweep: DepthSweep) -> Verdict:
    """Does depth pay, within the trained depth?"""
    first, within = sweep.points[0], sweep.points[: sweep.trained_loops]
    best = min(within, key=lambda point: point.bits_per_byte)
    if best.num_loops == 1:
        return Verdict("Depth does not pay: no loop up to the trained depth is better than the first.", False)
    saved, change = 1 - best.bits_per_byte / first.bits_per_byte, best.change_from_first_bits_per_byte
    pays = change.high < 0
    return Verdict(
        f"Depth pays{'' if pays else ', if at all'}: loop {best.num_loops} needs {saved:.1%} fewer bits per byte than "
        f"loop 1, {best.bits_per_byte:.3f} against {first.bits_per_byte:.3f}: a change of {_signed(change)}.",
        True if pays else None,
    )


def first_loop_verdict(gate: GateStatistics) -> Verdict | None:
    """Whether loop 1 was trained enough for a gain over it to mean much; None where it was."""
    share = gate.mean_exit_pdf[0]
    if len(gate.mean_exit_pdf) == 1 or share >= FAIR_SHARE / len(gate.mean_exit_pdf):
        return None
    return Verdict(
        f"Loop 1 has only {share:.0%} of the exit probability after Stage I, so little of the training went into it: "
        "part of the gain over it is that it was left behind. A one-loop twin is the fairer rival.",
        None,
    )


def beyond_verdict(sweep: DepthSweep) -> Verdict | None:
    """What happens past the trained depth; None where the sweep stops at it."""
    beyond = sweep.points[sweep.trained_loops :]
    if not beyond:
        return None
    trained, last = sweep.points[sweep.trained_loops - 1], beyond[-1]
    change = last.bits_per_byte / trained.bits_per_byte - 1
    direction = "higher" if change > 0 else "lower"
    return Verdict(
        f"Beyond the {sweep.trained_loops} loops it was trained with, bits per byte are {abs(change):.1%} {direction} "
        f"at loop {last.num_loops} ({last.bits_per_byte:.3f}).",
        None,
    )


def anytime_verdict(sweep: DepthSweep) -> Verdict:
    """Is one more loop never worse on average, within the trained depth? (Ouro, section 7, claims so.)"""
    worse = [
        point.num_loops
        for point in sweep.points[: sweep.trained_loops - 1]
        if point.loss_change_nats is not None and point.loss_change_nats > 0
    ]
    if sweep.trained_loops == 1:
        return Verdict("With one loop there is no next loop to compare with.", None)
    if not worse:
        return Verdict("Up to the trained depth, every further loop lowers the mean loss.", True)
    steps = " and ".join(f"{loop} to {loop + 1}" for loop in worse)
    return Verdict(f"The mean loss rises from loop {steps}: more loops are not always better here.", False)


def twin_verdict(twin: Twin, trained_loops: int) -> Verdict:
    """The looped model against a one-loop model of the same shape, trained on the same tokens."""
    difference = twin.difference_bits_per_byte
    figures = f"at loop {trained_loops} the difference is {_signed(difference)}"
    if difference.high < 0:
        return Verdict(f"The looped model beats its one-loop twin: {figures}.", True)
    if difference.low > 0:
        return Verdict(f"The one-loop twin is better than the looped model: {figures}.", False)
    return Verdict(f"The looped model and its one-loop twin are too close to tell apart: {figures}.", None)


def entropy_verdict(gate: GateStatistics) -> Verdict:
    """Is the exit distribution still open after Stage I?"""
    floor = ENTROPY_FLOOR * math.log(len(gate.mean_exit_pdf))
    open_gate = gate.mean_entropy_nats > floor
    return Verdict(
        f"After Stage I the exit distribution has a mean entropy of {gate.mean_entropy_nats:.2f} nats, "
        f"{'above' if open_gate else 'not above'} the floor of {floor:.2f} ({ENTROPY_FLOOR} ln R): the gate "
        f"{'has not' if open_gate else 'has'} collapsed.",
        open_gate,
    )


def spread_verdict(gate: GateStatistics) -> Verdict:
    """Does the gate tell tokens apart after Stage II?"""
    decides = gate.expected_loops_std >= DEPTH_SPREAD_FLOOR
    return Verdict(
        f"After Stage II the expected depth is {gate.mean_expected_loops:.2f} loops with a standard deviation of "
        f"{gate.expected_loops_std:.2f} across tokens: the gate "
        f"{'gives different tokens different depths' if decides else 'treats nearly all tokens alike'}.",
        decides,
    )


def quality_verdict(quality: DepthQuality) -> Verdict:
    """Does the gate choose better than a coin of the same mean depth?"""
    gain = quality.mean_gain_bits_per_byte
    figures = f"{_signed(gain)} on average over depths"
    if quality.wins:
        return Verdict(f"The gate beats the line between fixed depths: a gain of {figures}.", True)
    if quality.loses:
        return Verdict(f"Fixed depths beat the gate: its gain is {figures}.", False)
    return Verdict(
        f"The gate and the line between fixed depths are too close to tell apart: a gain of {figures}.", None
    )


def curve_verdict(quality: DepthQuality) -> Verdict:
    """Does the whole curve lie at or below the line?"""
    # At 0 and 1 both meet by construction; a rounding error there is no finding.
    gaps = [gap for gap in quality.gaps if 0 < gap.threshold < 1]
    above = [gap for gap in gaps if gap.gain_bits_per_byte.value < -_ROUNDING]
    clearly = [gap for gap in above if gap.gain_bits_per_byte.high < 0]
    if not above:
        return Verdict(f"Its curve lies at or below that line at all {len(gaps)} thresholds.", True)
    return Verdict(
        f"Its curve lies above that line at {len(above)} of {len(gaps)} thresholds (beyond the interval at "
        f"{len(clearly)}), by {-quality.worst_gain_bits_per_byte:.4f} bits per byte at worst.",
        False if clearly else None,
    )


def hull_verdict(quality: DepthQuality) -> Verdict:
    """Against a harder rival: the best mixture of any two fixed depths."""
    gain = quality.mean_gain_over_hull_bits_per_byte
    return Verdict(
        f"Against the best coin between any two fixed depths, neighbours or not, the gain is {_signed(gain)}.",
        True if gain.low > 0 else (False if gain.high < 0 else None),
    )


def work_verdict(points: tuple[ExitPoint, ...]) -> Verdict:
    """Claimed depth against work done, at the round threshold nearest to half the depth range."""
    num_loops = len(points[0].exit_shares)
    point = min(points, key=lambda point: abs(point.mean_loops - (1 + num_loops) / 2))
    saved_passes = 1 - point.weight_passes_per_token / num_loops
    saved_loops = 1 - point.token_loops_per_token / num_loops
    return Verdict(
        f"At threshold {point.threshold:g} a token is read out after {point.mean_loops:.2f} of {num_loops} loops. At "
        f"batch 1 with the exact cache that saves {saved_passes:.0%} of the weight passes, and {saved_loops:.0%} of "
        f"the token-loops: {point.token_loops_per_token:.2f} are computed for it in the end.",
        None,
    )


def fold_verdict(fold: FoldModel) -> Verdict:
    """Do longer expressions need more loops, and does the gate know?"""
    easy, hard = fold.groups[0], fold.groups[-1]
    deeper = hard.expected_loops > easy.expected_loops
    return Verdict(
        f"At k = {easy.group} loop 1 is right on {easy.accuracy_by_loop[0]:.0%} and loop {fold.trained_loops} on "
        f"{easy.accuracy_by_loop[fold.trained_loops - 1]:.0%}; at k = {hard.group} on "
        f"{hard.accuracy_by_loop[0]:.0%} and {hard.accuracy_by_loop[fold.trained_loops - 1]:.0%}. The gate spends "
        f"{easy.expected_loops:.2f} loops on k = {easy.group} and {hard.expected_loops:.2f} on k = {hard.group}: "
        f"{'more' if deeper else 'no more'} on the longer ones.",
        deeper,
    )


def _signed(interval: Interval) -> str:
    figures = f"{interval.value:+.4f} bits per byte (95% interval {interval.low:+.4f} to {interval.high:+.4f}"
    return f"{figures}, over documents)"
