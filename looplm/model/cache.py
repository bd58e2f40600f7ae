"""Keys and values of earlier positions, kept apart for every loop: the exact per-loop cache.

Loop r of a token reads the loop-r keys of earlier tokens (Ouro, released code: slot r * L + l), so a
looped model needs R * L slots where a dense one needs L. Prelude layers run once; coda layers run on
the state that is read out, so a forward that reads every loop keeps them per loop too.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.model.config import LoopedConfig

LoopIndex = int | Int[Tensor, " B"]
"""Loop of a core application, 0-based: one for all rows, or one for each row."""


@runtime_checkable
class KVCache(Protocol):
    """What attention needs of a cache. Layers count prelude, core, coda, in that order."""

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """Stores this pass's keys (after RoPE) and values and returns all that its queries may read."""
        ...


@runtime_checkable
class SequenceCache(KVCache, Protocol):
    """A cache whose rows all stand at the same position, as a plain forward over a batch needs."""

    @property
    def seq_len(self) -> int:
        """Positions stored so far."""
        ...


def cache_slot(config: LoopedConfig, layer: int, loop_idx: int) -> int:
    """Index of (layer, loop) in a flat list of slots: prelude first, then core and coda of each loop in turn.

    Without prelude and coda this is Ouro's `loop_idx * L + layer`.
    """
    if layer < config.num_prelude_layers:
        return layer
    return layer + loop_idx * (config.num_hidden_layers + config.num_coda_layers)


class GrowingKVCache:
    """The exact cache in its plainest form: one growing tensor a slot, every row and loop in step.

    For reading and testing; the engine has its own preallocated cache with rows at different loops.
    """

    def __init__(self, config: LoopedConfig) -> None:
        self.config = config
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def seq_len(self) -> int:
        """Positions stored so far."""
        return self.keys[0].shape[1] if self.keys else 0

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """See :class:`KVCache`; `loop_idx` must be an int here."""
        if not isinstance(loop_idx, int):
            raise TypeError("GrowingKVCache holds every row at the same loop; loop_idx must be an int.")
        slot = cache_slot(self.config, layer, loop_idx)
        if slot in self.keys:
            keys = torch.cat((self.keys[slot], keys), dim=1)
            values = torch.cat((self.values[slot], values), dim=1)
        self.keys[slot], self.values[slot] = keys, values
        if keys.shape[1] != self.seq_len:  # slot 0 is the first that a pass updates
            raise UserError(
                f"Loop {loop_idx + 1} of the cache holds {keys.shape[1]} positions, loop 1 holds {self.seq_len}: "
                "an earlier call ran fewer loops. Run every call on one cache at the same num_loops."
            )
        return keys, values
