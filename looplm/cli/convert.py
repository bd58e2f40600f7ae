"""`looplm convert`: a dense model to a looped one, checked against transformers before it gets its name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.conversion.checked import ConversionReport


def convert(
    source: Annotated[
        str,
        typer.Argument(help="Llama, Qwen2 or Qwen3: a directory, hub name or .gguf file.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="New directory for the looped model.", show_default=False)],
    num_loops: Annotated[int, typer.Option(help="Loops to train for.")] = 3,
    injection: Annotated[
        str, typer.Option(help="How the embedding enters later loops: scalar, none, add, concat, concat_norm ...")
    ] = "scalar",
    core: Annotated[
        str | None, typer.Option(help='Layers that loop, as in Python: "4:20". Those before and after run once.')
    ] = None,
    loop_state: Annotated[
        str | None, typer.Option(help="What a loop hands on: normed, or raw (the default with --core).")
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Rank of a LoRA bank for every loop; 0 for none.")] = 0,
    lora_alpha: Annotated[float, typer.Option(help="Scale of the banks: alpha / rank.")] = 32.0,
    lora_from: Annotated[
        str, typer.Option(help="zero: banks change nothing yet. svd: tie layers, one for each loop, into one.")
    ] = "zero",
    start_depth: Annotated[
        float | None, typer.Option(help="Mean exit depth before training; the middle if left out.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: bf16 ...; the source's if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...")] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text for the check; a passage that ships if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of it that are compared.")] = 256,
    max_shard_size: Annotated[str | None, typer.Option(help="Split the weights into files of this size: 5GB.")] = None,
) -> None:
    """Loop the dense model SOURCE, and show that at one loop nothing has changed.

    The looped model computes what the dense one does at one loop, and has to be trained to make use of the others.
    """
    from looplm.conversion.checked import convert_checkpoint
    from looplm.conversion.dense_to_looped import Looping

    looping = Looping(
        num_loops=num_loops,
        injection=injection,  # pyright: ignore[reportArgumentType] (checked where the config is built)
        core=read_core(core),
        loop_state=loop_state,  # pyright: ignore[reportArgumentType]
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_from=lora_from,  # pyright: ignore[reportArgumentType]
        start_depth=start_depth,
    )
    report = convert_checkpoint(
        source,
        out,
        looping,
        dtype=dtype,
        device=device,
        text=text,
        max_tokens=max_tokens,
        max_shard_size=max_shard_size,
    )
    print_report(report, out)


def read_core(core: str | None) -> tuple[int, int] | None:
    """The layers that loop. Raises UserError for anything but two numbers with a colon between them."""
    if core is None:
        return None
    first, colon, last = core.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise UserError(f'--core is {core!r}; give two layer numbers as in Python, "4:20": layers 4 to 19, from 0.')
    return int(first), int(last)


def print_report(report: "ConversionReport", out: Path) -> None:
    """What was made, the comparison with the dense model, and the loss of every loop."""
    from rich.console import Console

    from looplm.cli.parity import print_comparison
    from looplm.model.flops import count_parameters

    console, config = Console(highlight=False), report.config
    layers = f"{config.num_hidden_layers} layers in the core"
    if config.num_prelude_layers or config.num_coda_layers:
        layers = f"{config.num_prelude_layers} layers before, {layers}, {config.num_coda_layers} after"
    size = count_parameters(config)
    console.print(
        f"{layers}, {config.num_loops} loops, injection {config.injection}; {size.total:,} parameters in "
        f"{str(report.dtype).removeprefix('torch.')}",
        soft_wrap=True,
    )
    print_comparison(console, report.comparison, report.num_tokens, "text" if report.on_text else "random ids")
    depth = report.comparison.logits[0].num_loops
    dense = report.comparison.logits[0].loss[0]
    losses = "  ".join(f"loop {loop}: {loss:.4f}" for loop, loss in enumerate(report.losses, start=1))
    console.print(f"Loss before any training, nats per token: dense {dense:.4f}  {losses}", soft_wrap=True)
    if report.is_exact:
        verdict = "One loop computes what the dense model does."
    else:
        verdict = f"Layers were tied: {depth} loops approximate the dense model, the better the higher the rank."
    console.print(f"{verdict} Written to {out}", soft_wrap=True)
