"""Scaling laws as a section of a page."""

from html import escape

from looplm.analysis.scaling import LawReport, ScalingStudy
from looplm.report import analysis_plots as plots
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

READING = (
    "Each dot is a measured loss and what the law gives for it; on the dotted line the two are equal. R2 near 1 on "
    "the "
    "points that were fitted says little: look at the hold-outs, which the fit has not seen. A parameter is called "
    "identified when its 95% interval is narrower than a fifth of its value and no other combination predicts the "
    "same "
    "losses; do not quote one that is not. Coefficients come in units of a power of their variable, so they are "
    "uncertain even where the exponent is known. An exponent of loops above 0 means that depth pays."
)


def scaling_section(study: ScalingStudy) -> str:
    """Every law of a study."""
    laws = [law for law in (study.total, *study.steps.values(), study.parcae) if law is not None]
    notes = "".join(f'<p class="note">Not fitted: {escape(note)}.</p>' for note in study.notes)
    rows = tuple(
        (f"{found.trained_loops}", f"{found.r2:.4f}", f"{found.mean_error:.2%}", _shares(found.mean_exit_pdf))
        for found in study.total_from_steps.values()
    )
    from_steps = [
        "<h3>The total loss from the loss of every loop</h3>",
        "<p>The step-wise law, its loops weighted by the mean exit distribution, predicts the total loss without "
        "having "
        "been fitted to it. What is missing is the entropy term, where the measured total holds it.</p>",
        *(
            figure(
                plots.total_from_steps_figure(depth, found.measured, found.predicted),
                f"{depth} loops: total loss predicted from the steps.",
            )
            for depth, found in study.total_from_steps.items()
        ),
        table(Cells("Total loss from steps", ("Trained loops", "R2", "Mean error", "Mean exit pdf"), rows)),
    ]
    return "\n".join(
        [
            '<h2 id="scaling">Scaling laws</h2>',
            f"<p>{READING}</p>",
            *(_law(law) for law in laws),
            *(from_steps if rows else []),
            notes,
        ]
    )


def _law(law: LawReport) -> str:
    parameters = tuple(
        (
            name,
            f"{one.value:.4g}",
            "" if one.interval is None else f"{one.interval.low:.4g} to {one.interval.high:.4g}",
            "yes" if one.identified else "no",
            one.note,
        )
        for name, one in law.parameters.items()
    )
    held = tuple(
        (
            one.by,
            f"{one.limit:.4g}",
            f"{one.num_fitted} / {one.num_held_out}",
            f"{one.r2:.4f}",
            f"{one.mean_error:.2%}",
            f"{one.worst_error:.2%}",
        )
        for one in law.hold_outs
    )
    unidentified = ", ".join(law.unidentified) or "none"
    dropped = f" {law.dropped_curves} curves that rise with the data were left out." if law.dropped_curves else ""
    return "\n".join(
        [
            f"<h3>{escape(law.name[0].upper() + law.name[1:])}</h3>",
            f"<p><code>{escape(law.formula)}</code>: {law.num_points} losses of {law.num_curves} curves, R2 "
            f"{law.r2:.4f}, mean error {law.mean_error:.2%}.{dropped} Not identified: {escape(unidentified)}.</p>",
            figure(plots.law_figure(law), f"{law.name}: predicted against measured."),
            table(Cells("Parameters", ("Parameter", "Value", "95% interval", "Identified", "Why not"), parameters)),
            table(
                Cells(
                    "Hold-outs",
                    ("Held out by", "Fitted up to", "Points fitted / held out", "R2", "Mean error", "Worst"),
                    held,
                )
            ),
        ]
    )


def _shares(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
