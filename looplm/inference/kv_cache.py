"""The engine's caches: preallocated, with rows at different loops in one pass, and five ways to keep keys.

Keys and values of a core layer lie in sets of `stride` rows, one row per place (`looplm.inference.blocks`), so that
one indexed write stores the keys of rows at any mixture of loops. Which sets a loop reads and writes, and what becomes
of them once a position leaves the loop, is the strategy (Ouro 5.4.2, table 14, and the design's own `fill`):

    per_loop   a set per loop; loop r reads loop r. A position that leaves early is computed deeper when needed: exact
    fill       a set per loop; missing deeper keys are those of the deepest loop that was executed
    last       one set: the deepest executed loop's
    mean       one set: the average over executed loops
    first      one set: loop 1's

In the last three, loop r reads the kept set of earlier positions and its own loop-r keys at those of this pass, which
overwrite one another in the kept set until the position leaves; `mean` and `first` gather in a second set meanwhile.
A prompt goes through each loop as a whole before the next, so the same two sets serve it too.

The prelude runs once per position, and so does the coda, on the state at which a position is read out: one set each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.inference.native import Rows
from looplm.model.cache import LoopIndex
from looplm.model.config import LoopedConfig
from looplm.model.flops import CacheStrategy

SHARED: tuple[CacheStrategy, ...] = ("last", "mean", "first")
"""Strategies that keep one set for all loops."""


def num_sets(strategy: CacheStrategy, num_loops: int) -> int:
    """Sets of keys and values that positions of up to `num_loops` loops need."""
    if strategy in SHARED:
        return 1 if strategy == "last" or num_loops == 1 else 2
    return num_loops


class Places(NamedTuple):
    """Where the positions of one pass lie."""

    write: Int[Tensor, "B S"]
    """Place of every column; the trash place at padding."""
    read: Int[Tensor, "B M"] | None
    """Place of every position that a row may read, the zero place beyond its end; None where `run` says it."""
    run: slice | None
    """The places of a single row whose positions lie side by side: they are read without being brought together."""
    rows: Rows | None = None
    """Single positions that kernels store and read where they lie; `read` and `run` are None then."""


class KVCache:
    """Keys and values at `num_places` places, of all layers.

    Two more places stand behind them in every set: one that is never written, for what a row reads beyond its end (a
    masked key has weight 0, and 0 times the NaN of some other request would be NaN), and one for what padding writes.
    """

    def __init__(
        self,
        config: LoopedConfig,
        strategy: CacheStrategy,
        *,
        num_places: int,
        num_loops: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.strategy: CacheStrategy = strategy
        self.num_places, self.num_loops = num_places, num_loops
        self.num_sets = num_sets(strategy, num_loops)
        self.stride = num_places + 2
        first_core = config.num_prelude_layers
        self.core = range(first_core, first_core + config.num_hidden_layers)
        sets = [self.num_sets if i in self.core else 1 for i in range(config.num_layers)]
        shape = (config.num_key_value_heads, config.head_dim)
        self.keys = [torch.zeros(n * self.stride, *shape, dtype=dtype, device=device) for n in sets]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    @property
    def zero_place(self) -> int:
        """Is read and never written."""
        return self.num_places

    @property
    def trash_place(self) -> int:
        """Is written and never read."""
        return self.num_places + 1

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all keys and values there is room for."""
        return sum(t.nbytes for t in self.keys) + sum(t.nbytes for t in self.values)

    def bytes_in_use(self, num_positions: int, position_sets: int) -> int:
        """Bytes that hold something: `num_positions` at prelude and coda, `position_sets` positions times sets."""
        config = self.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim * self.keys[0].element_size()
        once = (config.num_prelude_layers + config.num_coda_layers) * num_positions
        return per_layer * (once + config.num_hidden_layers * position_sets)

    def view(self, places: Places, loop_idx: LoopIndex) -> "CacheView":
        """The cache as one pass sees it; `loop_idx` is 0 for prelude and coda."""
        return CacheView(self, places, loop_idx)

    def settle(self, places: Sequence[int], loops: Sequence[int]) -> None:
        """Keys of positions that have left the loop, after loop 1 to R each, become what later positions read."""
        if self.strategy in ("per_loop", "last") or not places:
            return
        device = self.keys[0].device
        if self.strategy == "fill":
            moves = [
                ((loop - 1) * self.stride + place, deeper * self.stride + place)
                for place, loop in zip(places, loops, strict=True)
                for deeper in range(loop, self.num_loops)
            ]
        elif self.num_sets == 2:
            moves = [(self.stride + place, place) for place in places]
        else:
            return
        if not moves:
            return
        source, target = torch.tensor(moves, device=device).T
        for layer in self.core:
            for stored in (self.keys[layer], self.values[layer]):
                stored[target] = stored[source]

    def copy_from(self, other: "KVCache") -> None:
        """Takes over what a smaller cache of the same strategy holds, place for place and set for set."""
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            for index in range(len(theirs) // other.stride):
                start, old = index * self.stride, index * other.stride
                mine[start : start + other.num_places] = theirs[old : old + other.num_places]
        if self.strategy in SHARED and other.num_sets < self.num_sets:
            # There was one loop, and its keys are what the second set would have gathered of a prompt half-way.
            for layer in self.core:
                for stored in (self.keys[layer], self.values[layer]):
                    stored[self.stride : self.stride + other.num_places] = stored[: other.num_places]


class CacheView:
    """A :class:`~looplm.model.cache.KVCache` over some rows of the engine's cache, for one pass.

    A query reads the keys of its row up to the longest row's length; the layout's mask hides those after itself. With
    `rows`, kernels store and read in place instead (:mod:`looplm.inference.native_block`).
    """

    def __init__(self, cache: KVCache, places: Places, loop_idx: LoopIndex) -> None:
        self.cache, self.places, self.loop_idx = cache, places, loop_idx
        per_loop = cache.strategy not in SHARED
        self.loops = loop_idx if isinstance(loop_idx, int) else loop_idx[:, None]
        offset = self.loops * cache.stride if per_loop else 0
        self.write = places.write + offset  # (B, S)
        self.rows = places.rows
        self.run = self.read = None
        if places.run is not None:
            assert isinstance(offset, int)
            self.run = slice(places.run.start + offset, places.run.stop + offset)
        elif places.read is not None:
            self.read = (places.read + offset).flatten()

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """Stores keys and values at the rows' positions and returns what they may read.

        The rows stand at the loops the view was made for; `loop_idx` is not looked at again.
        """
        stored = self.stored(layer)
        for kept, new in zip(stored, (keys, values), strict=True):
            kept[self.write] = new
        self.gather(layer)
        return self._read(stored[0]), self._read(stored[1])

    def stored(self, layer: int) -> tuple[Float[Tensor, "N K d"], Float[Tensor, "N K d"]]:
        """All keys and all values of a layer."""
        return self.cache.keys[layer], self.cache.values[layer]

    def _read(self, stored: Tensor) -> Tensor:
        if self.run is not None:
            return stored[self.run][None]
        assert self.read is not None
        return stored.index_select(0, self.read).unflatten(0, (len(self.write), -1))

    def gather(self, layer: int) -> None:
        """Brings the second set of a layer, where there is one, up to the loop whose keys have just been stored."""
        if self.cache.num_sets == 2 and self.cache.strategy in SHARED and layer in self.cache.core:
            for stored in self.stored(layer):
                self._gather(stored, stored[self.write])

    def _gather(self, stored: Tensor, new: Tensor) -> None:
        """The mean over loops so far, or loop 1."""
        at = self.write + self.cache.stride
        if isinstance(self.loops, int):
            if self.loops == 0:
                stored[at] = new
            elif self.cache.strategy == "mean":
                stored[at] += (new - stored[at]) / (self.loops + 1)
            return
        so_far, loops = stored[at], self.loops[..., None, None]
        if self.cache.strategy == "mean":
            so_far = so_far + (new - so_far) / (loops + 1)
        # Not by weight: what an earlier request has left there may be NaN.
        stored[at] = torch.where(loops == 0, new, so_far)
