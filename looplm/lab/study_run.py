"""A study's cells, each in a process of its own, as many at a time as the machine has room for.

    OUT/study.json        the study, preset and seeds, by which a rerun is known to be of the same study
    OUT/tokenizer/        trained once, where the base recipe trains one; OUT/tokens/ the tokenised data of all cells
    OUT/cells/NAME/       one cell (looplm.lab.study_cell), with its log.txt
    OUT/results.json, table.txt, plot.svg, runs.csv     what they have come to (looplm.lab.study_results)

A finished cell is read back. One that was stopped or killed goes on from its own last checkpoint, one that failed is
tried again from there, and neither keeps the others from running.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from looplm.data.corpus import prepare, tokenizer_documents
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.hf.save import save_tokenizer
from looplm.lab.study import Cell, Plan, import_named
from looplm.lab.study_cell import CELL, FAILED, FOUND, RECIPE
from looplm.model.flops import count_parameters
from looplm.training.architectures import stage_configs, starting_config
from looplm.training.interrupt import StopSignals
from looplm.training.plan import plan_run
from looplm.training.recipe import LoadTokenizer, NewModel, RunRecipe, TrainTokenizer
from looplm.training.recipe_file import dump_recipe

POLL_SECONDS = 0.2
LOG = "log.txt"


class StudyStopped(KeyboardInterrupt):
    """A study left early because it was asked to; its cells have saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("Stopped; what the cells have done is saved.")
        self.exit_status = 128 + signal_number


@dataclass(frozen=True)
class Slot:
    """Where a cell runs: threads, and a GPU of its own if there are any."""

    environment: dict[str, str]


def slots_of_machine(processes: int | None) -> list[Slot]:
    """One slot a GPU, or one a CPU core, or `processes` of them that share the cores (and GPUs) evenly.

    OMP_NUM_THREADS, where it is set, is the most threads a process gets. Raises UserError for less than one process.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; a study needs at least one.")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = visible.split(",")[:count] if visible and count else [str(i) for i in range(count)]
    number = processes or len(gpus) or cores
    most = os.environ.get("OMP_NUM_THREADS", "")
    threads = str(max(1, min(cores // number, int(most) if most.isdecimal() else cores)))
    return [
        Slot({"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
             | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}))
        for i in range(number)
    ]  # fmt: skip


def run_study(
    plan: Plan, out: Path, *, processes: int | None = None, console: Console | None = None
) -> dict[str, str]:
    """Runs every cell that is not finished; returns the reason of each that failed, by its name.

    Raises UserError where `out` holds another study or this one with other settings; StudyStopped on Ctrl-C and
    SIGTERM, after the cells have saved.
    """
    console = console or Console(quiet=True)
    check_directory(plan, out)
    pending = [cell for cell in plan.cells if not (out / "cells" / cell.name / FOUND).exists()]
    slots = slots_of_machine(processes)[: max(1, len(pending))]
    console.print(
        f"{plan.name} ({plan.preset}): {len(plan.cells)} cells, {len(plan.cells) - len(pending)} finished before, "
        f"{len(slots)} at a time on {slots[0].environment['OMP_NUM_THREADS']} thread(s) each.", highlight=False
    )  # fmt: skip
    if pending:
        prepare_cells(plan, pending, out, console)
        _run_all(pending, slots, out, console)
    return {
        cell.name: _reason(out / "cells" / cell.name)
        for cell in plan.cells
        if not (out / "cells" / cell.name / FOUND).exists()
    }


# --- Before the first cell ------------------------------------------------------------------------------------------


def identity(plan: Plan) -> dict[str, Any]:
    """What a rerun must agree in; seeds may be added."""
    study = plan.study.model_dump(mode="json", include={"measure", "tokenizer"})
    return {"study": plan.name, "preset": plan.preset, **study}


def check_directory(plan: Plan, out: Path) -> None:
    """Claims `out` for the study, or finds it there. Raises UserError for anything else."""
    claimed = out / "study.json"
    if not claimed.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is not empty and holds no study; choose another directory with --out.")
        out.mkdir(parents=True, exist_ok=True)
        claimed.write_text(json.dumps(identity(plan), indent=1) + "\n", encoding="utf-8")
    elif (held := json.loads(claimed.read_text(encoding="utf-8"))) != identity(plan):
        raise UserError(f"{out} holds the study {held['study']} ({held['preset']}); choose another one with --out.")
    for cell in plan.cells:
        job = out / "cells" / cell.name / CELL
        if job.exists() and json.loads(job.read_text(encoding="utf-8"))["recipe"] != dump_recipe(cell.recipe):
            raise UserError(
                f"{out} holds this study with other values (see cell {cell.name}): a study's cells must differ in "
                "nothing but the grid and the seed. Choose another directory with --out."
            )


def prepare_cells(plan: Plan, cells: Sequence[Cell], out: Path, console: Console) -> None:
    """Writes what each cell reads: tokenizer and tokens, once for all that share them, then recipe.yaml and cell.json.

    Raises UserError for data that cannot be read.
    """
    tokens = (out / "tokens").resolve()
    for cell in cells:
        directory = out / "cells" / cell.name
        directory.mkdir(parents=True, exist_ok=True)
        recipe, tokenizer = with_tokenizer(plan, cell, out)
        recipe = recipe.model_copy(update={"data_cache": str(tokens)})
        for stage in recipe.stages:
            assert stage.data is not None  # the schema asks for it
            prepare(stage.data, tokenizer, tokens, say=lambda line: console.print(line, highlight=False, markup=False))
        (directory / RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
        job = {
            "levels": cell.levels, "seed": cell.seed, "measure": plan.study.measure, "arguments": cell.arguments,
            "recipe": dump_recipe(cell.recipe),
        }  # fmt: skip
        (directory / CELL).write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")


def with_tokenizer(plan: Plan, cell: Cell, out: Path) -> tuple[RunRecipe, Any]:
    """The cell's recipe with a tokenizer that is there, and the tokenizer: the task's own, or one that all cells with
    the same text and vocabulary share; as the recipe has it where it loads one."""
    from looplm.conversion.dense_source import any_tokenizer

    wanted = cell.recipe.tokenizer
    if plan.study.tokenizer is not None:
        where = (out / "cells" / cell.name / "tokenizer").resolve()
        made = import_named(plan.study.tokenizer)(**cell.arguments)
    elif isinstance(wanted, TrainTokenizer):
        where = (out / f"tokenizer-{wanted.vocab_size}").resolve()
        data = cell.recipe.stages[0].data
        assert data is not None
        made = None if where.exists() else train_tokenizer(
            (document.text for document in tokenizer_documents(data, wanted.max_bytes)), wanted.vocab_size
        )  # fmt: skip
    else:
        return cell.recipe, any_tokenizer(wanted.path)
    if made is not None and not where.exists():
        fresh = where.with_name(f".{where.name}")
        save_tokenizer(made, fresh)
        fresh.rename(where)
    tokenizer = any_tokenizer(str(where))
    recipe = with_vocabulary(cell.recipe, len(tokenizer))
    return recipe.model_copy(update={"tokenizer": LoadTokenizer(kind="load", path=str(where))}), tokenizer


def with_vocabulary(recipe: RunRecipe, vocab_size: int) -> RunRecipe:
    """The recipe with the model's vocabulary, where it leaves that to the tokenizer."""
    model = recipe.model
    if not isinstance(model, NewModel) or model.architecture.vocab_size is not None:
        return recipe
    architecture = model.architecture.model_copy(update={"vocab_size": vocab_size})
    return recipe.model_copy(update={"model": model.model_copy(update={"architecture": architecture})})


