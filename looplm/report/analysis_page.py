"""An analysis on disk: its section as a page, its numbers beside it."""

import dataclasses
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from looplm.report.page import page_html, write_pair


def write_analysis(
    directory: Path, name: str, about: str, section: str, found: Mapping[str, Any], command: str = "looplm analyze"
) -> tuple[Path, Path]:
    """Writes `name`.json with every number of `found` (dataclasses, or plain values) and `name`.html with the section.

    about: one sentence on what was looked at. Raises UserError when they cannot be written.
    """
    lead = f"{escape(about)} Every number is also in <code>{name}.json</code>."
    page = page_html(f"{command} {name}", lead, ["<main>", section, "</main>"])
    numbers = {"analysis": name, "about": about, **{key: plain(value) for key, value in found.items()}}
    return write_pair(directory, name, json.dumps(numbers, indent=1, allow_nan=False) + "\n", page)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and dictionaries as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value
