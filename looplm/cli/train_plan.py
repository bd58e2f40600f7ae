"""How a plan is shown: narrow tables of rounded numbers with the exact totals below; or one JSON object."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from looplm.cli.info import new_table
from looplm.training.memory import USABLE_SHARE
from looplm.training.plan import RunPlan, StagePlan

if TYPE_CHECKING:
    from rich.table import Table

UNROUNDED = 100_000
"""Counts below it are shown to the last digit."""


def print_plan(plan: RunPlan, as_json: bool, dense: RunPlan | None = None) -> None:
    """Prints a plan, and that of the dense twin if there is one, for people, or as JSON with every number."""
    if as_json:
        fields = plan_fields(plan) | ({} if dense is None else {"dense": plan_fields(dense)})
        print(json.dumps(fields, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(
        f"{plan.name}: {len(plan.stages)} stages on {plan.num_devices} device(s)",
        style="bold", highlight=False, markup=False,
    )  # fmt: skip
    for table in (stage_table(plan), course_table(plan), state_table(plan), memory_table(plan)):
        console.print()
        console.print(table)
    for line in (*totals(plan), *remarks(plan)):
        console.print(line, highlight=False, markup=False)
    if dense is not None:
        console.print()
        print_plan(dense, as_json)


def plan_fields(plan: RunPlan) -> dict[str, Any]:
    """A plan as plain values."""
    fields = dataclasses.asdict(plan)
    for stage, shown in zip(plan.stages, fields["stages"], strict=True):
        shown["memory"]["total"] = stage.memory.total
    return fields


def narrow_table(title: str, *columns: str) -> "Table":
    """A table in which a long name takes two lines before a number does, and nothing is cut."""
    table = new_table(title, *columns)
    for i, column in enumerate(table.columns):
        column.overflow, column.no_wrap = "fold", i > 0
    return table


def stage_table(plan: RunPlan) -> "Table":
    """Parameters, loops, batch, steps and tokens of each stage, and of all."""
    table = narrow_table("Stages", "stage", "params", "loops", "seq_len", "batch", "steps", "tokens")
    for stage in plan.stages:
        length, sizes = stage.length, (stage.batch_tokens[0], stage.batch_tokens[-1])
        table.add_row(
            stage.name,
            count(stored(stage)),
            stage.num_loops if stage.num_loops.isdecimal() else "(*)",
            f"{stage.seq_len:,}",
            " -> ".join(dict.fromkeys(count(tokens) for tokens in sizes)),
            *(("?", "?") if length is None else (f"{length.num_steps:,}", count(length.num_tokens))),
        )
    if plan.num_steps is not None and plan.num_tokens is not None:
        table.add_section()
        table.add_row("in all", "", "", "", "", f"{plan.num_steps:,}", count(plan.num_tokens), style="bold")
    return table


def course_table(plan: RunPlan) -> "Table":
    """What is trained, the FLOPs, and the learning rate at the first step, its peak and at the last step."""
    table = narrow_table(
        "Work and learning rate", "stage", "trained", "FLOPs", "with\nattention", "first\nlr", "peak\nlr", "last\nlr"
    )
    for stage in plan.stages:
        length = stage.length
        table.add_row(
            stage.name,
            count(stage.num_trained),
            *(
                ("?",) * 5
                if length is None
                else (power(length.flops, 2), power(length.flops_with_attention, 2), f"{length.lr_first:.3g}",
                      f"{length.lr_peak:.3g}", f"{length.lr_last:.3g}")
            ),
        )  # fmt: skip
    if plan.flops is not None and plan.flops_with_attention is not None:
        table.add_section()
        flops = (power(plan.flops, 2), power(plan.flops_with_attention, 2))
        table.add_row("in all", "", *flops, "", "", "", style="bold")
    return table


def state_table(plan: RunPlan) -> "Table":
    """Bytes of one device that do not depend on the rows of a forward."""
    table = narrow_table(
        "Memory of each device: weights and optimizer", "stage", "weights", "gradients", "AdamW", "gathered",
        "bf16 copies",
    )  # fmt: skip
    for stage in plan.stages:
        memory = stage.memory
        parts = (memory.parameters, memory.gradients, memory.moments, memory.gathered, memory.casts)
        table.add_row(stage.name, *map(size, parts))
    return table


def memory_table(plan: RunPlan) -> "Table":
    """Bytes of one device that grow with the rows of a forward, and all bytes at the peak of a step."""
    given = "" if plan.device_bytes is None else f" ({size(plan.device_bytes)})"
    table = narrow_table(
        f"Memory of each device{given}: a forward, in all", "stage", "rows x forwards", "activations", "head", "in all"
    )  # fmt: skip
    for stage in plan.stages:
        memory = stage.memory
        table.add_row(
            stage.name, f"{stage.micro_batch_rows} x {stage.micro_batches}", size(memory.activations + memory.sums),
            size(memory.head), size(memory.total) + (" (!)" if stage.fits is False else ""),
        )  # fmt: skip
    return table


def totals(plan: RunPlan) -> Iterable[str]:
    """The rounded numbers that matter, exactly."""
    yield f"Parameters stored: {by_stage(plan, stored)}"
    yield f"Parameters trained: {by_stage(plan, lambda stage: stage.num_trained)}"
    if plan.num_steps is not None and plan.num_tokens is not None:
        yield f"Steps: {plan.num_steps:,}"
        yield f"Tokens: {plan.num_tokens:,}"
    if plan.flops is not None and plan.flops_with_attention is not None:
        yield f"FLOPs: {power(plan.flops, 4)}, with attention {power(plan.flops_with_attention, 4)}"


def remarks(plan: RunPlan) -> Iterable[str]:
    """What the tables cannot say."""
    yield from (
        f"(*) Loops of {stage.name}: {stage.num_loops}." for stage in plan.stages if not stage.num_loops.isdecimal()
    )
    if any(stage.num_loops == "1" for stage in plan.stages):
        yield "At one loop nothing is decided: parameters are counted without the exit gate, as for a dense model."
    unknown = [stage.name for stage in plan.stages if stage.length is None]
    if unknown:
        yield f"?: {', '.join(unknown)} counts in epochs; steps are known once the data are tokenised."
    if plan.device_bytes is None:
        yield "Memory is that of one row at a time, or of the recipe's micro_batch_rows. See --device-memory."
    else:
        yield from (too_large(stage, plan.device_bytes) for stage in plan.stages if stage.fits is False)


def too_large(stage: StagePlan, device_bytes: int) -> str:
    """A stage that does not fit, what it needs, and what there is."""
    rows = f"{stage.micro_batch_rows} row{'s' * (stage.micro_batch_rows > 1)}"
    return (
        f"(!) Does not fit: stage {stage.name} needs {size(stage.memory.total)} on each device with {rows} of "
        f"{stage.seq_len:,} tokens, and {size(int(USABLE_SHARE * device_bytes))} of {size(device_bytes)} can be "
        "used: take more devices, or larger ones."
    )


def stored(stage: StagePlan) -> int:
    """Parameters, without the exit gate where it decides nothing."""
    return stage.num_parameters_without_gate if stage.num_loops == "1" else stage.num_parameters


def by_stage(plan: RunPlan, number: Callable[[StagePlan], int]) -> str:
    """A number if all stages share it: "1,434", else each with its stages: "1,434 (a), 2,667 (b, c)"."""
    names: dict[int, list[str]] = {}
    for stage in plan.stages:
        names.setdefault(number(stage), []).append(stage.name)
    if len(names) == 1:
        return f"{next(iter(names)):,}"
    return ", ".join(f"{value:,} ({', '.join(stages)})" for value, stages in names.items())


def count(value: int) -> str:
    """A count in at most seven characters: "65,536", "533k", "1.43B", "3.00T"."""
    return f"{value:,}" if value < UNROUNDED else rounded(value, ("", "k", "M", "B", "T", "Q"))


def size(value: int) -> str:
    """Bytes to three digits: "516 B", "85.5 MB", "1.50 GB"; powers of 1000, as --device-memory 80GB."""
    return "0" if value == 0 else rounded(value, (" B", " kB", " MB", " GB", " TB", " PB"))


def rounded(value: float, units: tuple[str, ...]) -> str:
    """Three digits and the unit, each 1000 of the one before."""
    i = 0
    while value >= 999.5 and i < len(units) - 1:  # what would round to 1000 is 1.00 of the next
        value, i = value / 1000, i + 1
    digits = 0 if i == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{units[i]}"


def power(value: float, digits: int) -> str:
    """Scientific notation without sign or padding of the exponent: "3.43e23"."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
