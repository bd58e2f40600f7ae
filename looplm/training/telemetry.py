"""What a run tells: one record every few steps, to JSONL, TensorBoard, W&B, the terminal and memory."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from looplm.training.held_out import HeldOutRecord
from looplm.training.recipe import WandbRecipe
from looplm.training.telemetry_record import Record, scalars
from looplm.training.telemetry_sinks import TensorBoardSink, WandbSink
from looplm.training.telemetry_view import held_out_line, live_view, progress_line

__all__ = ["Record", "Telemetry"]


@dataclass
class Telemetry:
    """Collects records and passes each on; nothing here runs a forward or holds a tensor.

    Of several ranks one has a directory and a console; the others collect in silence.
    """

    run_dir: Path | None = None
    """Where telemetry.jsonl and the trackers' files go; None keeps records in memory only."""
    console: Console | None = None
    """Where progress is shown: live in a terminal, a line every `line_seconds` elsewhere; None for silence."""
    line_seconds: float = 10.0
    records: list[Record] = field(default_factory=list)
    held_out: dict[tuple[str, int], HeldOutRecord] = field(default_factory=dict)
    """Held-out measurements by stage and step."""
    tensorboard: bool = True
    """Write TensorBoard events, a directory a stage, if there is a run directory."""
    wandb: WandbRecipe | None = None
    """Log to Weights & Biases as well, if there is a run directory."""
    run_config: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe, shown by W&B beside the curves."""
    _live: Live | None = None
    _tensorboard: TensorBoardSink | None = None
    _wandb: WandbSink | None = None
    _warnings: list[tuple[str, int, str]] = field(default_factory=list)
    _last_line: float = -math.inf

    @property
    def path(self) -> Path | None:
        """The JSONL file: a record a line; warnings and held-out losses as objects with `stage`, `step` and
        `warning` or `held_out`."""
        return self.run_dir / "telemetry.jsonl" if self.run_dir is not None else None

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Opens the sinks for one stage and closes them, also on an error; W&B stays open until :meth:`close`.

        Raises UserError when W&B is asked for and not installed.
        """
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.tensorboard:
                self._tensorboard = TensorBoardSink(self.run_dir / "tensorboard")
            if self.wandb is not None and self._wandb is None:
                self._wandb = WandbSink(self.wandb, self.run_dir, self.run_config)
                if self._wandb.url is not None:
                    self._print(f"Weights & Biases: {self._wandb.url}")
        if self.console is not None and self.console.is_terminal:
            self._live = Live(console=self.console, transient=False, refresh_per_second=4)
            self._live.start()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.stop()
            if self._tensorboard is not None:
                self._tensorboard.close()
            self._live, self._tensorboard = None, None

    def close(self) -> None:
        """Ends the W&B run, if there is one: the last stage is done."""
        if self._wandb is not None:
            self._wandb.close()
        self._wandb = None

    def log(self, record: Record) -> None:
        """Takes one record."""
        self.records.append(record)
        self._append({name: value for name, value in asdict(record).items() if value is not None})
        self._track(record.stage, record.step, scalars(record))
        if self._live is not None:
            self._show_live()
        elif time.monotonic() - self._last_line > self.line_seconds or record.step == record.num_steps:
            self._last_line = time.monotonic()
            self._print(progress_line(record))

    def log_held_out(self, stage: str, step: int, measured: HeldOutRecord) -> None:
        """Takes what was measured on held-out text after a step."""
        self.held_out[stage, step] = measured
        self._append({"stage": stage, "step": step, "held_out": asdict(measured)})
        named: dict[str, float] = {}
        for loop, (nats, bits) in enumerate(zip(measured.loop_losses, measured.bits_per_byte, strict=True), start=1):
            named[f"held_out_loss/{loop}"], named[f"held_out_bits_per_byte/{loop}"] = nats, bits
        self._track(stage, step, named)
        if self._live is not None:
            self._show_live()
        else:
            self._print(held_out_line(stage, step, measured))

    def warn(self, stage: str, step: int, message: str) -> None:
        """Shows a warning and keeps it in the JSONL file."""
        self._warnings.append((stage, step, message))
        self._append({"stage": stage, "step": step, "warning": message})
        if self.console is not None:
            self.console.print(Text(f"{stage}, step {step}: {message}", style="bold yellow"))

    def rewind(self, stage: str, step: int) -> None:
        """Takes back what was told of `stage` after `step`, and reads what an earlier process told before it.

        TensorBoard takes it back when the stage is told again; a W&B run keeps the old points beside the new. A file
        with lines that cannot be read is set aside as telemetry.jsonl.damaged, with a warning; the others are kept.
        """
        num_damaged = 0
        if self.path is not None and self.path.exists():
            # A kill may have left the last line unfinished.
            lines = [line for line in self.path.read_bytes().splitlines(True) if line.endswith(b"\n")]
            entries = [entry for entry in map(_entry, lines) if entry is not None]
            num_damaged = len(lines) - len(entries)
            told = [entry for entry in entries if entry["stage"] != stage or entry["step"] <= step]
            fresh = self.path.with_suffix(".new")
            fresh.write_text("".join(json.dumps(entry) + "\n" for entry in told), encoding="utf-8")
            if num_damaged:
                self.path.replace(self.path.with_name(self.path.name + ".damaged"))
            fresh.replace(self.path)
            self._read(told)
        self.records = [record for record in self.records if record.stage != stage or record.step <= step]
        self.held_out = {at: found for at, found in self.held_out.items() if at[0] != stage or at[1] <= step}
        self._warnings = [warning for warning in self._warnings if warning[0] != stage or warning[1] <= step]
        if num_damaged:
            self.warn(
                stage, step,
                f"{num_damaged} lines of {self.path} could not be read and are left out; the file as it was is beside "
                "it, as telemetry.jsonl.damaged.",
            )  # fmt: skip

    def _read(self, entries: list[dict[str, Any]]) -> None:
        """Replaces what is in memory by the entries of a file."""
        self.records, self.held_out, self._warnings = [], {}, []
        for entry in entries:
            stage, step = entry["stage"], entry["step"]
            if "warning" in entry:
                self._warnings.append((stage, step, entry["warning"]))
            elif "held_out" in entry:
                self.held_out[stage, step] = HeldOutRecord(**entry["held_out"])
            else:
                self.records.append(Record(**entry))

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _track(self, stage: str, step: int, named: dict[str, float]) -> None:
        for sink in (self._tensorboard, self._wandb):
            if sink is not None:
                sink.log(stage, step, named)

    def _print(self, line: str) -> None:
        if self.console is not None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _show_live(self) -> None:
        if self._live is None or not self.records:
            return
        stage = self.records[-1].stage
        measured = [found for at, found in self.held_out.items() if at[0] == stage]
        self._live.update(
            live_view(
                [record for record in self.records if record.stage == stage],
                held_out=measured[-1] if measured else None,
                warnings=[f"step {step}: {message}" for name, step, message in self._warnings if name == stage],
            )
        )


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line of telemetry.jsonl says, or None where it is damaged."""
    try:
        entry = json.loads(line.decode("utf-8"))
        if not isinstance(entry["stage"], str) or not isinstance(entry["step"], int):
            return None
        if "held_out" in entry:
            HeldOutRecord(**entry["held_out"])
        elif "warning" not in entry:
            Record(**entry)
    except (ValueError, TypeError, KeyError):
        return None
    return entry
