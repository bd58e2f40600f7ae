"""`looplm upcycle`: layer duplication, 24 layers to 48."""

from pathlib import Path
from typing import Annotated

import typer


def upcycle(
    checkpoint: Annotated[str, typer.Argument(help="A looped checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New directory for the larger model.", show_default=False)],
    num_layers: Annotated[int, typer.Option(help="Layers of the core afterwards, a multiple.", show_default=False)],
    order: Annotated[str, typer.Option(help="stacked: 1..L, 1..L. interleaved: 1, 1, 2, 2, ...")] = "stacked",
    dtype: Annotated[str | None, typer.Option(help="Of the weights: bf16, fp32 ...; as they are if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...")] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text for the losses; a passage that ships if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of it that are read.")] = 256,
    max_shard_size: Annotated[str | None, typer.Option(help="Split the weights into files of this size: 5GB.")] = None,
) -> None:
    """Duplicate the layers of the looped CHECKPOINT, as Ouro's 2.6B was made, and show the loss before and after."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from looplm.conversion.checked import upcycle_checkpoint

    report = upcycle_checkpoint(
        checkpoint,
        out,
        num_layers,
        order,  # pyright: ignore[reportArgumentType] (checked by upcycle)
        dtype=dtype,
        device=device,
        text=text,
        max_tokens=max_tokens,
        max_shard_size=max_shard_size,
    )
    console, (before, after) = Console(highlight=False), report.num_layers
    where = "text" if report.on_text else "random ids"
    title = f"Loss, nats per token, {report.num_tokens} tokens of {where}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("loops", f"{before} layers", f"{after} layers"):
        table.add_column(column, justify="right")
    for loop, losses in enumerate(zip(report.losses_before, report.losses_after, strict=True), start=1):
        table.add_row(str(loop), *(f"{loss:.4f}" for loss in losses))
    console.print(table)
    for loops, original, apart in report.equivalent or []:
        console.print(f"{loops} loops are the {original} loops of before; largest logit difference {apart:.2g}")
    console.print(
        f"{report.num_tensors} tensors, each identical to the one it copies. Written to {out}", soft_wrap=True
    )
