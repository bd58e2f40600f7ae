"""A study's cells, each in a process of its own, as many at a time as the machine has room for.

    OUT/study.json        the study, preset and seeds, by which a rerun is known to be of the same study
    OUT/tokenizer/        trained once, where the base recipe trains one; OUT/tokens/ the tokenised data of all cells
    OUT/cells/NAME/       one cell (looplm.lab.study_cell), with its log.txt
    OUT/results.json, table.txt, plot.svg, runs.csv     what they have come to (looplm.lab.study_results)

A finished cell is read back. One that was stopped or killed goes on from its own last checkpoint, one that failed is
tried again from there, and neither keeps the others from running. One process at a time runs a study in a directory.
"""

import hashlib
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
from looplm.lab.study_cell import CELL, FAILED, RECIPE
from looplm.lab.study_files import FOUND, LOCK, disk_errors, locked, read_found, read_object, write_whole
from looplm.model.flops import count_parameters
from looplm.training.architectures import stage_configs, starting_config
from looplm.training.interrupt import StopSignals
from looplm.training.plan import plan_run
from looplm.training.recipe import LoadTokenizer, NewModel, RunRecipe, TrainTokenizer
from looplm.training.recipe_file import dump_recipe, parse_recipe

POLL_SECONDS = 0.2
LOG = "log.txt"
STUDY = "study.json"


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

    Raises UserError where `out` holds another study or this one with other settings, where another process runs it,
    and for a full disk; StudyStopped on Ctrl-C and SIGTERM, after the cells have saved.
    """
    console = console or Console(quiet=True)
    slots = slots_of_machine(processes)
    busy = f"Another process is running the study in {out}. Wait for it or stop it, or choose another one with --out."
    with disk_errors(out):
        make_directory(out)
        with locked(out, busy):
            check_directory(plan, out)
            return _run_pending(plan, slots, out, console)


def _run_pending(plan: Plan, slots: Sequence[Slot], out: Path, console: Console) -> dict[str, str]:
    pending = [cell for cell in plan.cells if read_found(out / "cells" / cell.name) is None]
    slots = slots[: max(1, len(pending))]
    console.print(
        f"{plan.name} ({plan.preset}): {len(plan.cells)} cells, {len(plan.cells) - len(pending)} finished before, "
        f"{len(slots)} at a time on {slots[0].environment['OMP_NUM_THREADS']} thread(s) each.", highlight=False
    )  # fmt: skip
    for cell in pending:
        if (file := out / "cells" / cell.name / FOUND).exists():
            console.print(f"{file} is damaged; the cell is measured again.", highlight=False, markup=False)
    if not pending:
        return {}
    prepare_cells(plan, pending, out, console)
    return _run_all(pending, slots, out, console)


# --- Before the first cell ------------------------------------------------------------------------------------------


def identity(plan: Plan) -> dict[str, Any]:
    """What a rerun must agree in; seeds may be added."""
    study = plan.study.model_dump(mode="json", include={"measure", "tokenizer"})
    return {"study": plan.name, "preset": plan.preset, **study}


def read_cell(path: Path) -> dict[str, Any] | None:
    """A cell.json; None where there is none. Raises UserError where it is damaged."""
    try:
        job = read_object(path, ("recipe",))
    except UserError:
        job = {"recipe": None}
    if job is not None and not isinstance(job["recipe"], str):
        raise UserError(f"{path} is damaged. Delete {path.parent}; the same command then trains that cell again.")
    return job


def make_directory(out: Path) -> None:
    """Raises UserError for a file, and for a directory of something else."""
    if out.exists():
        names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
        if names and not names & {STUDY, LOCK}:
            raise UserError(f"{out} is not empty and holds no study; choose another directory with --out.")
    out.mkdir(parents=True, exist_ok=True)


def check_directory(plan: Plan, out: Path) -> None:
    """Claims `out` for the study, or finds it there. Raises UserError for another one, and for damaged files."""
    held = read_object(out / STUDY, ("study", "preset"))
    if held is None:
        write_whole(out / STUDY, json.dumps(identity(plan), indent=1) + "\n")
    elif held != identity(plan):
        raise UserError(f"{out} holds the study {held['study']} ({held['preset']}); choose another one with --out.")
    for cell in plan.cells:
        path = out / "cells" / cell.name / CELL
        job = read_cell(path)
        if job is None and (path.parent / FOUND).exists():
            raise UserError(
                f"{path} is missing, and nothing else says what the figures beside it are of. Delete {path.parent}; "
                "the same command then trains that cell again."
            )
        # Not by their text, which grows with every setting that a later version knows.
        if job is not None and parse_recipe(job["recipe"], str(path)) != cell.recipe:
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
        write_whole(directory / RECIPE, dump_recipe(recipe))
        job = {
            "levels": cell.levels, "seed": cell.seed, "measure": plan.study.measure, "arguments": cell.arguments,
            "recipe": dump_recipe(cell.recipe),
        }  # fmt: skip
        write_whole(directory / CELL, json.dumps(job, indent=1) + "\n")


def with_tokenizer(plan: Plan, cell: Cell, out: Path) -> tuple[RunRecipe, Any]:
    """The cell's recipe with a tokenizer that is there, and the tokenizer: the task's own, or one that all cells with
    the same text and vocabulary share; as the recipe has it where it loads one."""
    from looplm.conversion.dense_source import any_tokenizer

    wanted = cell.recipe.tokenizer
    if plan.study.tokenizer is not None:
        where = (out / "cells" / cell.name / "tokenizer").resolve()
        made = import_named(plan.study.tokenizer)(**cell.arguments)
    elif isinstance(wanted, TrainTokenizer):
        data = cell.recipe.stages[0].data
        assert data is not None
        learnt_from = json.dumps([wanted.model_dump(mode="json"), data.model_dump(mode="json")["sources"]])
        where = (out / f"tokenizer-{hashlib.sha256(learnt_from.encode()).hexdigest()[:8]}").resolve()
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


def _run_all(pending: Sequence[Cell], slots: Sequence[Slot], out: Path, console: Console) -> dict[str, str]:
    """The reasons of those that failed."""
    waiting, free, failed = list(pending), list(slots), dict[str, str]()
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
                        reason = _why_failed(out / "cells" / name, process.returncode)
                        if reason is not None:
                            failed[name] = reason
                        how = "done in" if reason is None else "FAILED after"
                        line = f"{name}: {how} {time.monotonic() - began:.0f} s"
                        line += f": {reason}" if reason is not None else ""
                        console.print(f"{line} ({len(waiting) + len(running)} left)", highlight=False, markup=False,
                                      soft_wrap=True)  # fmt: skip
                time.sleep(POLL_SECONDS)
        finally:
            for process, _, _ in running.values():
                if process.poll() is None:
                    process.terminate()
                    process.wait()
    return failed


def _start(directory: Path, slot: Slot) -> "subprocess.Popen[bytes]":
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "looplm.lab.study_cell", str(directory), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | slot.environment,
        )  # fmt: skip


def _why_failed(directory: Path, status: int) -> str | None:
    """Why a process that has ended did not finish its cell; None where it did."""
    if read_found(directory) is not None:
        return None
    if status < 0:
        return f"its process was killed by signal {-status}"
    file = directory / FAILED
    reason = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    return reason or f"its process ended with status {status} and left no reason; see its {LOG}, if the disk took one"


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
