"""Scaling laws of looped models: how sure a fit is, how it does outside of the points it saw, and what it predicts.

The laws are Ouro's (appendix D): one for the total loss over size, data and trained depth, one for the loss of every
loop of models with the same trained depth, and the total loss that the latter predicts once its loops are weighted by
the mean exit distribution. Parcae's form (arXiv 2604.12946) counts the parameters of the unrolled model instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student_t

from looplm.analysis.intervals import Interval
from looplm.analysis.power_law import LOOP_LAW, PARCAE_LAW, Fit, Law, Points, fit_law, r_squared, refit
from looplm.analysis.runs import RunPoint
from looplm.errors import UserError

WIDEST_INTERVAL = 0.2
"""A parameter whose interval is wider than this share of its value is not called identified."""
CONFIDENCE = 0.95
HoldOutBy = Literal["size", "data", "depth"]
_VARIABLE_OF: dict[HoldOutBy, tuple[str, ...]] = {
    "size": ("parameters", "unrolled_parameters"),
    "data": ("tokens",),
    "depth": ("loops",),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a fit."""

    value: float
    interval: Interval | None
    """Over bootstrap resamples; None where the grid could not carry the parameter."""
    identified: bool
    note: str
    """Why it is not identified; empty where it is."""


@dataclass(frozen=True)
class HoldOut:
    """A fit that has not seen the largest size, the last half of the data or the deepest loops."""

    by: HoldOutBy
    limit: float
    """The fit saw points up to here."""
    num_fitted: int
    num_held_out: int
    r2: float
    """On the points held out."""
    mean_error: float
    """Mean |predicted / measured - 1| on them."""
    worst_error: float


