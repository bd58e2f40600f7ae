"""Sources that are tokenised while training: block by block, each block packed and shuffled as if it were an epoch.

A block is `block_tokens` tokens or a little more, read in order and tokenised. Its rows come from the same packing as
those of stored data, so within a block nothing is lost, and where it stands is four numbers and the position of its
first record: resuming reads one block again and goes on in the middle of it.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from looplm.data.encoding import GROUP_SIZE, EncodedDocument, Encoder, in_memory
from looplm.data.formats import Record
from looplm.data.packing import Packing, Row, TokenStream
from looplm.errors import UserError


class ResumableRecords(Protocol):
    """One pass over the records of a source."""

    def __iter__(self) -> Iterator[Record]: ...

    def __next__(self) -> Record: ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: a few numbers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class StreamedSource:
    """Endless rows of a source that is read again and again, from its start to its end.

    Args:
        label: for messages.
        open_records: begins a pass.
        encoder: tokenises records.
        pack: packs a block.
        key: (seed, number of the source), what shuffling depends on besides epoch and block.
        block_tokens: the least size of a block, but for the last of a pass.
        identity: what a resumed run must agree in.
    """

    num_rows = None
    """Rows an epoch: not known."""

    def __init__(
        self,
        label: str,
        open_records: Callable[[], ResumableRecords],
        encoder: Encoder,
        pack: Callable[[TokenStream], Packing],
        *,
        key: tuple[int, int],
        block_tokens: int,
        identity: dict[str, str | int],
    ) -> None:
        self.label = label
        self._open_records = open_records
        self._encoder = encoder
        self._pack = pack
        self._key = key
        self._block_tokens = block_tokens
        self._identity = identity
        self._move_to(epoch=0, block=0, row=0, records=None)

    @property
    def num_dropped(self) -> int:
        """Documents that decontamination has left out so far."""
        return self._encoder.decontamination.num_dropped if self._encoder.decontamination else 0

    def identity(self) -> dict[str, str | int]:
        """What a saved state and this source must agree in."""
        return self._identity

    def next_row(self) -> Row:
        """The next row.

        Raises:
            UserError: a record cannot be used, or the source holds none.
        """
        rows = self._fill()
        self._row += 1
        return rows(self._row - 1)

    def skip_row(self) -> None:
        """Pass over the next row: as `next_row`, without cutting it."""
        self._fill()
        self._row += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands; small whatever the block's size."""
        return {
            "epoch": self._epoch,
            "block": self._block,
            "row": self._row,
            "records": self._block_start,
            "num_dropped": self._dropped_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last row that `state` counts."""
        if self._encoder.decontamination:
            self._encoder.decontamination.num_dropped = state["num_dropped"]
        self._move_to(state["epoch"], state["block"], state["row"], state["records"])

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to the process: the open pass and the block, which are made again."""
        return {"state": self.state_dict(), **{k: v for k, v in vars(self).items() if k in _ARGUMENTS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("state")
        vars(self).update(state)
        self.load_state_dict(position)

    def _move_to(self, epoch: int, block: int, row: int, records: dict[str, Any] | None) -> None:
        self._epoch, self._block, self._row = epoch, block, row
        self._block_start = records
        self._dropped_before = self.num_dropped
        self._records: ResumableRecords | None = None
        self._rows: Callable[[int], Row] | None = None
        self._num_rows = 0
        self._ended = False

    def _fill(self) -> Callable[[int], Row]:
        """The rows of the block that holds the next row."""
        rows = self._load_block() if self._rows is None else self._rows
        while self._row >= self._num_rows:
            if not self._ended:
                self._block += 1
            elif self._block == 0 and self._num_rows == 0:
                raise UserError(f"{self.label} holds no documents to train on: all are empty or left out.")
            else:
                self._epoch, self._block, self._records, self._block_start = self._epoch + 1, 0, None, None
            self._row = 0
            rows = self._load_block()
        return rows

    def _load_block(self) -> Callable[[int], Row]:
        if self._records is None:
            self._records = self._open_records()
            if self._block_start is not None:
                self._records.load_state_dict(self._block_start)
        self._block_start = self._records.state_dict()
        self._dropped_before = self.num_dropped
        documents: list[EncodedDocument] = []
        num_tokens = 0
        self._ended = False
        while num_tokens < self._block_tokens and not self._ended:
            group = list(islice(self._records, GROUP_SIZE))
            self._ended = len(group) < GROUP_SIZE
            encoded = self._encoder.encode_group(group)
            documents += encoded
            num_tokens += sum(len(document.ids) for document in encoded)
        if not documents:
            self._rows, self._num_rows = _no_row, 0
            return self._rows
        packing = self._pack(in_memory(documents, self._encoder.dtype))
        seed, source = self._key
        self._rows, self._num_rows = packing.epoch((seed, self._epoch, source, self._block)), packing.num_rows
        return self._rows


_ARGUMENTS = frozenset({"label", "_open_records", "_encoder", "_pack", "_key", "_block_tokens", "_identity"})


def _no_row(position: int) -> Row:
    raise IndexError(position)
