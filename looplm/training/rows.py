"""Rows of training data as the trainer takes them: so many for a step, from a stream that can be resumed."""

import os
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

Batch = dict[str, Tensor]
"""input_ids, labels (unshifted, -100 where not predicted) and document_ids, int64 (B, S)."""

_PREFETCHED_ROWS = 64


class Rows(Protocol):
    """Endless rows. Of each step's rows, this process gets its share: row i goes to rank i % world_size."""

    def take(self, num_rows: int) -> Batch:
        """This rank's next `num_rows` rows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position in the rows of all ranks together, and what they are drawn from: JSON values, alike on each."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position, saved with any number of ranks. Raises UserError for other data."""
        ...


class LoadedRows:
    """The rows of a :class:`looplm.data.rows.RowStream`, read here or by a worker process beside the trainer.

    num_workers: 0, or 1 to read and tokenise ahead while the model computes. The rows are the same.
    """

    def __init__(self, stream: IterableDataset[Batch], num_workers: int = 0) -> None:
        self.stream, self.num_workers = stream, num_workers
        self._loader: StatefulDataLoader[Batch] | None = None
        self._rows: Iterator[Batch] | None = None

    def take(self, num_rows: int) -> Batch:
        """See :class:`Rows`."""
        if self._rows is None:
            self._loader = self._open()
            self._rows = iter(self._loader)
        rows = [next(self._rows) for _ in range(num_rows)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Rows`. A worker reads ahead: what counts is what was taken."""
        if self._loader is None or not self.num_workers:
            return self.stream.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        (worker,) = self._loader.state_dict()["_snapshot"]["_worker_snapshots"].values()
        return worker["dataset_state"] or worker["fetcher_state"]["dataset_iter_state"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Rows`."""
        self.stream.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._loader = self._rows = None  # begins again from the stream as it stands now

    def _open(self) -> "StatefulDataLoader[Batch]":
        with warnings.catch_warnings():
            # torchdata 0.11 still reports to a facility that torch 2.13 calls deprecated.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            return StatefulDataLoader(
                self.stream,
                batch_size=None,
                num_workers=self.num_workers,
                prefetch_factor=_PREFETCHED_ROWS if self.num_workers else None,
                worker_init_fn=_leave_terminal,
            )


def _leave_terminal(_worker: int) -> None:
    """Puts a worker out of reach of Ctrl-C: the trainer finishes its step first, and for that it needs its rows."""
    os.setsid()
