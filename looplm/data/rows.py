"""The rows a run trains on: one global order, whatever the number of processes, continued exactly after a stop.

Row i of the global order goes to rank i modulo the number of ranks. Every rank goes through the whole order and cuts
only its own rows, which costs nothing for stored data; a streaming source is read and tokenised by every rank. That
price buys an order, and a saved position, that do not depend on how many ranks there are: two ranks see together what
one would have seen, and either continues the other's run.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from looplm.data.interleaving import Interleaving
from looplm.data.packing import Packing, RingPacking, Row, TokenStream
from looplm.errors import UserError


class RowSource(Protocol):
    """Endless rows of one source."""

    label: str

    @property
    def num_rows(self) -> int | None:
        """Rows an epoch; None where that is not known."""
        ...

    def identity(self) -> dict[str, str | int]:
        """What a saved state and this source must agree in."""
        ...

    def next_row(self) -> Row:
        """The next row."""
        ...

    def skip_row(self) -> None:
        """Pass over the next row."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class StoredSource:
    """Endless rows of tokenised documents in memory or in shards, shuffled anew every epoch.

    Args:
        label: for messages.
        packing: the documents, and how they are cut.
        key: (seed, number of the source), what shuffling depends on besides the epoch.
    """

    def __init__(self, label: str, packing: Packing, *, key: tuple[int, int]) -> None:
        self.label = label
        self.num_rows = packing.num_rows
        self._packing = packing
        self._key = key
        self._count = 0
        self._drawn: tuple[int, Any] | None = None  # the epoch that is open, and its rows

    def identity(self) -> dict[str, str | int]:
        """What a saved state and this source must agree in."""
        stream = self._packing.stream
        packing = type(self._packing).__name__
        return {"num_tokens": stream.num_tokens, "content": stream.content, "packing": packing}

    def next_row(self) -> Row:
        """The next row."""
        epoch, position = divmod(self._count, self.num_rows)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._packing.epoch((self._key[0], epoch, self._key[1])))
        self._count += 1
        return self._drawn[1](position)

    def skip_row(self) -> None:
        """Pass over the next row."""
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """Rows drawn so far."""
        return {"num_rows": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after them."""
        self._count = state["num_rows"]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_drawn": None}


class RowStream(IterableDataset):
    """Endless iterator over the rows of one rank, resumable to the row on any number of ranks.

    A row is a dict of int64 tensors (S,): `input_ids`; `labels`, the same ids unshifted as in transformers (position
    s - 1 predicts label s), IGNORE_INDEX where nothing is to be predicted; `document_ids`, which rise by 1 at each
    document: positions with different ids must not attend to each other.

    It may be handed to torchdata's `StatefulDataLoader(stream, batch_size=None, num_workers=0 or 1)`.

    Args:
        sources: what the rows come from.
        weights: share of each source in the rows. None: its own number of rows.
        seq_len: S.
        seed: of every shuffling; not negative.
        rank: of this process.
        world_size: number of processes.

    Raises:
        UserError: an argument is out of range, or a source of unknown size has no weight.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        weights: Sequence[float] | None,
        *,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if seed < 0:
            raise UserError(f"seed = {seed} must not be negative.")
        if not 0 <= rank < world_size:
            raise UserError(f"rank = {rank} must be at least 0 and below world_size = {world_size}.")
        sizes = [source.num_rows for source in sources]
        if weights is None and len(sources) > 1:
            if None in sizes:
                raise UserError("A streaming source has no known size: give every source a weight.")
            weights = [float(size) for size in sizes if size is not None]
        self.sources = list(sources)
        self.seq_len = seq_len
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._interleaving = Interleaving([1.0] if weights is None else weights)
        self._position = 0

    @classmethod
    def of_tokens(
        cls, stream: TokenStream, *, seq_len: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> "RowStream":
        """The rows of one stream of text in memory, cut as a ring."""
        source = StoredSource("tokens", RingPacking(stream, seq_len), key=(seed, 0))
        return cls([source], None, seq_len=seq_len, seed=seed, rank=rank, world_size=world_size)

    @property
    def position(self) -> int:
        """Rows drawn so far by all ranks together."""
        return self._position

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows after which every source has been read whole at least once; None if one of them is streaming.

        Without weights, or with one source, that is exactly one epoch of each.
        """
        longest = 0
        for source, weight in zip(self.sources, self._interleaving.weights, strict=True):
            if source.num_rows is None:
                return None
            longest = max(longest, math.ceil(source.num_rows / weight - 1e-6))  # weights are rounded numbers
        return longest

    @property
    def tokens_per_epoch(self) -> int | None:
        """Positions of an epoch, rows times seq_len; None if it is not known."""
        return None if self.rows_per_epoch is None else self.rows_per_epoch * self.seq_len

    def rows_per_source(self) -> dict[str, int]:
        """Rows drawn so far from each source, by all ranks together."""
        return dict(zip([source.label for source in self.sources], self._interleaving.counts, strict=True))

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise UserError("A RowStream is one sequence: read it with num_workers 0 or 1; more would repeat rows.")
        return self

    def __next__(self) -> Row:
        mine: Row = {}
        for rank in range(self.world_size):
            source = self.sources[self._interleaving.draw()]
            if rank == self.rank:
                mine = source.next_row()
            else:
                source.skip_row()
        self._position += self.world_size
        return mine

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand together, and what they must be continued with."""
        return {
            "position": self._position,
            "counts": list(self._interleaving.counts),
            "sources": {str(number): source.state_dict() for number, source in enumerate(self.sources)},
            "identity": self.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last row that `state` counts, of whatever number of ranks.

        Raises:
            UserError: the state belongs to other data, weights, row length or seed; the message says which.
        """
        here, there = self.identity(), state["identity"]
        changed = [
            f"{name} was {there.get(name, 'absent')} and is {here.get(name, 'absent')}"
            for name in dict.fromkeys([*there, *here])
            if there.get(name) != here.get(name)
        ]
        if changed:
            raise UserError(
                f"The data cannot be resumed where it was left: {', '.join(changed)}. "
                "Resume with the data, tokenizer, sequence length and seed the run was started with."
            )
        self._position = state["position"]
        self._interleaving.counts = list(state["counts"])
        for number, source in enumerate(self.sources):
            source.load_state_dict(state["sources"][str(number)])

    def identity(self) -> dict[str, str | int | float]:
        """What a state and a stream must agree in; the number of ranks is not part of it."""
        identity: dict[str, str | int | float] = {"seq_len": self.seq_len, "seed": self.seed}
        for number, (source, weight) in enumerate(zip(self.sources, self._interleaving.weights, strict=True)):
            prefix = f"source {number}: "
            if len(self.sources) > 1:
                identity[f"{prefix}weight"] = weight
            identity |= {f"{prefix}{name}": value for name, value in source.identity().items()}
        return identity
