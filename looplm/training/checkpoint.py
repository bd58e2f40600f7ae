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
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.parent.mkdir(parents=True, exist_ok=True)
        with single_process():
            dcp.save(state, checkpoint_id=fresh)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UserError(f"The checkpoint {directory} could not be written: {error}. The previous one is kept.") from error


def load_state(directory: Path, state: dict[str, Any]) -> None:
    """Fills `state` in place from `directory`, or from the copy set aside if a kill came between two renames.

    Raises UserError when neither exists.
    """
    old = directory.with_name(directory.name + ".old")
    source = directory if directory.exists() else old
    if not source.exists():
        raise UserError(f"There is no checkpoint to resume at {directory}.")
    with single_process():
        dcp.load(state, checkpoint_id=source)
