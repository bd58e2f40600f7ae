"""One self-contained page: no script, no font, image or style from anywhere else."""

import os
import tempfile
from html import escape
from importlib.resources import files
from pathlib import Path

from looplm.errors import UserError
from looplm.report.schema import QuickstartReport
from looplm.report.sections import fold_section, run_section, text_model_section


def report_html(report: QuickstartReport) -> str:
    """The whole page as text."""
    style = files("looplm.report").joinpath("page.css").read_text(encoding="utf-8")
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
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>looplm quickstart</title><style>{style}</style></head><body>",
            "<h1>looplm quickstart</h1>",
            '<p class="lead">A looped language model applies one stack of layers several times, and a gate decides '
            "how often. This page shows what each loop adds, what the gate decides and what leaving early saves. "
            "Every number is also in <code>report.json</code>.</p>",
            smoke,
            f"<nav><ul>{navigation}</ul></nav>",
            "<main>",
            text_model_section(report.shipped, "shipped"),
            text_model_section(report.trained, "trained"),
            fold_section(report.fold),
            run_section(report),
            "</main></body></html>",
            "",
        ]
    )


def write_report(report: QuickstartReport, directory: Path) -> tuple[Path, Path]:
    """Writes `report.json` and `report.html` into `directory` (made if need be) and returns their paths.

    Each file appears whole or not at all, and one that is there stays until its successor is complete. Raises
    UserError when they cannot be written.
    """
    json_path, html_path = directory / "report.json", directory / "report.html"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_whole(json_path, report.model_dump_json(indent=1) + "\n")
        _write_whole(html_path, report_html(report))
    except OSError as error:
        raise UserError(f"The report could not be written to {directory}: {error.strerror or error}.") from error
    return json_path, html_path


def _write_whole(path: Path, text: str) -> None:
    """Writes to a temporary file beside `path`, then renames it over `path`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
