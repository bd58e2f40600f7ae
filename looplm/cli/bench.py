"""`looplm bench`: measurements of this machine, each against the obvious way."""

from pathlib import Path
from typing import Annotated

import typer

from looplm.cli import bench_cache, bench_inference
from looplm.cli.json_file import check_writable

app = typer.Typer(help="Measure speed and memory on this machine, against the obvious way.", no_args_is_help=True)


@app.command("train")
def train(
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to see that it runs.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="How time and memory grow with loops and sequence, instead.")
    ] = False,
    compile: Annotated[
        str, typer.Option(help="none, blocks, blocks+loss (the baseline's loss too), or several with commas.")
    ] = "none,blocks,blocks+loss",
    recompute: Annotated[
        str, typer.Option(help="Our activations recomputed in the backward pass: none, layer, loop or both.")
    ] = "none",
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size.  [512]", show_default=False)] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Of the feed-forward.  [1408]")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers of the core.  [6]")] = None,
    num_loops: Annotated[int | None, typer.Option(help="Loops.  [4]")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary.  [49152]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.  [512]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows.  [8; 2 in the sweep]")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (autocast) or fp32.  [bf16]")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.", min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="Threads of each process.  [all cores]", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
) -> None:
    """Stage-I training: ours against a transformers Llama of R x L layers with R full-logit losses.

    Both hold the same parameters and do the same matrix products. Steps are made in turn, each side in a process of
    its own. At the full size: about five minutes on two cores, and 10 GB of memory.
    """
    import dataclasses
    import json

    import torch
    from rich.console import Console

    from looplm.bench.sizes import SMOKE, TrainSizes
    from looplm.bench.tables import breakdown_table, comparison_table, headline, sweep_table
    from looplm.bench.train import compare, parse_checkpointing, parse_compiles
    from looplm.bench.train import sweep as run_sweep

    given = {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_layers": num_layers,
        "num_loops": num_loops, "vocab_size": vocab_size, "seq_len": seq_len, "batch_size": batch_size,
        "precision": precision,
    }  # fmt: skip
    start = SMOKE if smoke else TrainSizes(batch_size=2 if sweep else 8)
    sizes = dataclasses.replace(start, **{name: value for name, value in given.items() if value is not None})
    compiles, checkpointing = parse_compiles(compile, one=sweep), parse_checkpointing(recompute)
    if json_file is not None:
        check_writable(json_file)
    threads = torch.get_num_threads() if threads is None else threads
    console, progress = Console(), Console(stderr=True)

    def say(text: str) -> None:
        progress.print(text, style="dim", highlight=False)

    if sweep:
        counts = {"loops": (1, 2), "seq_lens": (8, 16)} if smoke else {}
        report = run_sweep(
            sizes, **counts, compile=compiles[0], repeats=repeats, threads=threads, device=device, say=say
        )
        tables = [sweep_table(report)]
    else:
        report = compare(
            sizes, compiles=compiles, repeats=repeats, checkpointing=checkpointing, threads=threads, device=device,
            say=say,
        )  # fmt: skip
        tables = [comparison_table(report), breakdown_table(report)]
    console.print(headline(report), highlight=False)
    for table in tables:
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n", encoding="utf-8")


app.command("decode")(bench_inference.decode)
app.command("exit")(bench_inference.early_exit)
app.command("speculative")(bench_inference.speculative)
app.command("batch")(bench_inference.batch)
app.command("memory")(bench_inference.memory)
app.command("cache")(bench_cache.cache)
