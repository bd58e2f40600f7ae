"""Documents kept whole: fitted into windows as bricks into a box, for conversations and other short documents."""

from collections.abc import Callable

import numpy as np

from looplm.data.packing import Row, TokenStream, as_row
from looplm.errors import UserError


class WholePacking:
    """Rows of whole documents: the longest first, each into the fullest row that still has room (best fit).

    A document longer than a row is cut into pieces; each piece after the first begins with the last token of the one
    before, so that every token is predicted once all the same. A piece in which nothing is to be predicted is left
    out. The rest of a row is padding with a document id of its own, never predicted.

    How many tokens of which length share a row is the same in every epoch, so an epoch has a fixed number of rows;
    which document fills which place of its length, and the order of the rows, is drawn anew.

    Args:
        stream: what is packed.
        seq_len: S, tokens a row.
        pad_id: the token of the padding.

    Raises:
        UserError: `seq_len` is below 2, or nothing in the stream is to be predicted.
    """

    def __init__(self, stream: TokenStream, seq_len: int, pad_id: int) -> None:
        if seq_len < 2:
            raise UserError(f"seq_len = {seq_len} is too short: a row needs one token to predict and one before.")
        self.stream = stream
        self.seq_len = seq_len
        self.pad_id = pad_id
        self._starts, self._lengths = self._cut_pieces()
        if len(self._starts) == 0:
            raise UserError("Nothing in the data is to be predicted: no document has two tokens and a response.")
        self._slots, self._row_begins = self._fit(np.sort(self._lengths)[::-1])

    @property
    def num_rows(self) -> int:
        """Rows an epoch."""
        return len(self._row_begins) - 1

    def epoch(self, key: tuple[int, ...]) -> Callable[[int], Row]:
        """See `packing.Packing.epoch`."""
        rng = np.random.default_rng(key)
        shuffled = rng.permutation(len(self._lengths))
        by_length = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        pieces = by_length[self._slots]
        order = rng.permutation(self.num_rows)

        def row(position: int) -> Row:
            begin, end = self._row_begins[order[position]], self._row_begins[order[position] + 1]
            return self._row(pieces[begin:end])

        return row

    def _cut_pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each piece starts in the stream, and its length (2 to S)."""
        starts = np.asarray(self.stream.document_starts, dtype=np.int64)
        lengths = np.diff(starts, append=self.stream.num_tokens)
        fits = lengths <= self.seq_len
        kept = fits & (lengths >= 2)
        piece_starts, piece_lengths = [starts[kept]], [lengths[kept]]
        for start, length in zip(starts[~fits], lengths[~fits], strict=True):
            cuts = np.arange(start, start + length - 1, self.seq_len - 1)
            ends = np.minimum(cuts + self.seq_len, start + length)
            wanted = [self._is_predicted(cut, end) for cut, end in zip(cuts, ends, strict=True)]
            piece_starts.append(cuts[wanted])
            piece_lengths.append((ends - cuts)[wanted])
        return np.concatenate(piece_starts), np.concatenate(piece_lengths)

    def _is_predicted(self, start: int, end: int) -> bool:
        if self.stream.predicted is None:
            return True
        return bool(self.stream.predicted[np.arange(start + 1, end)].any())

    def _fit(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Best fit of pieces whose lengths do not increase.

        Returns the pieces row by row, and where each row begins among them, with the end of the last one appended.
        """
        rows_with_room: list[list[int]] = [[] for _ in range(self.seq_len + 1)]
        rooms = 0  # bit r is set where some row has room for exactly r more tokens
        row_of_piece = np.empty(len(lengths), dtype=np.int64)
        num_rows = 0
        for piece, length in enumerate(lengths.tolist()):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, row = self.seq_len, num_rows
                num_rows += 1
            row_of_piece[piece] = row
            if room - length >= 2:  # a piece has two tokens at least
                rows_with_room[room - length].append(row)
                rooms |= 1 << (room - length)
        slots = np.argsort(row_of_piece, kind="stable")
        return slots, np.searchsorted(row_of_piece[slots], np.arange(num_rows + 1))

    def _row(self, pieces: np.ndarray) -> Row:
        input_ids = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        predicted = np.zeros(self.seq_len, dtype=bool)
        document_ids = np.full(self.seq_len, len(pieces), dtype=np.int64)
        filled = 0
        for number, piece in enumerate(pieces):
            length = int(self._lengths[piece])
            index = self._starts[piece] + np.arange(length)
            place = slice(filled, filled + length)
            input_ids[place] = self.stream.ids[index]
            predicted[place] = True if self.stream.predicted is None else self.stream.predicted[index]
            predicted[filled] = False
            document_ids[place] = number
            filled += length
        return as_row(input_ids, predicted, document_ids)
