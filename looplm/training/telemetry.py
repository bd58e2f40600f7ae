"""What a run tells: one record every few steps, to JSONL, TensorBoard, the terminal and memory."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, kw_only=True)
class Record:
    """The figures of one optimizer step, as its own forward computed them."""

    stage: str
    step: int
    """Optimizer steps done."""
    num_steps: int
    tokens: int
    """Tokens predicted so far in this stage."""
    loss: float
    loop_losses: list[float]
    """Nats per token at every loop."""
    exit_pdf: list[float]
    """Mean over tokens."""
    entropy: float
    """Mean over tokens of H(exit pdf), nats."""
    expected_loops: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    """Since the stage began."""


@dataclass
class Telemetry:
    """Collects records and passes each on; nothing here runs a forward or holds a tensor."""

    run_dir: Path | None = None
    """Where telemetry.jsonl and the TensorBoard events go; None keeps records in memory only."""
    console: Console | None = None
    """Where progress is shown: live in a terminal, a line every `line_seconds` elsewhere; None for silence."""
    line_seconds: float = 10.0
    records: list[Record] = field(default_factory=list)
    _live: Live | None = None
    _writer: SummaryWriter | None = None
    _last_line: float = -math.inf

    @property
    def path(self) -> Path | None:
        """The JSONL file: a record a line, and warnings as objects with `stage`, `step` and `warning`."""
        return self.run_dir / "telemetry.jsonl" if self.run_dir is not None else None

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Opens the sinks for one stage and closes them, also on an error."""
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(self.run_dir / "tensorboard"))
        if self.console is not None and self.console.is_terminal:
            self._live = Live(console=self.console, transient=False, refresh_per_second=4)
            self._live.start()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.stop()
            if self._writer is not None:
                self._writer.close()
            self._live, self._writer = None, None

    def log(self, record: Record) -> None:
        """Takes one record."""
        self.records.append(record)
        self._append(asdict(record))
        if self._writer is not None:
            self._write_scalars(self._writer, record)
        if self._live is not None:
            self._live.update(live_view(record))
        elif self.console is not None and (time.monotonic() - self._last_line > self.line_seconds or _is_last(record)):
            self._last_line = time.monotonic()
            self.console.print(progress_line(record), highlight=False, markup=False, soft_wrap=True)

    def warn(self, stage: str, step: int, message: str) -> None:
        """Shows a warning and keeps it in the JSONL file."""
        self._append({"stage": stage, "step": step, "warning": message})
        if self.console is not None:
            self.console.print(Text(f"{stage}, step {step}: {message}", style="bold yellow"))

    def rewind(self, stage: str, step: int) -> None:
        """Takes back what was told of `stage` after `step`, and reads what an earlier process told before it."""
        if self.path is not None and self.path.exists():
            # A kill may have left the last line unfinished.
            lines = [line for line in self.path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
            told = [entry for entry in map(json.loads, lines) if entry["stage"] != stage or entry["step"] <= step]
            fresh = self.path.with_suffix(".new")
            fresh.write_text("".join(json.dumps(entry) + "\n" for entry in told), encoding="utf-8")
            fresh.replace(self.path)
            self.records = [Record(**entry) for entry in told if "warning" not in entry]
        self.records = [record for record in self.records if record.stage != stage or record.step <= step]

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    @staticmethod
    def _write_scalars(writer: SummaryWriter, record: Record) -> None:
        step, stage = record.step, record.stage
        for name in ("loss", "entropy", "expected_loops", "lr", "grad_norm", "tokens_per_second"):
            writer.add_scalar(f"{stage}/{name}", asdict(record)[name], step)
        for loop, (loss, share) in enumerate(zip(record.loop_losses, record.exit_pdf, strict=True), start=1):
            writer.add_scalar(f"{stage}/loop_loss/{loop}", loss, step)
            writer.add_scalar(f"{stage}/exit_pdf/{loop}", share, step)


def _is_last(record: Record) -> bool:
    return record.step == record.num_steps


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
        f"loss by loop {losses}  exit pdf {shares}  H {record.entropy:.2f}  {record.tokens_per_second:,.0f} tokens/s"
    )


def live_view(record: Record) -> Group:
    """The live display: progress and time left, then loss and exit share of every loop as bars."""
    done = record.step / record.num_steps
    head = Text.assemble(
        (f"{record.stage}  ", "bold"),
        ("█" * round(30 * done) + "░" * (30 - round(30 * done)), "cyan"),
        f"  {record.step}/{record.num_steps} steps  {clock(seconds_left(record))} left  "
        f"{record.tokens_per_second:,.0f} tokens/s",
    )
    table = Table(box=None, pad_edge=False)
    for column, justify in (("loop", "right"), ("nats per token", "right"), ("exit share", "left")):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    for loop, (loss, share) in enumerate(zip(record.loop_losses, record.exit_pdf, strict=True), start=1):
        table.add_row(str(loop), f"{loss:.4f}", Text("█" * round(40 * share), style="magenta") + f" {share:.2f}")
    full = math.log(len(record.exit_pdf)) if len(record.exit_pdf) > 1 else 1.0
    gate = f"gate entropy {record.entropy:.2f} ({record.entropy / full:.0%} of even)  lr {record.lr:.1e}"
    return Group(head, table, Text(gate, style="dim"))
