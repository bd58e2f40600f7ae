"""The report's tables as plain cells, and their form for the terminal. The page prints the same cells."""

import math
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from looplm.evaluation.exit_curve import GateStatistics
from looplm.report.schema import FoldModel, Machine, Phase, TextModel


@dataclass(frozen=True)
class Cells:
    """A table: a title, one heading per column, rows of text. All columns but the first hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def depth_table(model: TextModel) -> Cells:
    """Quality at each depth, with the twin's in the last row."""
    columns = ("Depth", "Bits per byte", "Accuracy", "Agreement", "Next loop, nats", "Tokens worse next")
    rows = []
    for point in model.sweep.points:
        beyond = " (untrained)" if point.num_loops > model.sweep.trained_loops else ""
        rows.append(
            (
                f"{point.num_loops}{beyond}",
                f"{point.bits_per_byte:.3f} ± {point.bits_per_byte_stderr:.3f}",
                f"{point.accuracy:.1%}",
                f"{point.agreement:.1%}",
                _plus_minus(point.loss_change_nats, point.loss_change_nats_stderr),
                "" if point.worsened_share is None else f"{point.worsened_share:.1%}",
            )
        )
    if model.twin is not None:
        point = model.twin.sweep.points[0]
        bpb = f"{point.bits_per_byte:.3f} ± {point.bits_per_byte_stderr:.3f}"
        rows.append(("One-loop twin", bpb, f"{point.accuracy:.1%}", "", "", ""))
    return Cells(f"{model.name}: held-out quality at each depth", columns, tuple(rows))


def threshold_table(model: TextModel) -> Cells:
    """Claimed depth beside the work really done, at round thresholds."""
    num_loops = len(model.thresholds[0].exit_shares)
    leave = tuple(f"Loop {loop}" for loop in range(1, num_loops + 1))
    columns = ("Threshold", "Claimed depth", "Weight passes", "Token-loops", "Bits per byte", *leave)
    rows = tuple(
        (
            f"{point.threshold:g}",
            f"{point.mean_loops:.2f}",
            f"{point.weight_passes_per_token:.2f}",
            f"{point.token_loops_per_token:.2f}",
            f"{point.bits_per_byte:.3f}",
            *(f"{share:.0%}" for share in point.exit_shares),
        )
        for point in model.thresholds
    )
    title = f"{model.name}: exit thresholds, per token (batch 1, exact cache), and share leaving at each loop"
    return Cells(title, columns, rows)


def gate_table(model: TextModel) -> Cells:
    """The exit distribution after each stage."""
    num_loops = len(model.gate.mean_exit_pdf)
    columns = ("Gate", "Entropy, nats", "Of ln R", "Expected depth", "Spread")
    columns += tuple(f"Loop {loop}" for loop in range(1, num_loops + 1))
    rows = (_gate_row("After Stage I", model.stage_one_gate), _gate_row("After Stage II", model.gate))
    return Cells(f"{model.name}: the exit gate; mean exit probability of each loop", columns, rows)


def _gate_row(name: str, gate: GateStatistics) -> tuple[str, ...]:
    most = math.log(len(gate.mean_exit_pdf))
    return (
        name,
        f"{gate.mean_entropy_nats:.2f}",
        f"{gate.mean_entropy_nats / most:.0%}" if most else "",
        f"{gate.mean_expected_loops:.2f}",
        f"{gate.expected_loops_std:.2f}",
        *(f"{p:.2f}" for p in gate.mean_exit_pdf),
    )


def cache_table(model: TextModel) -> Cells:
    """Cache memory per token of context under every strategy."""
    most = max(row.decode_bytes_per_token for row in model.cache)
    rows = tuple(
        (
            row.strategy,
            f"{row.decode_bytes_per_token:,}",
            f"{row.decode_bytes_per_token / most:.0%}",
            f"{row.prefill_peak_bytes_per_token:,}",
        )
        for row in model.cache
    )
    columns = ("Strategy", "Bytes per token", "Share", "At peak, reading the prompt")
    return Cells(f"{model.name}: key-value cache in {model.cache_dtype}", columns, rows)


def fold_table(fold: FoldModel) -> Cells:
    """Accuracy by k and loop, and the depth the gate spends on each k."""
    num_loops = len(fold.groups[0].accuracy_by_loop)
    columns = ("k", *(f"Loop {loop}" for loop in range(1, num_loops + 1)), "Expected depth", "Spread")
    rows = tuple(
        (
            str(group.group),
            *(f"{accuracy:.2f}" for accuracy in group.accuracy_by_loop),
            f"{group.expected_loops:.2f}",
            f"{group.expected_loops_std:.2f}",
        )
        for group in fold.groups
    )
    return Cells("Fold: accuracy by k and loop", columns, rows)


def fold_exit_table(fold: FoldModel) -> Cells:
    """What leaving early keeps and saves on each k, beside a twin that has one loop only."""
    columns = ["k", "One-loop twin"]
    for point in fold.exits:
        columns += [f"At {point.threshold:g}", "Mean loops"]
    rows = []
    for i, group in enumerate(fold.groups):
        cells = [str(group.group), f"{fold.twin_accuracy[i]:.2f}"]
        for point in fold.exits:
            cells += [f"{point.accuracy[i]:.2f}", f"{point.mean_loops[i]:.2f}"]
        rows.append(tuple(cells))
    return Cells("Fold: accuracy at exit thresholds, and of the one-loop twin", tuple(columns), tuple(rows))


def machine_table(machine: Machine, phases: tuple[Phase, ...]) -> Cells:
    """What ran where, and for how long."""
    total = sum(phase.seconds for phase in phases)
    rows = (
        ("looplm", machine.looplm_version),
        ("torch", machine.torch_version),
        ("Python", machine.python_version),
        ("Platform", machine.platform),
        ("Threads", str(machine.num_threads)),
        *((phase.name, f"{phase.seconds:.0f} s") for phase in phases),
        ("All together", f"{total:.0f} s"),
    )
    return Cells("This run", ("What", "Figure"), rows)


def terminal_table(cells: Cells) -> Table:
    """The same cells for a rich console, headings broken over lines so that 80 columns hold every table."""
    title = Text(cells.title)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(cells.columns):
        heading = Text(column.replace(" ", "\n").replace("-", "-\n"))
        table.add_column(heading, justify="left" if index == 0 else "right", vertical="bottom", no_wrap=True)
    for row in cells.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _plus_minus(value: float | None, error: float | None) -> str:
    return "" if value is None or error is None else f"{value:+.3f} ± {error:.3f}"
