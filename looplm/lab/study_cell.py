"""One cell of a study: trained by the trainer's own run, so resumable, then measured. A process of its own.

python -m looplm.lab.study_cell OUT/cells/NAME PARENT (the process without which it shall not go on)

cell.json      what the cell is, written by the runner
recipe.yaml    its recipe
run/           the run directory (looplm.training.run)
found.json     the figures of a finished cell
failed.txt     why the last attempt ended
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from rich.console import Console

from looplm.errors import UserError
from looplm.hf.load import load, load_tokenizer
from looplm.lab.study import import_named
from looplm.lab.study_files import FOUND, disk_errors, locked, read_object, write_whole
from looplm.lab.study_text import frontier_figures
from looplm.model.config import LoopedConfig
from looplm.model.flops import count_parameters, inference_flops, training_flops
from looplm.training.baseline import language_stages
from looplm.training.interrupt import Interrupted
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import load_recipe
from looplm.training.run import run
from looplm.training.run_directory import RECIPE as RUN_RECIPE
from looplm.training.stage_model import stage_directory

CELL, RECIPE, RUN, FAILED = "cell.json", "recipe.yaml", "run", "failed.txt"

PATIENCE_SECONDS = 60
"""For a process of before that is still finishing its step and saving."""

WATCH_SECONDS = 1.0

TAIL_SHARE = 0.1
"""Last share of the steps over which training figures are averaged."""

SMOOTHING_STEPS = 25
"""Records on each side of the running mean from which the oscillation of the loss is measured."""


@dataclass(frozen=True)
class Told:
    """The telemetry of one stage."""

    steps: list[dict[str, Any]]
    """Records of steps."""
    held_out: list[dict[str, Any]]
    """Held-out losses, each with its step."""
    warnings: list[str]

    def tail(self) -> list[dict[str, Any]]:
        """The last records, at least one."""
        return self.steps[-max(1, round(TAIL_SHARE * len(self.steps))) :]


def read_telemetry(run_dir: Path, stage: str) -> Told:
    """What a finished stage has told."""
    lines = (run_dir / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
    told = [entry for entry in map(json.loads, lines) if entry["stage"] == stage]
    return Told(
        steps=[entry for entry in told if "loss" in entry],
        held_out=[{"step": entry["step"], **entry["held_out"]} for entry in told if "held_out" in entry],
        warnings=[f"step {entry['step']}: {entry['warning']}" for entry in told if "warning" in entry],
    )


def training_figures(config: LoopedConfig, told: Told) -> dict[str, Any]:
    """Figures of the stage's steps, and what the model costs. Lists go by loop; `state_gradients` by loop, then layer.

    `loss` and the other training figures are means over the last tenth of the steps; `oscillation` is the standard
    deviation, over the second half, of the deepest loop's loss around its running mean.
    """
    count, tail, last = count_parameters(config), told.tail(), told.steps[-1]
    by_loop = [fmean(values) for values in zip(*(entry["loop_losses"] for entry in tail), strict=True)]
    deepest = [entry["loop_losses"][-1] for entry in told.steps]
    figures: dict[str, Any] = {
        "num_layers": config.num_layers,
        "num_loops": config.num_loops,
        "num_parameters": count.total_without_gate if config.num_loops == 1 else count.total,
        "core_parameters": count.core,
        "num_tokens": last["tokens"],
        "training_flops": training_flops(config, last["tokens"]),
        "flops_per_token": inference_flops(config, config.num_loops),
        "seconds": last["seconds"],
        "train_loss": by_loop[-1],
        "train_loss_by_loop": by_loop,
        "gain_by_loop": [before - after for before, after in zip(by_loop, by_loop[1:], strict=False)],
        "exit_pdf": [fmean(values) for values in zip(*(entry["exit_pdf"] for entry in tail), strict=True)],
        "exit_entropy": fmean(entry["entropy"] for entry in tail),
        "expected_loops": fmean(entry["expected_loops"] for entry in tail),
        "num_spikes": last["num_spikes"],
        "num_skipped": last["num_skipped"],
        "peak_grad_norm": max(entry["grad_norm"] for entry in told.steps),
        "oscillation": oscillation(deepest),
        "loss_curve": curve(told.steps, deepest),
        "first_loop_share_curve": curve(told.steps, [entry["exit_pdf"][0] for entry in told.steps]),
        "warnings": told.warnings,
    }
    figures["first_loop_share"] = figures["exit_pdf"][0]
    measured = [entry["state_gradients"] for entry in told.steps if "state_gradients" in entry]
    if measured:
        flat = [norm for layers in measured[-1] for norm in layers]
        figures["state_gradients"] = flat
        figures["gradient_decades"] = math.log10(flat[-1] / flat[0]) if flat[0] > 0 and flat[-1] > 0 else None
    return figures


def held_out_figures(config: LoopedConfig, told: Told) -> dict[str, Any]:
    """Held-out losses after the last step, nats a token, and over the steps; none where nothing was held out."""
    if not told.held_out:
        return {}
    last, depth = told.held_out[-1], config.num_loops - 1
    return {
        "held_out_loss": last["loop_losses"][depth],
        "held_out_by_loop": last["loop_losses"],
        "bits_per_byte": last["bits_per_byte"][depth],
        "bits_per_byte_by_loop": last["bits_per_byte"],
        "best_loop": 1 + min(range(len(last["loop_losses"])), key=last["loop_losses"].__getitem__),
        "beyond_training": last["loop_losses"][-1] - last["loop_losses"][depth],
    }


def oscillation(values: Sequence[float]) -> float:
    """Standard deviation around the running mean, over the second half."""
    around = [
        value - fmean(values[max(0, i - SMOOTHING_STEPS) : i + SMOOTHING_STEPS + 1]) for i, value in enumerate(values)
    ]
    return pstdev(around[len(around) // 2 :])


def curve(steps: Sequence[dict[str, Any]], values: Sequence[float], most: int = 120) -> dict[str, list[float]]:
    """Values over steps, neighbours averaged until at most `most` points are left."""
    size = math.ceil(len(values) / most)
    groups = [slice(first, first + size) for first in range(0, len(values), size)]
    return {
        "x": [fmean(entry["step"] for entry in steps[group]) for group in groups],
        "y": [fmean(values[group]) for group in groups],
    }


def scaling_rows(told: Told) -> list[dict[str, Any]]:
    """Every held-out measurement with the tokens trained on before it and the mean exit pdf of that step."""
    by_step = {entry["step"]: entry for entry in told.steps}
    return [
        {"tokens": by_step[found["step"]]["tokens"], "loop_losses": found["loop_losses"],
         "exit_pdf": by_step[found["step"]]["exit_pdf"]}
        for found in told.held_out
        if found["step"] in by_step
    ]  # fmt: skip


def find(recipe: RunRecipe, run_dir: Path, measure: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """All figures of a trained cell: what the last stage that trains the language model has told, and what is
    measured of the finished model, whose gate a further stage may have trained."""
    model = load(stage_directory(run_dir, recipe.stages[-1]), dtype=torch.float32)
    config, told = model.model.config, read_telemetry(run_dir, language_stages(recipe)[-1].name)
    figures = {"seed": recipe.seed, **training_figures(config, told), **held_out_figures(config, told)}
    figures["scaling"] = scaling_rows(told)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    figures |= frontier_figures(model.eval(), tokenizer, recipe)
    if measure is not None:
        measured = import_named(measure)(model, tokenizer, **arguments)
        if taken := sorted(figures.keys() & measured.keys()):
            raise UserError(f"{measure} returns figures that every cell has already: {', '.join(taken)}. Rename them.")
        figures |= measured
    return figures


def train_and_measure(directory: Path) -> None:
    """Brings a cell to its end from wherever it was left; writes found.json. Raises what :func:`run` raises, and
    UserError where another process is at it."""
    job = read_object(directory / CELL, ("measure", "arguments"))
    if job is None:
        raise UserError(f"{directory} holds no cell of a study.")
    recipe, run_dir = load_recipe(directory / RECIPE), directory / RUN
    busy = f"another process is still training in {directory}; wait for it or end it, and run the study again"
    with disk_errors(directory), locked(directory, busy, PATIENCE_SECONDS):
        if (run_dir / RUN_RECIPE).exists() and (run_dir / "tokenizer").is_dir():
            # The run has its own copy, and the study may have been moved since.
            recipe = recipe.model_copy(update={"tokenizer": load_recipe(run_dir / RUN_RECIPE).tokenizer})
        run(recipe, run_dir, resume=True, console=Console(width=110))
        figures = find(recipe, run_dir, job["measure"], job["arguments"])
        write_whole(directory / FOUND, json.dumps(figures) + "\n")


def main(directory: Path) -> int:
    """The exit status: 0 when the cell is finished, the signal's when it was stopped, else 2 with the reason in
    failed.txt, where the disk takes it."""
    try:
        (directory / FAILED).unlink(missing_ok=True)
        train_and_measure(directory)
    except Interrupted as stop:
        return stop.exit_status
    except UserError as error:
        return _failed(directory, str(error))
    except Exception as error:  # whatever it was, the other cells go on, and the log has the traceback
        with suppress(OSError):
            traceback.print_exc()
        return _failed(directory, f"{type(error).__name__}: {error}")
    return 0


def _failed(directory: Path, reason: str) -> int:
    with suppress(OSError):
        write_whole(directory / FAILED, reason)
    return 2


def end_with(parent: int) -> None:
    """Stops this process, as SIGTERM does, when its parent is gone: a runner that is killed tells no cell to stop."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    sys.exit(main(Path(sys.argv[1])))