@dataclass(frozen=True)
class LawReport:
    """One law fitted to one set of points."""

    name: str
    formula: str
    num_points: int
    num_curves: int
    dropped_curves: int
    """Curves left out since their loss rises with the data."""
    r2: float
    mean_error: float
    """Mean |predicted / measured - 1| on the fitted points."""
    parameters: dict[str, Parameter]
    hold_outs: tuple[HoldOut, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of the parameters that these points do not pin down."""
        return tuple(name for name, parameter in self.parameters.items() if not parameter.identified)


@dataclass(frozen=True)
class TotalFromSteps:
    """The total loss as the step-wise fit of one trained depth predicts it (Ouro, appendix D.3)."""

    trained_loops: int
    mean_exit_pdf: tuple[float, ...]
    r2: float
    mean_error: float
    measured: tuple[float, ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True)
class ScalingStudy:
    """All fits that a set of runs allows."""

    total: LawReport | None
    steps: dict[int, LawReport]
    """By trained depth."""
    total_from_steps: dict[int, TotalFromSteps]
    parcae: LawReport | None
    notes: tuple[str, ...]
    """What could not be fitted, and why."""


def scaling_study(
    runs: Sequence[RunPoint], *, offsets: bool = True, num_resamples: int = 200, seed: int = 0
) -> ScalingStudy:
    """Fits every law that `runs` allow. Raises UserError when there is none.

    offsets: fit the t of Ouro's laws too; without them the exponents are better determined.
    """
    law = LOOP_LAW if offsets else LOOP_LAW.without_offsets()
    notes: list[str] = []
    settings = {"num_resamples": num_resamples, "seed": seed}
    steps: dict[int, LawReport] = {}
    from_steps: dict[int, TotalFromSteps] = {}
    total = _report("total loss", law, total_points(runs), notes, **settings)
    for depth in sorted({run.num_loops for run in runs if run.num_loops > 1}):
        chosen = [run for run in runs if run.num_loops == depth]
        kept, dropped = falling_curves(step_points(chosen))
        name = f"step-wise loss of {depth} loops"
        report = _report(name, law, kept, notes, dropped_curves=dropped, **settings)
        if report is None:
            continue
        steps[depth] = report
        if all(run.exit_pdf is not None for run in chosen):
            from_steps[depth] = total_from_steps(law, report, chosen)
        else:
            notes.append(f"total from steps, {depth} loops: the runs do not say their exit pdf")
    parcae = _parcae(runs, notes, **settings)
    if total is None and not steps and parcae is None:
        raise UserError("No law can be fitted to these runs. " + "; ".join(notes) + ".")
    return ScalingStudy(total, steps, from_steps, parcae, tuple(notes))


def _parcae(runs: Sequence[RunPoint], notes: list[str], **settings: int) -> LawReport | None:
    if any(run.unrolled_parameters is None for run in runs):
        notes.append("Parcae's form: the runs do not say their core_parameters")
        return None
    return _report("Parcae", PARCAE_LAW, parcae_points(runs), notes, **settings)


def _report(
    name: str, law: Law, points: Points, notes: list[str], dropped_curves: int = 0, **settings: int
) -> LawReport | None:
    try:
        return law_report(name, law, points, dropped_curves=dropped_curves, **settings)
    except UserError as error:
        notes.append(f"{name}: {error}")
        return None


def law_report(
    name: str, law: Law, points: Points, *, num_resamples: int = 200, seed: int = 0, dropped_curves: int = 0
) -> LawReport:
    """Fits `law`, with intervals and hold-out fits. Raises UserError for too few points."""
    fit = fit_law(law, points, seed=seed)
    intervals = bootstrap(fit, points, num_resamples=num_resamples, seed=seed)
    predicted = fit.predict(points.values)
    return LawReport(
        name=name,
        formula=formula(law),
        num_points=len(points),
        num_curves=len(np.unique(points.curves)),
        dropped_curves=dropped_curves,
        r2=fit.r2,
        mean_error=float(np.abs(predicted / points.loss - 1).mean()),
        parameters=judged(fit, intervals, points),
        hold_outs=hold_outs(law, points, seed=seed),
        measured=tuple(points.loss.tolist()),
        predicted=tuple(predicted.tolist()),
    )


def formula(law: Law) -> str:
    """The law as one line of text."""
    terms = [
        f"{term.coefficient}/({term.variable}{f' + {term.offset}' if term.offset else ''})^{term.exponent}"
        for term in law.terms
    ]
    return " + ".join(("E", *terms))


# --- Points of runs ------------------------------------------------------------------------------------------------


def total_points(runs: Sequence[RunPoint]) -> Points:
    """Total loss over parameters, tokens and trained depth."""
    return _points(runs, [float(run.num_loops) for run in runs], [run.total_loss for run in runs])


def step_points(runs: Sequence[RunPoint]) -> Points:
    """The loss of every loop of every run. "loops" is the loop it is the loss of; a curve is one loop of one run."""
    rows = [(run, loop, loss) for run in runs for loop, loss in enumerate(run.loop_losses, start=1)]
    points = _points([row[0] for row in rows], [float(row[1]) for row in rows], [row[2] for row in rows])
    loops = points.values["loops"].astype(int)
    return Points(points.values, points.loss, points.curves * (int(loops.max()) + 1) + loops)


def parcae_points(runs: Sequence[RunPoint]) -> Points:
    """Total loss over unrolled parameters and tokens."""
    points = total_points(runs)
    unrolled = np.array([run.unrolled_parameters for run in runs], dtype=float)
    return Points({"unrolled_parameters": unrolled, "tokens": points.values["tokens"]}, points.loss, points.curves)


def _points(runs: Sequence[RunPoint], loops: Sequence[float], losses: Sequence[float]) -> Points:
    numbers = {name: i for i, name in enumerate(dict.fromkeys(run.run for run in runs))}
    return Points(
        {
            "parameters": np.array([run.num_parameters for run in runs], dtype=float),
            "tokens": np.array([run.num_tokens for run in runs], dtype=float),
            "loops": np.array(loops, dtype=float),
        },
        np.array(losses, dtype=float),
        np.array([numbers[run.run] for run in runs]),
    )


def falling_curves(points: Points) -> tuple[Points, int]:
    """The points without curves that end higher than they began, and how many such curves there were.

    A loop that gets worse as training goes on is being given up by the gate; Ouro leaves such curves out, too.
    """
    kept, dropped = np.ones(len(points), dtype=bool), 0
    for curve in np.unique(points.curves):
        mine = np.flatnonzero(points.curves == curve)
        ordered = mine[np.argsort(points.values["tokens"][mine])]
        if points.loss[ordered[-1]] > points.loss[ordered[0]]:
            kept[mine] = False
            dropped += 1
    return points.where(kept), dropped


# --- How sure, and how far -----------------------------------------------------------------------------------------


def bootstrap(fit: Fit, points: Points, *, num_resamples: int = 200, seed: int = 0) -> dict[str, Interval]:
    """Percentile intervals of the fit's parameters, by a wild bootstrap.

    Resampling runs would tear holes into a grid of a few sizes and depths. Instead the law is fitted again to what the
    fit predicts plus residuals: in half of the resamples each point gets a residual drawn from all, with a random
    sign; in the other half all points of a run keep theirs and change sign together. The interval is the wider of the
    two, since errors of one run may or may not go together.
    """
    rng = np.random.default_rng(seed)
    log_predicted = np.log(fit.predict(points.values))
    num_fitted = len(fit.parameters) - len(fit.dropped)
    # Residuals are smaller than errors by what the parameters have swallowed, and of few points their spread is itself
    # uncertain: Student's t against the normal distribution.
    rest = len(points) - num_fitted
    widen = np.sqrt(len(points) / rest) * student_t.ppf(0.5 + CONFIDENCE / 2, rest) / norm.ppf(0.5 + CONFIDENCE / 2)
    residuals = (np.log(points.loss) - log_predicted) * widen
    names = [name for name in fit.parameters if name not in fit.dropped]
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    # The estimate itself is always inside, also where one-sided resamples would leave it at the edge.
    outer = {name: (fit.parameters[name], fit.parameters[name]) for name in names}
    place = np.unique(points.curves, return_inverse=True)[1]
    for by_run in (False, True):
        found: list[list[float]] = []
        for _ in range(num_resamples // 2):
            errors = residuals if by_run else rng.choice(residuals, size=len(points))
            signs = rng.choice([-1.0, 1.0], size=len(points))
            errors = errors * (signs[place] if by_run else signs)
            again = refit(fit, points.with_loss(np.exp(log_predicted + errors)))
            found.append([again.parameters[name] for name in names])
        for name, (low, high) in zip(names, np.quantile(found, tails, axis=0).T.tolist(), strict=True):
            outer[name] = (min(low, outer[name][0]), max(high, outer[name][1]))
    return {name: Interval(fit.parameters[name], low, high) for name, (low, high) in outer.items()}


def judged(fit: Fit, intervals: Mapping[str, Interval], points: Points) -> dict[str, Parameter]:
    """Every parameter with its interval, and whether the points pin it down."""
    scales = {term.offset: float(points.values[term.variable].min()) for term in fit.law.terms}
    found: dict[str, Parameter] = {}
    for name, value in fit.parameters.items():
        if name in fit.dropped:
            found[name] = Parameter(value, None, False, fit.dropped[name])
            continue
        interval = intervals[name]
        # An offset may be 0; what counts is how it moves the smallest value that it is added to.
        size = value + scales.get(name, 0.0)
        width = (interval.high - interval.low) / size if size else np.inf
        if name in fit.free:
            note = "the grid leaves it open: other values predict the same losses"
        elif width > WIDEST_INTERVAL:
            note = f"known only to {interval.low:.3g} to {interval.high:.3g}"
        else:
            note = ""
        found[name] = Parameter(value, interval, not note, note)
    return found


def hold_outs(law: Law, points: Points, *, seed: int = 0) -> tuple[HoldOut, ...]:
    """The law fitted without the largest size, the second half of the data, the deepest loops, and tried on them.

    Those that leave too little to fit are left out.
    """
    found = []
    for by, names in _VARIABLE_OF.items():
        variable = next((term.variable for term in law.terms if term.variable in names), None)
        if variable is None:
            continue
        values = points.values[variable]
        levels = np.unique(values)
        limit = levels[-1] / 2 if by == "data" else levels[-2] if len(levels) > 1 else 0.0
        seen = values <= limit
        if len(np.unique(values[seen])) < 2:
            continue
        try:
            fit = fit_law(law, points.where(seen), seed=seed)
        except UserError:
            continue
        held = points.where(~seen)
        predicted = fit.predict(held.values)
        error = np.abs(predicted / held.loss - 1)
        found.append(
            HoldOut(
                by=by,
                limit=float(values[seen].max()),
                num_fitted=int(seen.sum()),
                num_held_out=len(held),
                r2=r_squared(held.loss, predicted),
                mean_error=float(error.mean()),
                worst_error=float(error.max()),
            )
        )
    return tuple(found)


def total_from_steps(law: Law, steps: LawReport, runs: Sequence[RunPoint]) -> TotalFromSteps:
    """The total loss of `runs`, all of one trained depth, from their step-wise fit: sum_r p_r L_r.

    p is the mean exit pdf over the runs. The entropy term of the objective is not part of it. Raises UserError where a
    run does not say its exit pdf.
    """
    pdfs = [run.exit_pdf for run in runs if run.exit_pdf is not None]
    if len(pdfs) < len(runs):
        raise UserError(
            "The total loss is predicted from loops weighted by the exit pdf; these runs do not say theirs."
        )
    pdf = np.mean(pdfs, axis=0)
    parameters = {name: parameter.value for name, parameter in steps.parameters.items()}
    at = total_points(runs).values
    predicted = sum(
        share * law.predict(parameters, at | {"loops": np.full(len(runs), float(loop))})
        for loop, share in enumerate(pdf, start=1)
    )
    measured = np.array([run.total_loss for run in runs])
    return TotalFromSteps(
        trained_loops=runs[0].num_loops,
        mean_exit_pdf=tuple(pdf.tolist()),
        r2=r_squared(measured, np.asarray(predicted)),
        mean_error=float(np.abs(predicted / measured - 1).mean()),
        measured=tuple(measured.tolist()),
        predicted=tuple(np.asarray(predicted).tolist()),
    )
