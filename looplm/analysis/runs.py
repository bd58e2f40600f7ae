"""Losses of many runs: from a CSV table, or from the directories that `looplm train` writes."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from looplm.data.text_files import read_jsonl, read_text
from looplm.errors import UserError
from looplm.hf.checkpoint import CONFIG, read_config
from looplm.model.flops import count_parameters

TELEMETRY = "telemetry.jsonl"
POINTS_PER_RUN = 12
"""Of a run's training curve, evenly spaced in the logarithm of its tokens."""
STUDY_COLUMNS = {
    "cell", "num_parameters", "core_parameters", "num_tokens", "num_loops", "loop", "loss", "exit_pdf",
}  # fmt: skip
"""By which the runs.csv of a study of the lab is known."""
WARMUP_SHARE = 0.1
"""Share of a run's tokens whose losses are not taken: no scaling law describes a warmup."""


@dataclass(frozen=True)
class RunPoint:
    """One run at one point of its training."""

    run: str
    num_parameters: int
    num_tokens: int
    num_loops: int
    """R it is trained with."""
    loop_losses: tuple[float, ...]
    """Nats per token at every loop."""
    exit_pdf: tuple[float, ...] | None = None
    """Mean over tokens."""
    core_parameters: int | None = None
    """Those inside the loop, counted once."""
    loss: float | None = None
    """Total loss, where it was measured as such."""

    @property
    def total_loss(self) -> float:
        """The measured total loss, else sum_r p_r L_r; of a single loop, its own loss.

        Raises UserError where neither is known.
        """
        if self.loss is not None:
            return self.loss
        if self.num_loops == 1:
            return self.loop_losses[0]
        if self.exit_pdf is None:
            raise UserError(f"The run {self.run} gives neither its total loss nor the exit pdf to sum loops by.")
        return float(np.dot(self.exit_pdf, self.loop_losses))

    @property
    def unrolled_parameters(self) -> int | None:
        """Parameters of the model that R copies of the core would make; None where the core's are not known."""
        if self.core_parameters is None:
            return None
        return self.num_parameters + (self.num_loops - 1) * self.core_parameters


def read_runs(source: Path) -> list[RunPoint]:
    """The runs of a CSV file, or of every run directory at or below a directory.

    CSV columns: run, num_parameters, num_tokens, num_loops, loss_1 ... loss_R; and, where known, core_parameters,
    loss, exit_pdf_1 ... exit_pdf_R. Rows of the same `run` are points of one curve; other columns are ignored. A study
    of the lab writes a row for every loop instead: `cell` is the run then, and the columns are loop, loss, exit_pdf.
    Raises UserError for anything that cannot be read, with the line where there is one.
    """
    if source.is_dir():
        return _directories(source)
    rows = list(csv.DictReader(read_text(source).splitlines()))
    if not rows:
        raise UserError(f"{source} holds no runs: it needs a header and a line for every point.")
    if rows[0].keys() >= STUDY_COLUMNS:
        return [_row(row, where) for where, row in _loops_joined(rows, source)]
    needed = {"run", "num_parameters", "num_tokens", "num_loops", "loss_1"}
    if missing := sorted(needed - rows[0].keys()):
        raise UserError(f"{source} lacks the columns {', '.join(missing)}; it has {', '.join(rows[0])}.")
    return [_row(row, f"{source}, line {number}") for number, row in enumerate(rows, start=2)]


