"""What `looplm bench` prints."""

from rich import box
from rich.table import Table

from looplm.bench.breakdown import PARTS, Part
from looplm.bench.train import Measured, TrainReport

MIB = 2**20

SHORT: dict[Part, str] = {
    "head products": "head",
    "core products": "core",
    "attention": "attn",
    "optimizer": "AdamW",
    "rest": "rest",
}
"""What a part is called in a column of 80."""


def headline(report: TrainReport) -> str:
    """Machine, sizes and parameters, in a line each."""
    machine, sizes = report.machine, report.sizes
    return (
        f"{machine.date}, {machine.device}, {machine.threads} threads, torch {machine.torch}\n"
        f"hidden {sizes.hidden_size}, {sizes.num_layers} layers, {sizes.num_loops} loops, vocabulary "
        f"{sizes.vocab_size:,}, {sizes.batch_size} x {sizes.seq_len} tokens, {sizes.precision}\n"
        f"parameters: {', '.join(sorted({f'{row.side} {row.num_parameters:,}' for row in report.rows}))}"
    )


def comparison_table(report: TrainReport) -> Table:
    """A row for each side and way of compiling, and the ratios to the baseline."""
    table = _new_table(
        "Stage-I training step", "compile", "side", "tokens/s", "seconds (spread)", "MiB", "speed", "memory",
    )  # fmt: skip
    for naive, ours in pairs(report):
        for row in (naive, ours):
            speed, memory = ratios(naive, row)
            table.add_row(
                row.compile if row is naive else "",
                row.side if row.checkpointing == "none" else f"{row.side}, {row.checkpointing} recomputed",
                f"{row.tokens_per_second:,.0f}",
                seconds_text(row),
                f"{row.peak_bytes / MIB:,.0f}",
                f"{speed:.2f} x",
                f"{memory:.2f} x",
            )
        table.add_section()
    table.caption = "Steps of the two in turn. MiB: the most a step holds above model, optimizer and libraries."
    return table


def breakdown_table(report: TrainReport) -> Table:
    """Where the time goes, in seconds of the median step."""
    table = _new_table("Seconds of a step, by part", "compile", "side", *(SHORT[part] for part in PARTS), "all")
    for row in report.rows:
        if row.breakdown:
            step = median_seconds(row)
            table.add_row(
                row.compile,
                row.side,
                *(f"{step * row.breakdown[part]:.2f} {row.breakdown[part]:.0%}" for part in PARTS),
                f"{step:.2f}",
            )
    table.caption = (
        "Head, core: matrix products, which both must do. Rest: passes over memory, as softmax, casts, norms, copies."
    )
    return table


def sweep_table(report: TrainReport) -> Table:
    """Growth with loops and sequence, side by side."""
    table = _new_table(
        "Growth with loops and sequence",
        "side", "recomputed", "loops", "tokens", "tokens/s", "seconds (spread)", "MiB",
    )  # fmt: skip
    place = None
    for row in report.rows:
        if place not in (None, (row.num_loops, row.seq_len)):
            table.add_section()
        place = row.num_loops, row.seq_len
        table.add_row(
            row.side,
            row.checkpointing,
            str(row.num_loops),
            f"{row.batch_size} x {row.seq_len}",
            f"{row.tokens_per_second:,.0f}",
            seconds_text(row),
            f"{row.peak_bytes / MIB:,.0f}",
        )
    return table


def pairs(report: TrainReport) -> list[tuple[Measured, Measured]]:
    """(baseline, ours) for each way of compiling, in order."""
    found: dict[str, dict[str, Measured]] = {}
    for row in report.rows:
        found.setdefault(row.compile, {})[row.side] = row
    return [(pair["naive"], pair["looplm"]) for pair in found.values()]


def ratios(naive: Measured, row: Measured) -> tuple[float, float]:
    """Speed and memory of a row as multiples of the baseline's."""
    return row.tokens_per_second / naive.tokens_per_second, row.peak_bytes / naive.peak_bytes


def median_seconds(row: Measured) -> float:
    """Of a step."""
    return row.batch_size * row.seq_len / row.tokens_per_second


def seconds_text(row: Measured) -> str:
    """Median and spread of the timed steps."""
    return f"{median_seconds(row):.3g} ({min(row.seconds):.3g}-{max(row.seconds):.3g})"


def _new_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("compile", "side", "recomputed") else "right")
    return table
