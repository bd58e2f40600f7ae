"""`looplm info`: what a checkpoint is and what it costs, from its config alone."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from looplm.model.config import LoopedConfig
    from looplm.model.flops import CostReport

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def info(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a config.json, or a hub name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dtype: Annotated[str, typer.Option(help="Element type of the cache: bf16, fp16, fp32 or fp64.")] = "bf16",
) -> None:
    """Parameters, FLOPs per token and cache bytes per token of CHECKPOINT, at every depth.

    The numbers need no weights. Where weights lie beside the config, their names and shapes are checked against it.
    """
    from looplm.model.flops import describe

    if dtype not in DTYPE_BYTES:
        raise UserError(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPE_BYTES)}.")
    facts = read_checkpoint(checkpoint)
    report = describe(facts.pop("config"), dtype_bytes=DTYPE_BYTES[dtype])
    facts["cache_dtype"] = dtype
    if as_json:
        print(json.dumps({**facts, **dataclasses.asdict(report)}, indent=2))
    else:
        print_report(facts, report)


def read_checkpoint(checkpoint: str) -> dict[str, Any]:
    """The model config and where it came from. Raises UserError for what cannot be read or does not fit together."""
    from looplm.hf.checkpoint import CONFIG, find_checkpoint, local_path, read_config

    path = local_path(checkpoint)
    if path.is_file() and path.suffix == ".json":
        directory, config_file = None, path
    else:
        directory = find_checkpoint(checkpoint, files=[CONFIG])
        config_file = directory / CONFIG
    shell_config = read_config(config_file)
    config = shell_config.to_model_config()
    weights = None if directory is None else check_weights(config, directory)
    return {"checkpoint": checkpoint, "model_type": shell_config.model_type, "weights": weights, "config": config}


def check_weights(config: "LoopedConfig", directory: Path) -> str | None:
    """The dtypes of the weights, None where there are none. Raises UserError for weights that `load` would refuse."""
    from looplm.hf.checkpoint import INDEX, WEIGHTS, check_tensors, read_tensors
    from looplm.hf.load import stored_dtype

    for name in (WEIGHTS, INDEX):
        file = directory / name
        if file.is_symlink() and not file.exists():
            raise UserError(f"{file} is a link to {file.readlink()}, which does not exist; copy the weights anew.")
    pickled = any(file.suffix in (".bin", ".pt", ".pth", ".ckpt") for file in directory.iterdir())
    if not pickled and not any((directory / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    tensors = read_tensors(directory)  # says so where there are pickles only
    check_tensors(config, tensors, directory)
    stored_dtype(tensors)
    return ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))


def print_report(facts: dict[str, Any], report: "CostReport") -> None:
    """Shows the report as tables."""
    from rich.console import Console

    console = Console()
    weights = f"{facts['weights']}, names and shapes fit the config" if facts["weights"] else "not looked at"
    headline = f"{facts['checkpoint']}: {facts['model_type']}, {report.num_loops} loops; weights: {weights}"
    console.print(headline, style="bold", markup=False, highlight=False, soft_wrap=True)
    for table in (parameter_table(report), depth_table(report), cache_table(report, facts["cache_dtype"])):
        console.print()
        console.print(table)


def new_table(title: str, *columns: str) -> "Table":
    """A table with its first column on the left and numbers on the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def parameter_table(report: "CostReport") -> "Table":
    """Parameters by group, and in all."""
    count = report.parameters
    table = new_table(f"Parameters, in {count.num_tensors} tensors", "group", "parameters")
    for group in ("embedding", "prelude", "core", "coda", "norms", "gate", "injection", "lora", "head"):
        if size := getattr(count, group):
            table.add_row(group, f"{size:,}")
    table.add_section()
    table.add_row("total", f"{count.total:,}", style="bold")
    if count.total_separate_head != count.total:
        table.add_row("total with a head of its own", f"{count.total_separate_head:,}")
    return table


def depth_table(report: "CostReport") -> "Table":
    """FLOPs of one generated token at depths 1 to R."""
    context = f"attending to {report.max_position_embeddings:,}"
    table = new_table("FLOPs per token", "loops", "layers passed", "no attention", context, "head at every loop")
    for depth in report.depths:
        flops = (depth.flops, depth.flops_full_context, depth.flops_head_every_loop)
        table.add_row(str(depth.num_loops), str(depth.effective_depth), *(scaled(value, 1000) for value in flops))
    table.caption = f"Training, all loops: {scaled(report.training_flops_per_token, 1000)} per token."
    table.caption_justify = "left"
    return table


def cache_table(report: "CostReport", dtype: str) -> "Table":
    """Bytes of keys and values per position, for every cache strategy."""
    context = f"{report.max_position_embeddings:,} tokens"
    table = new_table(f"Cache, {dtype}", "strategy", "bytes per token", "while reading the prompt", context)
    for strategy, cost in report.cache.items():
        per_token, full = cost.bytes_per_token, scaled(cost.bytes_full_context.decode, 1024) + "B"
        table.add_row(strategy, f"{per_token.decode:,}", f"{per_token.prefill_peak:,}", full)
    return table


def scaled(value: float, base: int) -> str:
    """A large number with its prefix: 2.7e9 as "2.700 G" (base 1000), 786432 as "768.00 Ki" (base 1024)."""
    prefixes = ("", "k", "M", "G", "T", "P", "E") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    power = 0
    while value >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:,.3f} {prefixes[power]}" if base == 1000 else f"{value:,.2f} {prefixes[power]}"