def _loops_joined(rows: Iterable[Mapping[str, str]], source: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A study's rows, one a loop, as rows of one a point, with the line where each begins."""
    points: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{source}, line {number}"
        shared = {name: row[name] for name in ("num_parameters", "core_parameters", "num_tokens", "num_loops")}
        _, point = points.setdefault((row["cell"], row["num_tokens"]), (where, {"run": row["cell"], **shared}))
        if any(point[name] != value for name, value in shared.items()):
            raise UserError(f"{where}: {row['cell']} has another size or depth here than on the lines before.")
        point[f"loss_{row['loop']}"], point[f"exit_pdf_{row['loop']}"] = row["loss"], row["exit_pdf"]
    return iter(points.values())


def write_runs(points: Iterable[RunPoint], file: Path) -> None:
    """Writes a CSV that :func:`read_runs` reads."""
    points = list(points)
    most = max(point.num_loops for point in points)
    loops = range(1, most + 1)
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(
            ["run", "num_parameters", "core_parameters", "num_tokens", "num_loops", "loss"]
            + [f"loss_{loop}" for loop in loops]
            + [f"exit_pdf_{loop}" for loop in loops]
        )
        for point in points:
            empty: tuple[str, ...] = ("",) * (most - point.num_loops)
            pdf: tuple[Any, ...] = ("",) * point.num_loops if point.exit_pdf is None else point.exit_pdf
            writer.writerow(
                [point.run, point.num_parameters, _or_empty(point.core_parameters), point.num_tokens, point.num_loops]
                + [_or_empty(point.loss), *point.loop_losses, *empty, *pdf, *empty]
            )


def _or_empty(value: float | None) -> Any:
    return "" if value is None else value


def _row(row: Mapping[str, str | None], where: str) -> RunPoint:
    def number(name: str) -> float | None:
        text = (row.get(name) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not np.isfinite(value):
            raise UserError(f"{where}: {name} is {text!r}; it must be a finite number.")
        return value

    def whole(name: str) -> int:
        value = number(name)
        if value is None or value < 1 or value != int(value):
            raise UserError(f"{where}: {name} is {row.get(name)!r}; it must be a whole number from 1 up.")
        return int(value)

    depth = whole("num_loops")
    losses = [number(f"loss_{loop}") for loop in range(1, depth + 1)]
    pdf = [number(f"exit_pdf_{loop}") for loop in range(1, depth + 1)]
    known_losses = [loss for loss in losses if loss is not None and loss > 0]
    if len(known_losses) < depth:
        raise UserError(f"{where}: num_loops is {depth}, so loss_1 to loss_{depth} must all be there, above 0.")
    known_pdf = [share for share in pdf if share is not None]
    if len(known_pdf) not in (0, depth):
        raise UserError(f"{where}: exit_pdf_1 to exit_pdf_{depth} must all be there, or none of them.")
    total = number("loss")
    if total is not None and total <= 0:
        raise UserError(f"{where}: loss is {total:g}; it must be above 0.")
    return RunPoint(
        run=row.get("run") or where,
        num_parameters=whole("num_parameters"),
        num_tokens=whole("num_tokens"),
        num_loops=depth,
        loop_losses=tuple(known_losses),
        exit_pdf=tuple(known_pdf) if known_pdf else None,
        core_parameters=whole("core_parameters") if number("core_parameters") is not None else None,
        loss=total,
    )


# --- Directories of runs -------------------------------------------------------------------------------------------


def _directories(root: Path) -> list[RunPoint]:
    found = sorted(file.parent for file in root.rglob(TELEMETRY))
    points = [point for directory in found for point in run_points(directory, str(directory.relative_to(root)))]
    if not points:
        raise UserError(f"{root} holds no run that has told its losses: there is no {TELEMETRY} with records in it.")
    return points


def run_points(directory: Path, name: str) -> list[RunPoint]:
    """Points of one run's curve: its training losses, each point the mean since the one before.

    The size comes from the config of the model that the run has saved. Raises UserError where there is none yet.
    """
    configs = sorted(directory.rglob(CONFIG), key=lambda file: file.stat().st_mtime)
    models = [file for file in configs if "num_hidden_layers" in json.loads(read_text(file))]
    if not models:
        raise UserError(f"{directory} holds no saved model yet, so its size is not known. Let the run save one first.")
    config = read_config(models[-1]).to_model_config()
    count = count_parameters(config)
    records = list(_records(directory / TELEMETRY))
    return [
        RunPoint(
            run=name,
            num_parameters=count.total,
            core_parameters=count.core,
            num_tokens=tokens,
            num_loops=config.num_loops,
            loop_losses=losses,
            exit_pdf=pdf,
        )
        for tokens, losses, pdf in _thinned(records)
        if len(losses) == config.num_loops
    ]


def _records(file: Path) -> Iterator[tuple[int, tuple[float, ...], tuple[float, ...]]]:
    """(tokens of all stages so far, loss of each loop, mean exit pdf) of every record of a language-model stage."""
    before, latest, stage = 0, 0, None
    for _, entry in read_jsonl(file):
        if "loop_losses" not in entry:
            continue
        if entry["stage"] != stage:
            before, stage = before + latest, entry["stage"]
        latest = entry["tokens"]
        if entry.get("continue_label") is None:  # Stage II teaches the gate alone
            yield before + latest, tuple(entry["loop_losses"]), tuple(entry["exit_pdf"])


def _thinned(
    records: list[tuple[int, tuple[float, ...], tuple[float, ...]]],
) -> Iterator[tuple[int, tuple[float, ...], tuple[float, ...]]]:
    """At most POINTS_PER_RUN of the records after the warmup, each the mean of those since the one before."""
    if not records:
        return
    last = records[-1][0]
    kept = [record for record in records if record[0] >= WARMUP_SHARE * last]
    edges = np.geomspace(max(1, kept[0][0]), last, POINTS_PER_RUN + 1)
    groups = np.clip(np.searchsorted(edges, [record[0] for record in kept], side="left") - 1, 0, POINTS_PER_RUN - 1)
    for group in np.unique(groups):
        mine = [record for record, number in zip(kept, groups, strict=True) if number == group]
        tokens = int(round(float(np.mean([record[0] for record in mine]))))
        losses = tuple(np.mean([record[1] for record in mine], axis=0).tolist())
        yield tokens, losses, tuple(np.mean([record[2] for record in mine], axis=0).tolist())
