"""`looplm quickstart`: the main job, end to end, on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory for the new model and the report.")] = Path("runs/quickstart"),
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Everything in under a minute, too small to judge by.")
    ] = False,
) -> None:
    """Show adaptive depth, train a small LoopLM of text and one of a task, measure both, write a report.

    About ten minutes on two CPU cores; no network. Writes `model/`, `report.json` and `report.html` to the directory.
    """
    from rich.console import Console

    from looplm.quickstart.plan import FULL, SMOKE
    from looplm.quickstart.run import check_writable, run

    check_writable(out)
    run(SMOKE if smoke else FULL, out, Console(), smoke=smoke)
