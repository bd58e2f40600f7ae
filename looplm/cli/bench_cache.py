"""`looplm bench cache`: what each way to keep keys costs in quality (Ouro, table 14, in small)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from looplm.inference import ExitPolicy

FOLD_THRESHOLD = 0.5
"""On the exit cdf, for the fold model; the log's (docs/log.md)."""


def cache(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a hub name, or the checkpoint that ships.")
    ] = "stdlib-small",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out text: files (.jsonl, .parquet, others as text; patterns allowed), hub:NAME; several times "
            "for several. What the standard library's text holds out if left out.",
            show_default=False,
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field or column of the text in .jsonl, .parquet and hub data.")
    ] = "text",
    num_texts: Annotated[int, typer.Option("--texts", help="Texts, spread over the documents.", min=2)] = 48,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each that stand before the scored ones.", min=1)] = 64,
    scored_tokens: Annotated[int, typer.Option(help="Tokens of each that are decoded and scored.", min=1)] = 64,
    exit_threshold: Annotated[
        float | None,
        typer.Option(help="Measured beside full depth.  [that of the checkpoint]", show_default=False),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Also train the fold task's model, a minute, and measure it.")
    ] = True,
    fold_steps: Annotated[int, typer.Option(help="Steps of its training.", min=1)] = 1500,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16 ...")] = "fp32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
) -> None:
    """Quality of every cache strategy on CHECKPOINT, at full depth and with early exit.

    Held-out texts are decoded token by token, each fed with the right token, so that what is kept is what is read;
    once with the prompt read loop by loop, as the engine does, and once with the prompt decoded too.
    """
    import dataclasses
    import json

    from rich.console import Console

    from looplm.cli.json_file import check_writable
    from looplm.inference import QuantileExit

    if exit_threshold is not None:
        QuantileExit(exit_threshold)  # or a wrong one would be said after the text has been read
    if json_file is not None:
        check_writable(json_file)
    console, progress = Console(highlight=False), Console(stderr=True)

    def say(text: str) -> None:
        progress.print(text, style="dim", highlight=False)

    found = _text(checkpoint, data, text_field, (num_texts, prompt_tokens, scored_tokens), exit_threshold, device,
                  dtype, console, say)  # fmt: skip
    if fold:
        found |= _fold(fold_steps, console, say)
    if json_file is not None:
        report = {name: [dataclasses.asdict(point) for point in points] for name, points in found.items()}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _text(
    checkpoint: str,
    data: list[str] | None,
    text_field: str,
    sizes: tuple[int, int, int],
    exit_threshold: float | None,
    device: str | None,
    dtype: str,
    console: "Console",
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Held-out text: prints a table for full depth and one for early exit."""
    from looplm.bench.caches import load_texts, text_table
    from looplm.cli.gate import data_section
    from looplm.data.recipe import DataRecipe
    from looplm.evaluation.cache_quality import cache_quality
    from looplm.hf.load import load, load_tokenizer
    from looplm.strict import parse

    recipe = parse(DataRecipe, data_section(data, text_field, "held_out"), "looplm bench cache")
    tokenizer = load_tokenizer(checkpoint)
    model = load(checkpoint, dtype=dtype, device=device)
    texts = load_texts(tokenizer, recipe, *sizes)
    console.print(
        f"{checkpoint}, {dtype}: {len(texts.token_ids)} texts of {texts.num_before} + {texts.num_scored} tokens from "
        f"{len(texts.document_ids.unique())} documents",
        soft_wrap=True,
    )
    saved = model.config.exit_threshold
    threshold = exit_threshold if exit_threshold is not None else (saved if saved is not None else 1.0)
    found: dict[str, Any] = {}
    for exit in _exits(model.model.config.num_loops, threshold):
        points = cache_quality(model, texts, exit, say=say)
        console.print(text_table(points, exit))
        found[f"text, {exit}"] = points
    return found


def _fold(num_steps: int, console: "Console", say: Callable[[str], None]) -> dict[str, Any]:
    """The fold task: trains its model and prints a table for full depth and one for early exit."""
    from looplm.bench.caches import task_quality, task_table
    from looplm.lab.fold import FoldTask
    from looplm.lab.fold_recipe import fold_config, fold_stages, train_fold
    from looplm.training.telemetry import Telemetry

    task = FoldTask()
    say(f"training the fold model, {num_steps} steps")
    stages = fold_stages(num_steps=num_steps, gate_steps=max(1, num_steps // 7))
    model = train_fold(task, fold_config(task), stages, Telemetry())
    found: dict[str, Any] = {}
    for exit in _exits(model.model.config.num_loops, FOLD_THRESHOLD):
        points = task_quality(model, task, exit, say=say)
        console.print(task_table(task, points, exit))
        found[f"fold, {exit}"] = points
    return found


def _exits(num_loops: int, threshold: float) -> "list[ExitPolicy]":
    """Full depth, and a threshold that is not the same."""
    from looplm.inference import FixedDepth, QuantileExit

    early = QuantileExit(threshold)
    return [FixedDepth(num_loops), *([early] if threshold < 1 else [])]
