"""The exact per-loop cache of the engine: preallocated, with rows at different loops in one pass.

Loop r of a token reads the loop-r keys of earlier tokens. Keys lie at their absolute position in a row of their own
per (loop, slot), without padding, so that one indexed write stores the keys of rows at any mixture of loops. The
prelude runs once per position, and so does the coda, on the state at which a position is read out: one row per slot.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.inference.layout import Layout
from looplm.model.cache import LoopIndex
from looplm.model.config import LoopedConfig


class PerLoopKVCache:
    """Keys and values of `num_slots` requests of at most `max_len` positions at `num_loops` loops.

    Row `loop_idx * num_slots + slot` of a core layer holds one request at one loop; the last row takes what padding
    columns write and is never read. What lies beyond a request's own positions is zero: a masked key has weight 0,
    and 0 times the NaN of some earlier request would be NaN.
    """

    def __init__(
        self,
        config: LoopedConfig,
        *,
        num_slots: int,
        max_len: int,
        num_loops: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.num_slots = config, num_slots
        first_core = config.num_prelude_layers
        first_coda = first_core + config.num_hidden_layers
        self.loops_of_layer = [num_loops if first_core <= i < first_coda else 1 for i in range(config.num_layers)]

        def rows() -> list[Tensor]:
            shape = (max_len, config.num_key_value_heads, config.head_dim)
            return [torch.zeros(n * num_slots + 1, *shape, dtype=dtype, device=device) for n in self.loops_of_layer]

        self.keys, self.values = rows(), rows()

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all keys and values there is room for."""
        return sum(t.nbytes for t in self.keys) + sum(t.nbytes for t in self.values)

    def bytes_in_use(self, num_positions: int, position_loops: int) -> int:
        """Bytes that hold something: `num_positions` at prelude and coda, `position_loops` positions times loops."""
        config = self.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim * self.keys[0].element_size()
        once = (config.num_prelude_layers + config.num_coda_layers) * num_positions
        return per_layer * (once + config.num_hidden_layers * position_loops)

    def clear(self, slot: int, num_positions: int) -> None:
        """Zeroes what a request that held `slot` up to `num_positions` has left there."""
        for stored in (*self.keys, *self.values):
            stored[slot :: self.num_slots, :num_positions].zero_()

    def view(self, layout: Layout, loop_idx: LoopIndex) -> "CacheView":
        """The cache as one pass over `layout` sees it; `loop_idx` is 0 for prelude and coda."""
        return CacheView(self, layout, loop_idx)


class CacheView:
    """A :class:`~looplm.model.cache.KVCache` over some rows of a :class:`PerLoopKVCache`, for one pass.

    A query reads the keys of its row up to the longest row's length; the layout's mask hides those after itself.
    """

    def __init__(self, cache: PerLoopKVCache, layout: Layout, loop_idx: LoopIndex) -> None:
        self.cache, self.num_keys, self.positions = cache, layout.num_keys, layout.positions
        self.rows = loop_idx * cache.num_slots + layout.slots  # (B,)
        self.write_rows = self.rows[:, None]
        if layout.real is not None:
            self.write_rows = torch.where(layout.real, self.write_rows, -1)  # the last row
        # One row is read in place; several must be brought together.
        alone = len(layout.pieces) == 1 and isinstance(loop_idx, int)
        self.single_row = loop_idx * cache.num_slots + layout.pieces[0].slot if alone else None

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """Stores keys and values at the rows' positions and returns what they may read.

        The rows stand at the loops the view was made for; `loop_idx` is not looked at again.
        """
        return self._store(self.cache.keys[layer], keys), self._store(self.cache.values[layer], values)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        stored[self.write_rows, self.positions] = new
        if self.single_row is not None:
            return stored[self.single_row, : self.num_keys][None]
        return stored[:, : self.num_keys].index_select(0, self.rows)
