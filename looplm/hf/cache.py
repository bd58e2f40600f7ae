"""transformers' DynamicCache, used as the exact per-loop cache: one of its layers for each of our R * L slots."""

from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from looplm.errors import UserError
from looplm.model.cache import LoopIndex, cache_slot
from looplm.model.config import LoopedConfig


class SlottedCache:
    """A :class:`~looplm.model.cache.SequenceCache` over a transformers cache, for the length of one forward.

    transformers counts one cache layer for each model layer; here every loop has layers of its own
    (`cache_slot`). A cache that grows, as `DynamicCache()` does, fits any depth; one built with a fixed
    number of layers (from a config, or static) is refused unless they are exactly the slots needed.
    Beam search, cropping and offloading stay transformers' own.
    """

    def __init__(self, config: LoopedConfig, cache: Cache, num_loops: int) -> None:
        """Wraps `cache` for a forward through `num_loops` loops. Raises UserError for a cache of the wrong kind."""
        self.config, self.cache = config, cache
        self.num_slots = cache_slot(config, config.num_layers - 1, num_loops - 1) + 1
        self.seq_len = cache.get_seq_length()
        grows = cache.layer_class_to_replicate is not None
        fits = grows or len(cache.layers) == self.num_slots
        if not fits or not all(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers):
            raise self._misfit(f"A {type(cache).__name__} with {len(cache.layers)} layers does not fit.")

    def _misfit(self, found: str) -> UserError:
        config = self.config
        core = config.num_hidden_layers + config.num_coda_layers
        return UserError(
            f"{found} A looped model keeps keys and values for every loop: it needs R*L = {self.num_slots} cache "
            f"slots here ({core} layers in each loop{' after the prelude' if config.num_prelude_layers else ''}), "
            "filled at the same depth in every call. Pass DynamicCache() with no arguments, or no cache at all and "
            "use_cache=True."
        )

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """See :class:`~looplm.model.cache.KVCache`. Raises UserError when this slot missed an earlier call."""
        if not isinstance(loop_idx, int):
            raise TypeError("A transformers cache holds every row at the same loop; loop_idx must be an int.")
        slot = cache_slot(self.config, layer, loop_idx)
        held = self.cache.get_seq_length(slot)
        if held != self.seq_len:
            raise self._misfit(
                f"The cache holds {self.seq_len} positions, but only {held} at loop {loop_idx + 1} of layer {layer}."
            )
        # transformers keeps (B, K, M, d).
        k, v = self.cache.update(keys.transpose(1, 2), values.transpose(1, 2), slot)
        return k.transpose(1, 2), v.transpose(1, 2)


def growing_cache(offloading: bool = False) -> DynamicCache:
    """An empty cache for any looped model. `offloading` keeps it in host memory, one slot ahead on the device."""
    return DynamicCache(offloading=offloading)
