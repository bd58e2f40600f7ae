"""Resumable training state in PyTorch's distributed checkpoint format, swapped in atomically.

DCP uses pickle inside: resume your own runs only. What is meant for others is the safetensors directory
that :mod:`looplm.hf.save` writes.
"""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from looplm.errors import UserError


@contextmanager
def single_process() -> Iterator[None]:
    """DCP warns whenever it runs without a process group, which is what a laptop does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Writes `state` beside `directory` and renames it into place: a kill leaves the old state or the new one.

    Raises UserError when the disk is full or the directory cannot be written; the previous state then stands.
    """
    fresh, old = directory.with_name(directory.name + ".new"), directory.with_name(directory.name + ".old")
    try:
        if old.exists() and not directory.exists():
            old.rename(directory)  # killed between the renames below: what was set aside is the only state there is
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.parent.mkdir(parents=True, exist_ok=True)
        with single_process():
            dcp.save(state, checkpoint_id=fresh)  # pyright: ignore[reportPrivateImportUsage]
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UserError(
            f"The checkpoint {directory} could not be written: {_root(error)}. The previous one, if there was any, "
            "is kept: make room or choose another run directory, and resume."
        ) from error


def load_state(directory: Path, state: dict[str, Any]) -> None:
    """Fills `state` in place from `directory`, or from the copy set aside if a kill came between two renames.

    Raises UserError when neither exists, and when what is there is damaged or of another shape than `state`.
    """
    old = directory.with_name(directory.name + ".old")
    source = directory if directory.exists() else old
    if not source.exists():
        raise UserError(f"There is no checkpoint to resume at {directory}.")
    try:
        with single_process():
            dcp.load(state, checkpoint_id=source)  # pyright: ignore[reportPrivateImportUsage]
    except (OSError, CheckpointException) as error:
        raise UserError(
            f"The checkpoint {source} does not fit this run: {_root(error)}. Resume with the model and optimizer it "
            "was saved from, or start again without it."
        ) from error


def _root(error: BaseException) -> Exception:
    """What went wrong at first: DCP wraps it, and a write that fails then fails again while closing the file.

    DCP wraps Ctrl-C too; that is raised again.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__context__ is not None:
        error = error.__context__
    if not isinstance(error, Exception):
        raise error
    return error
