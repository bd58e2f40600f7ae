"""`looplm parity`: two checkpoints or implementations, loop by loop and layer by layer."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from looplm.conversion.parity import Comparison


def parity(
    a: Annotated[
        str,
        typer.Argument(help="A looped checkpoint, a dense one, or a .safetensors of states.", show_default=False),
    ],
    b: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    num_loops: Annotated[int | None, typer.Option(help="Depth of both; that of the shallower if left out.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Share of the largest entry up to which a difference counts as rounding; 1e-3 if left out, 5e-2 in "
            "16-bit dtypes.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="To compute in: fp32, fp64, bf16 ...")] = "fp32",
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...")] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to compare on; a passage that ships if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of it that are compared.")] = 256,
    case: Annotated[
        str | None, typer.Option(help='Which states of the file: "full" for full.input_ids ...; else the first.')
    ] = None,
) -> None:
    """Run A and B on the same tokens and name the first place where they part.

    A dense model is run by transformers and compared to one loop. The exit status is 1 when they part.
    """
    from rich.console import Console

    from looplm.conversion.sides import compare_sources
    from looplm.hf.load import check_dtype

    if tolerance is None:
        computed = check_dtype(dtype)
        tolerance = 5e-2 if computed is not None and computed.itemsize == 2 else 1e-3
    if not 0 <= tolerance < math.inf:
        raise UserError(f"--tolerance is {tolerance}; give a number of 0 or more.")
    report = compare_sources(
        a,
        b,
        num_loops=num_loops,
        tolerance=tolerance,
        dtype=dtype,
        device=device,
        text=text,
        max_tokens=max_tokens,
        case=case,
    )
    console = Console(highlight=False)
    print_comparison(console, report.comparison, report.num_tokens, report.ids_from)
    if not report.layers_compared:
        console.print("They have other numbers of layers: only what the loops leave behind was compared.")
    parting = report.comparison.first_parting
    if parting is None:
        console.print(f"No place differs by more than {tolerance:g} of its largest entry.")
        return
    console.print(
        f"They part at {parting.place}: by {parting.largest:.3g}, {parting.relative:.1e} of the largest entry.",
        style="bold",
        soft_wrap=True,
    )
    raise typer.Exit(1)


def print_comparison(console: "Console", comparison: "Comparison", num_tokens: int, ids_from: str) -> None:
    """Two tables: predictions, loop by loop, and the largest differences on the way to them."""
    from rich import box
    from rich.table import Table

    console.print(f"A: {comparison.names[0]}\nB: {comparison.names[1]}", soft_wrap=True)
    title = f"{num_tokens} tokens of {ids_from}"
    if comparison.logits:
        table = Table(title=f"Predictions, {title}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("loops", "largest logit difference", "same top token", "KL, nats", "loss A", "loss B"):
            table.add_column(column, justify="right")
        for row in comparison.logits:
            table.add_row(
                str(row.num_loops),
                f"{row.largest:.2e}",
                f"{row.top1_agreement:.2%}",
                f"{row.kl_nats:.2e}",
                *(f"{loss:.4f}" for loss in row.loss),
            )
        console.print(table)
    table = Table(title="Largest differences", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("loop", "at", "difference", "of the largest entry"):
        table.add_column(column, justify="left" if column == "at" else "right")
    parting = comparison.first_parting
    for loop in sorted({place.place.loop for place in comparison.places}):
        parts = dict.fromkeys(place.place.part for place in comparison.places if place.place.loop == loop)
        for worst in (comparison.at(part, loop) for part in parts):
            assert worst is not None
            where = str(worst.place).removeprefix(f"loop {loop}, ")
            style = "bold" if parting is not None and not worst.relative <= comparison.tolerance else None
            table.add_row(str(loop), where, f"{worst.largest:.2e}", f"{worst.relative:.1e}", style=style)
    console.print(table)
