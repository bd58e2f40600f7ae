"""A run in the terminal: a live table by loop, and lines for a log file."""

import math
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from looplm.training.gate_alarm import evenness
from looplm.training.held_out import HeldOutRecord
from looplm.training.telemetry_record import Record

_SPARKS = "▁▂▃▄▅▆▇█"


def seconds_left(record: Record) -> float:
    """Seconds until the stage ends, at the mean pace so far."""
    return record.seconds / record.step * (record.num_steps - record.step)


def clock(seconds: float) -> str:
    """m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def progress_line(record: Record) -> str:
    """One line for a log file."""
    losses = " ".join(f"{loss:.3f}" for loss in record.loop_losses)
    shares = " ".join(f"{share:.2f}" for share in record.exit_pdf)
    return (
        f"{record.stage} {record.step}/{record.num_steps}  {clock(seconds_left(record))} left  "
        f"loss by loop {losses}  exit pdf {shares}  H {record.entropy:.2f}  {_pace(record)}"
    )


def held_out_line(stage: str, step: int, measured: HeldOutRecord) -> str:
    """One line for a log file."""
    losses = " ".join(f"{loss:.3f}" for loss in measured.loop_losses)
    bits = " ".join(f"{value:.3f}" for value in measured.bits_per_byte)
    return f"{stage} {step}  held out, {measured.num_tokens:,} tokens: loss by loop {losses}  bits per byte {bits}"


def _pace(record: Record) -> str:
    pace = f"{record.tokens_per_second:,.0f} tokens/s"
    return pace if record.flops_utilisation is None else f"{pace}, {record.flops_utilisation:.0%} of peak"


def spark_line(values: Sequence[float], width: int = 40) -> str:
    """Values from 0 to 1 as bars of eighths, oldest first, evenly thinned to `width`; the newest always shows."""
    every = max(1, -(-len(values) // width))
    shown = list(values[::-1][::every])[::-1]
    return "".join(_SPARKS[min(7, max(0, int(8 * value)))] for value in shown)


def live_view(history: Sequence[Record], held_out: HeldOutRecord | None = None, warnings: Sequence[str] = ()) -> Group:
    """The live display of a stage: progress, a row a loop, the trend of the gate's entropy, the newest alarms.

    history: the stage's records so far, oldest first, at least one.
    """
    record = history[-1]
    done = record.step / record.num_steps
    head = Text.assemble(
        (f"{record.stage}  ", "bold"),
        ("█" * round(30 * done) + "░" * (30 - round(30 * done)), "cyan"),
        f"  {record.step}/{record.num_steps} steps  {clock(seconds_left(record))} left  {_pace(record)}",
    )
    full = math.log(len(record.exit_pdf)) if len(record.exit_pdf) > 1 else 1.0
    memory = f"  {record.memory_bytes / 2**30:.1f} GiB" if record.memory_bytes is not None else ""
    gate = f"gate entropy {record.entropy:.2f} ({record.entropy / full:.0%} of even)  lr {record.lr:.1e}{memory}"
    trend = spark_line([evenness(r.exit_pdf) for r in history])
    told = [Text(f"! {message}", style="bold yellow") for message in warnings[-2:]]
    return Group(
        head, _loop_table(record, held_out), Text(gate, style="dim"), Text(f"exit pdf, evenness {trend}", "dim"), *told
    )


def _loop_table(record: Record, held_out: HeldOutRecord | None) -> Table:
    """A row a loop; held-out loops beyond the trained depth have rows of their own."""
    table = Table(box=None, pad_edge=False)
    for column, justify in (("loop", "right"), ("nats per token", "right"), ("exit share", "left")):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    if held_out is not None:
        table.add_column("held out", justify="right")
        table.add_column("bits per byte", justify="right")
    measured = list(zip(held_out.loop_losses, held_out.bits_per_byte, strict=True)) if held_out is not None else []
    for row in range(max(len(record.loop_losses), len(measured))):
        cells: list[str | Text] = [str(row + 1), "", ""]
        if row < len(record.loop_losses):
            share = record.exit_pdf[row]
            # A step that was left out may hold NaN.
            bar = Text("█" * round(40 * share) if math.isfinite(share) else "", "magenta") + f" {share:.2f}"
            cells[1:] = [f"{record.loop_losses[row]:.4f}", bar]
        if row < len(measured):
            cells += [f"{measured[row][0]:.4f}", f"{measured[row][1]:.3f}"]
        table.add_row(*cells)
    return table
