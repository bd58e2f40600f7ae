"""How a plan is shown: one table of the stages, one of memory, and the sums; or one JSON object."""

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from looplm.cli.info import new_table, scaled
from looplm.training.plan import RunPlan, StagePlan

if TYPE_CHECKING:
    from rich.table import Table


def print_plan(plan: RunPlan, as_json: bool, dense: RunPlan | None = None) -> None:
    """Prints a plan, and that of the dense twin if there is one, for people, or as JSON with every number."""
    if as_json:
        fields = plan_fields(plan) | ({} if dense is None else {"dense": plan_fields(dense)})
        print(json.dumps(fields, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(
        f"{plan.name}: {len(plan.stages)} stages on {plan.num_devices} device(s)", style="bold", highlight=False
    )
    for table in (stage_table(plan), rate_table(plan), memory_table(plan)):
        console.print()
        console.print(table)
    for line in remarks(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if dense is not None:
        console.print()
        print_plan(dense, as_json)


def plan_fields(plan: RunPlan) -> dict[str, Any]:
    """A plan as plain values."""
    fields = dataclasses.asdict(plan)
    for stage, shown in zip(plan.stages, fields["stages"], strict=True):
        shown["memory"]["total"] = stage.memory.total
    return fields


def stage_table(plan: RunPlan) -> "Table":
    """Parameters, tokens, steps and FLOPs of each stage, and of all."""
    table = new_table(
        "Stages", "stage", "parameters", "loops", "seq_len", "batch", "steps", "tokens", "FLOPs", "with attention"
    )
    for stage in plan.stages:
        length = stage.length
        table.add_row(
            stage.name,
            f"{stage.num_parameters_without_gate if stage.num_loops == '1' else stage.num_parameters:,}",
            stage.num_loops,
            f"{stage.seq_len:,}",
            " -> ".join(dict.fromkeys(f"{tokens:,}" for tokens in (stage.batch_tokens[0], stage.batch_tokens[-1]))),
            *(
                ("?", "?", "?", "?")
                if length is None
                else (f"{length.num_steps:,}", f"{length.num_tokens:,}",
                      f"{length.flops:.3e}", f"{length.flops_with_attention:.3e}")
            ),
        )  # fmt: skip
    if plan.flops is not None and plan.flops_with_attention is not None:
        table.add_section()
        table.add_row("in all", "", "", "", "", f"{plan.num_steps:,}", f"{plan.num_tokens:,}", f"{plan.flops:.3e}",
                      f"{plan.flops_with_attention:.3e}", style="bold")  # fmt: skip
    return table


def rate_table(plan: RunPlan) -> "Table":
    """What is trained, and the learning rate at both ends."""
    table = new_table("Learning", "stage", "trained parameters", "lr at the first step", "peak", "at the last step")
    for stage in plan.stages:
        length = stage.length
        rates = ("?", "?", "?") if length is None else (
            f"{length.lr_first:.3g}", f"{length.lr_peak:.3g}", f"{length.lr_last:.3g}"
        )  # fmt: skip
        table.add_row(stage.name, f"{stage.num_trained:,}", *rates)
    return table


def memory_table(plan: RunPlan) -> "Table":
    """Bytes of one device at the peak of a step."""
    given = "" if plan.device_bytes is None else f", of {scaled(plan.device_bytes, 1024)}B"
    table = new_table(
        f"Memory of each device{given}", "stage", "rows x forwards", "weights", "gradients", "AdamW", "gathered",
        "bf16 copies", "activations", "head", "in all",
    )  # fmt: skip
    for stage in plan.stages:
        memory = stage.memory
        parts = (memory.parameters, memory.gradients, memory.moments, memory.gathered, memory.casts,
                 memory.activations + memory.sums, memory.head)  # fmt: skip
        total = f"{scaled(memory.total, 1024)}B" + (" (!)" if stage.fits is False else "")
        table.add_row(
            stage.name, f"{stage.micro_batch_rows} x {stage.micro_batches}",
            *(scaled(part, 1024) + "B" for part in parts), total,
        )  # fmt: skip
    return table


def remarks(plan: RunPlan) -> Iterable[str]:
    """What the tables cannot say."""
    if any(stage.num_loops == "1" for stage in plan.stages):
        yield "At one loop nothing is decided: parameters are counted without the exit gate, as for a dense model."
    unknown = [stage.name for stage in plan.stages if stage.length is None]
    if unknown:
        yield f"?: {', '.join(unknown)} counts in epochs; steps are known once the data are tokenised."
    yield from (too_large(stage) for stage in plan.stages if stage.fits is False)
    if plan.device_bytes is None:
        yield "Memory is that of one row at a time, or of the recipe's micro_batch_rows. See --device-memory."


def too_large(stage: StagePlan) -> str:
    """A stage that does not fit."""
    return (
        f"(!) {stage.name} does not fit with {stage.micro_batch_rows} row(s) of {stage.seq_len:,} tokens: use more "
        "devices, or larger ones."
    )
