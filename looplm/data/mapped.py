"""One long array that lies in several files, read through the page cache and never whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from looplm.errors import UserError


class MappedArray:
    """Raw little-endian numbers in files laid end to end, indexed by position like an array.

    Only the pages that are read come into memory. A pickled one (as for a data loader's worker) names its files
    instead of carrying their contents.

    Args:
        paths: the files, in order; none is empty.
        dtype: of the numbers.
        limit: they lie below it; indexing checks that.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype, limit: int | None = None) -> None:
        self.paths = list(paths)
        self.dtype = np.dtype(dtype)
        self.limit = limit
        self._open()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        """The numbers at these positions, in the shape of `index`.

        Raises:
            UserError: one of them is not below `limit`: the files are damaged.
        """
        found = self._at(index)
        if self.limit is not None and found.size and (largest := int(found.max())) >= self.limit:
            directory = self.paths[0].parent
            raise UserError(
                f"The tokens in {directory} are damaged: there is {largest} where every number is below {self.limit}. "
                f"Delete {directory}; its text is tokenised anew when the run is started or resumed."
            )
        return found

    def _at(self, index: np.ndarray) -> np.ndarray:
        file = np.searchsorted(self._ends, index, side="right")
        first, last = int(file.min()), int(file.max())
        if first == last:
            return np.asarray(self._maps[first][index - self._begins[first]])
        out = np.empty(index.shape, dtype=self.dtype)
        for number in range(first, last + 1):
            here = file == number
            out[here] = self._maps[number][index[here] - self._begins[number]]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Everything, in memory."""
        return np.concatenate(self._maps).astype(dtype or self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "dtype": self.dtype, "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"], state["dtype"], state["limit"])

    def _open(self) -> None:
        self._maps = [np.memmap(path, dtype=self.dtype.newbyteorder("<"), mode="r") for path in self.paths]
        self._ends = np.cumsum([len(part) for part in self._maps])
        self._begins = self._ends - [len(part) for part in self._maps]
