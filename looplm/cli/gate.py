"""`looplm gate`: Stage II alone. The exit gate learns where another loop still pays; the language model stays."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from looplm.data.recipe import DataRecipe
    from looplm.evaluation.exit_curve import GateStatistics
    from looplm.hf.modeling import LoopLMForCausalLM
    from looplm.training.stage_recipe import StageRecipe

MEASURED_TOKENS = 50_000


def gate(
    checkpoint: Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New directory for the model with its trained gate.", show_default=False)],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to train on: files (.jsonl, .parquet, others as text; patterns allowed), hub:NAME or "
            "hub:NAME:CONFIG; several times for several. The text of Python's standard library if left out.",
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help="Text to measure on, likewise; else the data's own.", show_default=False)
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field or column of the text in .jsonl, .parquet and hub data.")
    ] = "text",
    label_shift: Annotated[
        str,
        typer.Option(
            help="Whose gain a hazard sees: its own loop's (paper), or that of the loop it decides on (next)."
        ),
    ] = "paper",
    num_steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 1000,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 512,
    batch_rows: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 8,
    num_loops: Annotated[
        int | None, typer.Option(help="Depth of training; the model's own if left out.", min=2)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the data.", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of matrix products: fp32 or bf16.")] = "fp32",
) -> None:
    """Train the exit gate of CHECKPOINT on text, the language model frozen and bit for bit the same afterwards.

    Prints how the exit distribution looked before and looks after. On many devices, use a recipe whose objective is
    gate_loss instead.
    """
    from looplm.cli.train import choose_device
    from looplm.strict import parse
    from looplm.training.stage_recipe import StageRecipe

    if device is not None:
        choose_device(device)
    if label_shift not in ("paper", "next"):
        raise UserError(f"--label-shift is {label_shift!r}; choose paper or next.")
    if dtype not in ("fp32", "bf16"):
        raise UserError(f"--dtype is {dtype!r}; choose fp32 or bf16.")
    fields: dict[str, Any] = {
        "name": "gate", "num_steps": num_steps, "seq_len": seq_len, "batch_tokens": batch_rows * seq_len,
        "num_loops": num_loops, "objective": {"kind": "gate_loss", "label_shift": label_shift},
        "optimizer": {"lr": lr, "weight_decay": 0.0}, "schedule": {"warmup_steps": min(20, num_steps // 4)},
        "precision": dtype, "data": data_section(data, text_field, "train"),
    }  # fmt: skip
    stage = parse(StageRecipe, fields, "looplm gate")
    measured = data_section(held_out if held_out is not None else data, text_field, "held_out")
    train_gate(checkpoint, stage, measured, out, seed)


def data_section(specs: list[str] | None, text_field: str, part: str) -> dict[str, Any]:
    """The data section of a recipe that the options mean; `part` is that of the default corpus."""
    if not specs:
        return {"sources": [{"kind": "stdlib", "part": part}]}
    sources: list[dict[str, Any]] = []
    for spec in specs:
        if spec.startswith("hub:"):
            name, _, config = spec.removeprefix("hub:").partition(":")
            if not name:
                raise UserError(f"--data {spec} names no dataset; write hub:NAME or hub:NAME:CONFIG.")
            sources.append({"kind": "hub", "name": name, "config": config or None, "text_field": text_field})
        else:
            sources.append({"kind": "files", "paths": [spec], "text_field": text_field})
    return {"sources": sources}


def train_gate(checkpoint: str, stage: "StageRecipe", measured: dict[str, Any], out: Path, seed: int) -> None:
    """Loads, measures, trains, measures again and saves, in the dtype that the checkpoint has."""
    from rich.console import Console

    from looplm.data.corpus import open_rows
    from looplm.data.recipe import DataRecipe
    from looplm.hf.load import load, load_tokenizer
    from looplm.hf.save import check_writable, new_target, save_checkpoint
    from looplm.strict import parse
    from looplm.training.architectures import check_stage
    from looplm.training.distributed import Ranks
    from looplm.training.rows import LoadedRows
    from looplm.training.steps import StepPlan
    from looplm.training.telemetry import Telemetry
    from looplm.training.trainer import Trainer

    check_writable(new_target(out))
    console = Console()
    model = load(checkpoint, device=Ranks.current().device)
    kept = model.dtype
    tokenizer = load_tokenizer(checkpoint)
    context = model.model.config.max_position_embeddings
    if stage.seq_len > context:
        raise UserError(f"--seq-len is {stage.seq_len:,}, and the context of {checkpoint} is {context:,} tokens.")
    check_stage(model.model.config, stage, StepPlan(stage))
    model.float()
    assert stage.data is not None  # as `gate` has built it
    evaluation = parse(DataRecipe, measured, "looplm gate")
    console.print(f"Measuring how exits spread over {MEASURED_TOKENS:,} held-out tokens.", highlight=False)
    before = statistics(model, tokenizer, evaluation, stage)
    with tempfile.TemporaryDirectory() as cache:
        rows = open_rows(
            stage.data, tokenizer, seq_len=stage.seq_len, seed=seed, cache_dir=Path(cache),
            vocab_size=model.model.config.vocab_size, say=console.print,
        )  # fmt: skip
        Trainer(model, stage, LoadedRows(rows), Telemetry(console=console), seed=seed).run()
    console.print("Measuring again.", highlight=False)
    after = statistics(model, tokenizer, evaluation, stage)
    save_checkpoint(model.to(kept), out, tokenizer)  # pyright: ignore[reportArgumentType]
    print_change(console, before, after)
    console.print(f"The model with its trained gate is in {out}.", highlight=False, soft_wrap=True)


def statistics(
    model: "LoopLMForCausalLM", tokenizer: "PreTrainedTokenizerBase", measured: "DataRecipe", stage: "StageRecipe"
) -> "GateStatistics":
    """How the gate spreads exits over the measured text."""
    from looplm.data.evaluation_windows import evaluation_windows
    from looplm.evaluation.exit_curve import gate_statistics
    from looplm.evaluation.record import record
    from looplm.training.run import sample_documents

    documents = sample_documents(measured, measured, tokenizer, MEASURED_TOKENS)
    windows = evaluation_windows(documents, tokenizer, stage.seq_len)
    depth = stage.num_loops if isinstance(stage.num_loops, int) else None
    passed = record(model, windows.batches(8), windows.document_bytes, depth)
    return gate_statistics(passed, passed.num_loops)


def print_change(console: Any, before: "GateStatistics", after: "GateStatistics") -> None:
    """Both exit distributions, side by side."""
    from looplm.cli.info import new_table

    table = new_table("The gate", "", "before", "after")
    pairs = zip(before.mean_exit_pdf, after.mean_exit_pdf, strict=True)
    for loop, (old, new) in enumerate(pairs, start=1):
        table.add_row(f"leaves after loop {loop}", f"{old:.3f}", f"{new:.3f}")
    table.add_row("entropy, nats", f"{before.mean_entropy_nats:.3f}", f"{after.mean_entropy_nats:.3f}")
    table.add_row("mean depth", f"{before.mean_expected_loops:.2f}", f"{after.mean_expected_loops:.2f}")
    table.add_row("spread of depth", f"{before.expected_loops_std:.3f}", f"{after.expected_loops_std:.3f}")
    console.print(table)
