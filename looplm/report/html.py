"""The page of a quickstart."""

from html import escape
from pathlib import Path

from looplm.report.page import page_html, write_pair
from looplm.report.schema import QuickstartReport
from looplm.report.sections import fold_section, run_section, text_model_section


def report_html(report: QuickstartReport) -> str:
    """The whole page as text."""
    links = (
        ("shipped", report.shipped.name),
        ("trained", report.trained.name),
        ("fold", "The fold task"),
        ("next", "Try next"),
        ("run", "This run"),
    )
    navigation = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links)
    smoke = (
        '<p class="warning">This is a smoke run: models too small and too briefly trained to judge anything by. '
        "It shows that every part works.</p>"
        if report.smoke
        else ""
    )
    return page_html(
        "looplm quickstart",
        "A looped language model applies one stack of layers several times, and a gate decides how often. This page "
        "shows what each loop adds, what the gate decides and what leaving early saves. Every number is also in "
        "<code>report.json</code>.",
        [
            smoke,
            f"<nav><ul>{navigation}</ul></nav>",
            "<main>",
            text_model_section(report.shipped, "shipped"),
            text_model_section(report.trained, "trained"),
            fold_section(report.fold),
            run_section(report),
            "</main>",
        ],
    )


def write_report(report: QuickstartReport, directory: Path) -> tuple[Path, Path]:
    """Writes `report.json` and `report.html` into `directory` (made if need be) and returns their paths.

    Each file appears whole or not at all, and one that is there stays until its successor is complete. Raises
    UserError when they cannot be written.
    """
    return write_pair(directory, "report", report.model_dump_json(indent=1) + "\n", report_html(report))
