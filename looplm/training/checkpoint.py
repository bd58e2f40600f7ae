"""Checkpoints to resume from: one directory each, complete or not there at all.

    run_dir/checkpoints/<stage index>-<stage name>-<step>/
        *.distcp, .metadata     parameters and optimizer state in PyTorch's distributed checkpoint format, written and
                                read by any number of processes
        checksums-<rank>.json   digests of the files that each rank wrote
        progress.json           everything else: steps, position in the data, what the watches have seen

What is being written lies beside them as `.tmp-...` until it is renamed. DCP uses pickle inside: resume your own runs
only. What is meant for others is the safetensors directory that :mod:`looplm.hf.save` writes.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from looplm.errors import UserError
from looplm.training.checksums import find_damage, write_digests
from looplm.training.distributed import Ranks
from looplm.training.recipe import CheckpointsRecipe

PROGRESS_FILE = "progress.json"
PROGRESS_TYPES: dict[str, Any] = {
    "stage": str, "stage_index": int, "step": int, "tokens": int, "seconds": (int, float),
    "held_out_loss": (int, float, type(None)), "watch": dict, "alarm": dict, "data": dict, "forward_rows": list,
}  # fmt: skip
"""What resuming needs of it."""
FRESH, ASIDE = ".tmp-new-", ".tmp-old-"
"""Being written; set aside for a moment while another takes its name."""

_NAME = re.compile(r"(\d+)-(.+)-(\d{8,})")
_ABSENT = object()
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint on disk. They sort in the order of training."""

    stage_index: int
    """0-based."""
    step: int
    """Optimizer steps of the stage that are done."""
    stage: str
    directory: Path

    def progress(self) -> dict[str, Any]:
        """What progress.json says, whole. Raises UserError where it cannot be read or lacks something."""
        progress = self._read_progress()
        for name, kind in PROGRESS_TYPES.items():
            if not isinstance(progress.get(name, _ABSENT), kind):
                raise damaged(self.directory, f"{PROGRESS_FILE} has no {name} that can be used")
        return progress

    def held_out_loss(self) -> float | None:
        """What was measured at its step; None where nothing was, or it cannot be read."""
        try:
            return self._read_progress().get("held_out_loss")
        except UserError:  # damaged since: no reason to fail the save that looks for the best
            return None

    def is_diverging(self) -> bool:
        """Whether it was saved by a stop for divergence or among steps left out: its parameters may be spoilt."""
        try:
            return self._read_progress().get("diverging", False)  # an older version did not say
        except UserError:
            return False

    def _read_progress(self) -> dict[str, Any]:
        try:
            progress = json.loads((self.directory / PROGRESS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(self.directory, reason_of(error)) from error
        if not isinstance(progress, dict):
            raise damaged(self.directory, f"{PROGRESS_FILE} is no JSON object")
        return progress


def checkpoint_name(stage_index: int, stage: str, step: int) -> str:
    """Name of a checkpoint's directory."""
    return f"{stage_index}-{stage}-{step:08d}"


def read_name(directory: Path) -> Checkpoint | None:
    """The checkpoint in a directory of that name, or None where the name is none of a checkpoint."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        return None
    return Checkpoint(int(match[1]), int(match[3]), match[2], directory)


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints in `run_dir/checkpoints`, in the order of training."""
    if not root.is_dir():
        return []
    found = [read_name(directory) for directory in root.iterdir() if directory.is_dir()]
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def latest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The one to resume from: of the latest step of the latest stage, or None where there is none."""
    return max(list_checkpoints(run_dir / "checkpoints"), default=None)


def best_checkpoint(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest held-out loss, the later of equals; None where none was measured and can be read."""
    measured: list[tuple[float, Checkpoint]] = []
    for checkpoint in checkpoints:
        if (loss := checkpoint.held_out_loss()) is not None:
            measured.append((loss, checkpoint))
    return min(measured, key=lambda pair: (pair[0], -pair[1].step))[1] if measured else None


def clear_leftovers(root: Path) -> None:
    """Removes what a killed process left half-written, and puts back what it had set aside."""
    for aside in root.glob(ASIDE + "*"):
        home = root / aside.name.removeprefix(ASIDE)
        if not home.exists():
            aside.rename(home)
    for leftover in (*root.glob(FRESH + "*"), *root.glob(ASIDE + "*")):
        shutil.rmtree(leftover)


def publish(fresh: Path, progress: dict[str, Any]) -> Path:
    """Completes a freshly written directory and gives it its name, all of it on disk before. Returns where it is."""
    root, home = fresh.parent, fresh.with_name(fresh.name.removeprefix(FRESH))
    with (fresh / PROGRESS_FILE).open("w", encoding="utf-8") as file:
        json.dump(progress, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    write_digests(fresh, "progress", [fresh / PROGRESS_FILE])
    _sync_directory(fresh)
    aside = root / (ASIDE + home.name)
    if home.exists():
        home.rename(aside)
    fresh.rename(home)
    _sync_directory(root)
    shutil.rmtree(aside, ignore_errors=True)
    return home


def _sync_directory(directory: Path) -> None:
    """Makes the names in a directory last through a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_older(root: Path, stage_index: int, keep: CheckpointsRecipe) -> None:
    """Of one stage, keeps the last checkpoints and the best one. Other stages' are left alone.

    Those saved while the run diverges do not count among the last: only the newest checkpoint may be one, beside them.
    """
    of_stage = [checkpoint for checkpoint in list_checkpoints(root) if checkpoint.stage_index == stage_index]
    sound = [checkpoint for checkpoint in of_stage if not checkpoint.is_diverging()]
    kept = {*sound[-keep.keep_last :], *of_stage[-1:]}
    best = best_checkpoint(of_stage) if keep.keep_best else None
    for checkpoint in of_stage:
        if checkpoint not in kept and checkpoint != best:
            # Renamed first: a kill while removing must not leave half of it under a complete one's name.
            doomed = root / (FRESH + checkpoint.directory.name)
            checkpoint.directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_stages_before(run_dir: Path, stage_index: int) -> None:
    """Removes the checkpoints of earlier stages, for when what they led to is saved elsewhere."""
    root = run_dir / "checkpoints"
    for checkpoint in list_checkpoints(root):
        if checkpoint.stage_index < stage_index:
            doomed = root / (FRESH + checkpoint.directory.name)
            checkpoint.directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def quiet_alone() -> Iterator[None]:
    """DCP warns at every save and load without a process group, which is what a laptop does.

    To be entered in the main thread: a writing thread's own filter would race with those of the main thread.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


# --- Tensors --------------------------------------------------------------------------------------------------------


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Parameters and optimizer state by name, sharded or whole as they are; not copied.

    The optimizer's hyperparameters stay out: they are the recipe's, which may change between runs.
    """
    parameters, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    moments = {name: value for name, value in optimizer_state.items() if name.startswith("state.")}
    return {"model": parameters, "optimizer": moments}


def load_tensors(directory: Path, model: nn.Module, optimizer: Any) -> None:
    """Fills parameters and optimizer state from a checkpoint, written by however many processes.

    Raises UserError when it is damaged, or of another model or of other trainable parameters; nothing is loaded then.
    """
    parameters, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    state = tensors_of(model, optimizer)
    if (damage := find_damage(directory, Ranks.current())) is not None:
        raise damaged(directory, damage)
    try:
        _check_names(directory, state)
        dcp.load(state, checkpoint_id=directory)  # pyright: ignore[reportPrivateImportUsage]
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # whatever unpickling half a file ends in
        raise damaged(directory, reason_of(error)) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parameters | state["model"],
        optim_state_dict=optimizer_state | state["optimizer"],
        options=_OPTIONS,
    )


def _check_names(directory: Path, state: dict[str, Any]) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    there = set(metadata.state_dict_metadata)
    here = {f"{part}.{name}" for part, tensors in state.items() for name in tensors}
    if there == here:
        return
    lacking, surplus = sorted(here - there), sorted(there - here)
    differences = [
        f"{what} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for what, names in (("it lacks", lacking), ("it holds besides", surplus))
        if names
    ]
    raise UserError(
        f"The checkpoint {directory} does not fit this run: {'; '.join(differences)}. Resume with the model and the "
        "trainable parameters it was saved from."
    )


def damaged(directory: Path, reason: str) -> UserError:
    """What to tell of a checkpoint that cannot be read."""
    others = [found.directory.name for found in list_checkpoints(directory.parent) if found.directory != directory]
    then = f"the run goes on from {others[-1]}" if others else "there is no other checkpoint, so the run begins anew"
    return UserError(
        f"The checkpoint {directory} cannot be read into this run: {reason}. It is damaged or incomplete. Delete "
        f"{directory} and resume: {then}."
    )


def reason_of(error: BaseException) -> str:
    """What went wrong at first, in words also where the error has none."""
    cause = root_cause(error)
    return str(cause) or f"a file is cut short or overwritten ({type(cause).__name__})"


def root_cause(error: BaseException) -> BaseException:
    """What went wrong at first: DCP wraps it, and a write that fails then fails again while closing the file."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return error
