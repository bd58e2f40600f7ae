"""`looplm export`: a checkpoint in the released Ouro format, or in ours."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[str, typer.Argument(help="A looped checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New directory.", show_default=False)],
    format: Annotated[
        str,
        typer.Option(help="ouro: as others' code reads it. hf: ours, for the Auto classes.", show_default=False),
    ],
    max_shard_size: Annotated[str | None, typer.Option(help="Split the weights into files of this size: 5GB.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A LoRA adapter to merge into the weights first.", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: bf16, fp32 ...; as they are if left out.")] = None,
) -> None:
    """Write the looped CHECKPOINT in another format, and read it back to see that nothing was lost.

    A model that the format has no place for is refused.
    """
    from looplm.conversion.checked import export_checkpoint

    report = export_checkpoint(
        checkpoint,
        out,
        format,  # pyright: ignore[reportArgumentType] (checked by exported)
        dtype=dtype,
        max_shard_size=max_shard_size,
        adapter=adapter,
    )
    loops = len(report.comparison.logits)
    print(
        f"{report.num_tensors} tensors in {len(report.files)} file{'s' if len(report.files) > 1 else ''}, read back "
        f"identical; the logits of all {loops} loops too. Written to {out}"
    )
