"""A self-contained page, no script, font, image or style from anywhere else, and the numbers beside it."""

import os
import tempfile
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from looplm.errors import UserError


def page_html(title: str, lead: str, parts: Iterable[str]) -> str:
    """A whole page as text. `title` is plain text; `lead`, a paragraph, and `parts` are HTML."""
    style = files("looplm.report").joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{lead}</p>',
            *parts,
            "</body></html>",
            "",
        ]
    )


def write_pair(directory: Path, name: str, json_text: str, html_text: str) -> tuple[Path, Path]:
    """Writes `name`.json and `name`.html into `directory` (made if need be) and returns their paths.

    Each file appears whole or not at all, and one that is there stays until its successor is complete. Raises
    UserError when they cannot be written.
    """
    json_path, html_path = directory / f"{name}.json", directory / f"{name}.html"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(json_path, json_text)
        write_whole(html_path, html_text)
    except OSError as error:
        raise UserError(f"The report could not be written to {directory}: {error.strerror or error}.") from error
    return json_path, html_path


def write_whole(path: Path, text: str) -> None:
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
