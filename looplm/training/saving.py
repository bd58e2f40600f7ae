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
from looplm.training.checkpoint import FRESH, clear_leftovers, publish, remove_older, root_cause
from looplm.training.distributed import Ranks
from looplm.training.recipe import CheckpointsRecipe

_TIMEOUT = timedelta(hours=2)
"""Ranks may finish writing far apart."""


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
        if ranks.is_main:
            clear_leftovers(root)
        ranks.barrier()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._join()

    def start(self, name: str, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
        """Copies `tensors` and begins to write them; waits for the write before. Both may change once it returns."""
        self._join()
        staged = BlockingAsyncStager().stage(tensors)
        self._failure = None
        # A daemon, so that a second Ctrl-C does not have to wait for it.
        self._thread = threading.Thread(
            target=self._write, args=(name, staged, progress), name=f"write {name}", daemon=True
        )
        self._thread.start()
        if not self.keep.asynchronous:
            self._join()

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
            except (Exception, CheckpointException) as caught:
                error = str(root_cause(caught))
            error = self._first_of(error)
        if error is None:
            error = self._on_main(lambda: self._complete(fresh, progress))
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
                error = str(root_cause(caught))
        return self._first_of(error)

    def _first_of(self, error: str | None) -> str | None:
        """The first rank's error, on all of them."""
        if self.ranks.world_size == 1:
            return error
        errors: list[str | None] = [None] * self.ranks.world_size
        dist.all_gather_object(errors, error, group=self._group)
        return next((found for found in errors if found is not None), None)