# --- Processes ------------------------------------------------------------------------------------------------------


def _run_all(pending: Sequence[Cell], slots: Sequence[Slot], out: Path, console: Console) -> None:
    waiting, free = list(pending), list(slots)
    running: dict[str, tuple[subprocess.Popen[bytes], Slot, float]] = {}
    with StopSignals() as signals:
        try:
            while waiting or running:
                while waiting and free and signals.received is None:
                    cell, slot = waiting.pop(0), free.pop(0)
                    running[cell.name] = (_start(out / "cells" / cell.name, slot), slot, time.monotonic())
                if signals.received is not None:
                    waiting.clear()
                    for process, _, _ in running.values():
                        process.terminate()  # SIGTERM, of which a second changes nothing: finish the step and save
                    for process, _, _ in running.values():
                        process.wait()
                    raise StudyStopped(signals.received)
                for name, (process, slot, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        free.append(slot)
                        left = len(waiting) + len(running)
                        _tell(out / "cells" / name, process.returncode, time.monotonic() - began, left, console)
                time.sleep(POLL_SECONDS)
        finally:
            for process, _, _ in running.values():
                if process.poll() is None:
                    process.terminate()
                    process.wait()


def _start(directory: Path, slot: Slot) -> "subprocess.Popen[bytes]":
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "looplm.lab.study_cell", str(directory)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | slot.environment,
        )  # fmt: skip


def _tell(directory: Path, status: int, seconds: float, left: int, console: Console) -> None:
    """One line for a process that has ended; where it left no reason, as after a kill, its status is one."""
    if (directory / FOUND).exists():
        line = f"{directory.name}: done in {seconds:.0f} s"
    else:
        if not (directory / FAILED).exists():
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            (directory / FAILED).write_text(f"its process {how}", encoding="utf-8")
        line = f"{directory.name}: FAILED after {seconds:.0f} s: {_reason(directory)}"
    console.print(f"{line} ({left} left)", highlight=False, markup=False, soft_wrap=True)


def _reason(directory: Path) -> str:
    file = directory / FAILED
    return file.read_text(encoding="utf-8") if file.exists() else "it was stopped; run the study again to go on"


# --- Plans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """What one cell will take, without running it."""

    num_parameters: int
    """Stored; without the gate at one loop."""
    core_parameters: int
    """Of the layers that loop, once."""
    num_loops: int
    num_tokens: int | None
    """None where the recipe counts in epochs."""
    flops: float | None


def planned_cells(plan: Plan) -> list[tuple[dict[str, str], PlannedCell]]:
    """Every place of the grid with what its first seed will take. Nothing is written."""
    found, vocabularies = [], {}
    for levels in plan.places:
        cell = next(cell for cell in plan.cells if cell.levels == levels)
        recipe = cell.recipe
        if plan.study.tokenizer is not None:
            key = json.dumps(cell.arguments)
            if key not in vocabularies:
                vocabularies[key] = len(import_named(plan.study.tokenizer)(**cell.arguments))
            recipe = with_vocabulary(recipe, vocabularies[key])
        whole, config = plan_run(recipe), stage_configs(recipe, starting_config(recipe))[-1]
        count = count_parameters(config)
        found.append((levels, PlannedCell(
            num_parameters=count.total_without_gate if config.num_loops == 1 else count.total,
            core_parameters=count.core,
            num_loops=config.num_loops,
            num_tokens=whole.num_tokens,
            flops=whole.flops,
        )))  # fmt: skip
    return found
