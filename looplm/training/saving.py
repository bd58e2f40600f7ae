"""Writes checkpoints while training goes on: copy, then write from a thread, one at a time."""

import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from looplm.errors import UserError
from looplm.training.checkpoint import FRESH, clear_leftovers, list_checkpoints, publish, reason_of, remove_older
from looplm.training.checksums import write_checksums
from looplm.training.distributed import Ranks
from looplm.training.recipe import CheckpointsRecipe

_TIMEOUT = timedelta(hours=2)
"""Ranks may finish writing far apart."""

FAILURES_TO_STOP = 3
"""Saves that fail one after the other until the run stops: one may be bad luck, but nobody wants to train unsaved."""


class Saver:
    """The checkpoints of one stage in `run_dir/checkpoints`.

    Everything here is called by all ranks together. Enter it around a run; leaving waits for the write in flight,
    unless the run is left by an interrupt: then the write is given up, and the next start removes what is left of it.
    """

    def __init__(self, root: Path, stage_index: int, keep: CheckpointsRecipe, ranks: Ranks) -> None:
        self.root, self.stage_index, self.keep, self.ranks = root, stage_index, keep, ranks
        # Collectives of a thread need a group of their own, and one that works on the CPU.
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if ranks.grouped else None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._failures_in_a_row = 0
        if ranks.is_main:
            clear_leftovers(root)
        ranks.barrier()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._join()

    def start(self, name: str, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
        """Copies `tensors` and begins to write them; waits for the write before. Both may change once it returns.

        After a failure the next write is waited for. Raises UserError when that was the third in a row.
        """
        self._join()
        staged = BlockingAsyncStager().stage(tensors)
        self._failure = None
        # A daemon, so that a second Ctrl-C does not have to wait for it.
        self._thread = threading.Thread(
            target=self._write, args=(name, staged, progress), name=f"write {name}", daemon=True
        )
        self._thread.start()
        if self._failures_in_a_row or not self.keep.asynchronous:
            self._join()
            if self._failures_in_a_row >= FAILURES_TO_STOP:
                raise UserError(
                    f"{self.take_failure()} {self._failures_in_a_row} saves in a row have failed, so training stops: "
                    f"what was trained since the last complete checkpoint ({self._last_name()}) is lost."
                )

    def _last_name(self) -> str:
        found = list_checkpoints(self.root)
        return found[-1].directory.name if found else "there is none"

    def finish(self) -> None:
        """Waits until the checkpoint is complete. Raises UserError when it could not be written."""
        self._join()
        if (failure := self.take_failure()) is not None:
            raise UserError(failure)

    def take_failure(self) -> str | None:
        """Why the last write failed, once; None where it has not, or not yet."""
        if self._thread is not None and self._thread.is_alive():
            return None
        failure, self._failure = self._failure, None
        return failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, name: str, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
        """The thread: either the whole checkpoint under its name, or a message and no trace of it."""
        fresh = self.root / (FRESH + name)
        error = self._on_main(lambda: self._prepare(fresh))
        if error is None:
            try:
                dcp.save(tensors, checkpoint_id=fresh, process_group=self._group)  # pyright: ignore[reportPrivateImportUsage]
                write_checksums(fresh, self.ranks.rank)
            except (Exception, CheckpointException) as caught:
                error = reason_of(caught)
            error = self._first_of(error)
        if error is None:
            error = self._on_main(lambda: self._complete(fresh, progress))
        self._failures_in_a_row = 0 if error is None else self._failures_in_a_row + 1
        if error is not None:
            self._on_main(lambda: shutil.rmtree(fresh, ignore_errors=True))
            self._failure = (
                f"The checkpoint {self.root / name} could not be written: {error}. Those before it are kept: make "
                "room or choose another run directory, and resume."
            )

    def _prepare(self, fresh: Path) -> None:
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(parents=True)

    def _complete(self, fresh: Path, progress: dict[str, Any]) -> None:
        publish(fresh, progress)
        remove_older(self.root, self.stage_index, self.keep)

    def _on_main(self, function: Any) -> str | None:
        """Runs a function on rank 0; every rank is told what went wrong there."""
        error = None
        if self.ranks.is_main:
            try:
                function()
            except Exception as caught:
                error = reason_of(caught)
        return self._first_of(error)

    def _first_of(self, error: str | None) -> str | None:
        """The first rank's error, on all of them."""
        if self.ranks.world_size == 1:
            return error
        errors: list[str | None] = [None] * self.ranks.world_size
        dist.all_gather_object(errors, error, group=self._group)
        return next((found for found in errors if found is not None), None)
