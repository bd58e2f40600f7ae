"""`looplm calibrate`: an exit threshold or epsilon chosen on held-out text, and saved as the default."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from looplm.evaluation.calibration import Calibration
    from looplm.evaluation.record import DepthRecord
    from looplm.hf.modeling import LoopLMForCausalLM

RULES = ("gate", "hidden-diff")


def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="A local directory; its config.json is changed.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out text: files (.jsonl, .parquet, others as text; patterns allowed), hub:NAME or "
            "hub:NAME:CONFIG; several times for several. Held-out text of Python's standard library if left out.",
            show_default=False,
        ),
    ] = None,
    target_loops: Annotated[
        float | None, typer.Option(help="Mean depth that tokens should leave at.", show_default=False)
    ] = None,
    max_loss_increase: Annotated[
        str | None, typer.Option(help="Or the most that the loss may rise over all loops', as 1%.", show_default=False)
    ] = None,
    exit: Annotated[str, typer.Option(help="The rule to calibrate: gate or hidden-diff.")] = "gate",
    text_field: Annotated[
        str, typer.Option(help="Field or column of the text in .jsonl, .parquet and hub data.")
    ] = "text",
    num_tokens: Annotated[int, typer.Option(help="Tokens to measure on, about.", min=100)] = 50_000,
    seq_len: Annotated[int, typer.Option(help="Tokens of a window.", min=2)] = 512,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Choose and print; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None,
) -> None:
    """Choose an exit threshold or epsilon for a mean depth or a largest loss, and save it in CHECKPOINT."""
    from looplm.evaluation.calibration import calibrate_depth, calibrate_loss
    from looplm.evaluation.exit_rules import gate_exit, hidden_change_exit

    if (target_loops is None) == (max_loss_increase is None):
        raise UserError("Give either --target-loops or --max-loss-increase.")
    if exit not in RULES:
        raise UserError(f"--exit is {exit!r}; choose one of {', '.join(RULES)}.")
    most = None if max_loss_increase is None else parse_share(max_loss_increase)
    config = config_file(checkpoint)
    measured = measure(checkpoint, data, text_field, num_tokens, seq_len, device, dtype, changes=exit == "hidden-diff")
    rule = gate_exit(measured) if exit == "gate" else hidden_change_exit(measured)
    found = (
        calibrate_loss(measured, rule, most) if target_loops is None and most is not None
        else calibrate_depth(measured, rule, target_loops or 0.0)
    )  # fmt: skip
    if not dry_run:
        save_exit(config, exit, found.threshold)
    show(found, exit, None if dry_run else config, as_json)


def config_file(checkpoint: Path) -> Path:
    """The config to change. Raises UserError for anything but a local checkpoint directory."""
    file = checkpoint / "config.json"
    if not file.is_file():
        raise UserError(
            f"{checkpoint} is no local checkpoint directory: it has no config.json. Calibrating changes a checkpoint, "
            "so a hub name will not do; copy or convert it into a directory first."
        )
    return file


def parse_share(text: str) -> float:
    """ "1%" or "0.01" as 0.01. Raises UserError for anything else."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UserError(f"--max-loss-increase is {text!r}; give a share such as 1% or 0.01.") from None


def measure(
    checkpoint: Path,
    data: list[str] | None,
    text_field: str,
    num_tokens: int,
    seq_len: int,
    device: str | None,
    dtype: str | None,
    *,
    changes: bool,
) -> "DepthRecord":
    """The recorded pass that thresholds are tried on."""
    from looplm.hf.load import load, load_tokenizer

    model, tokenizer = load(checkpoint, device=device, dtype=dtype), load_tokenizer(checkpoint)
    if model.model.config.num_loops < 2:
        raise UserError(f"{checkpoint} has one loop; there is no exit to calibrate.")
    return record_text(model, tokenizer, data, text_field, num_tokens, seq_len, changes=changes)


def record_text(
    model: "LoopLMForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    data: list[str] | None,
    text_field: str,
    num_tokens: int,
    seq_len: int,
    num_loops: int | None = None,
    *,
    changes: bool = False,
) -> "DepthRecord":
    """Every loop, the trained ones when `num_loops` is None, on held-out text as the options name it."""
    from looplm.cli.gate import data_section
    from looplm.data.evaluation_windows import evaluation_windows
    from looplm.data.recipe import DataRecipe
    from looplm.evaluation.record import record
    from looplm.strict import parse
    from looplm.training.run import sample_documents

    recipe = parse(DataRecipe, data_section(data, text_field, "held_out"), "held-out text")
    documents = sample_documents(recipe, recipe, tokenizer, num_tokens)
    windows = evaluation_windows(documents, tokenizer, min(seq_len, model.model.config.max_position_embeddings))
    return record(model, windows.batches(8), windows.document_bytes, num_loops, changes=changes)


def save_exit(config: Path, exit: str, threshold: float) -> None:
    """Writes what was chosen for the rule `exit`, and takes out what another rule had; whole, or not at all."""
    from looplm.hf.checkpoint import read_json
    from looplm.report.page import write_whole

    fields = read_json(config)
    name = "early_exit_threshold" if fields.get("model_type") == "ouro" else "exit_threshold"
    fields.pop("exit_epsilon", None)
    fields |= {name: threshold} if exit == "gate" else {name: 1.0, "exit_epsilon": -threshold}
    try:
        write_whole(config, json.dumps(fields, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{config} could not be written: {error.strerror or error}. It is as it was.") from error


def show(found: "Calibration", exit: str, saved: Path | None, as_json: bool) -> None:
    """Prints what was chosen, and what it costs."""
    epsilon = -found.threshold
    numbers: dict[str, Any] = {"exit": exit, "saved": saved is not None, **dataclasses.asdict(found)}
    if exit == "hidden-diff":
        del numbers["threshold"]
        numbers["epsilon"] = epsilon
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    increase = found.loss_increase
    shares = ", ".join(f"{share:.1%} at loop {loop}" for loop, share in enumerate(found.exit_shares, start=1))
    chosen = f"Threshold {found.threshold:.6g}" if exit == "gate" else f"Epsilon {epsilon:.6g}"
    print(
        f"{chosen}: {found.mean_loops:.2f} of {len(found.exit_shares)} loops on average over {found.num_tokens:,} "
        f"held-out tokens ({shares}).\n"
        f"Loss {found.loss_nats:.4f} nats against {found.full_loss_nats:.4f} with all loops: {increase.value:+.2%} "
        f"(95% interval {increase.low:+.2%} to {increase.high:+.2%}, over documents)."
    )
    if saved is not None:
        print(f"Saved in {saved}: generation leaves at it unless it is told otherwise.")
    else:
        print("Not saved (--dry-run).")
