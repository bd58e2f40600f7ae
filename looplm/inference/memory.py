"""Everything that is kept per position while requests run, taken once, within a stated limit of bytes.

Keys and values, the states that wait for deeper loops, the input embeddings where injection brings them in again,
gate logits and changes between loops: rows of tensors at the same places. A request holds the places of all positions
it may come to from the moment it is admitted, so that none ever runs out of memory half-way.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from looplm.inference.blocks import BLOCK_SIZE, BlockPool, PrefixIndex, blocks_of, num_blocks_for
from looplm.inference.kv_cache import SHARED, KVCache, Places, num_sets
from looplm.inference.layout import Layout
from looplm.inference.native import Rows
from looplm.inference.request import Request
from looplm.model.attention import AttentionContext
from looplm.model.cache import LoopIndex
from looplm.model.config import LoopedConfig
from looplm.model.flops import CacheStrategy
from looplm.model.looped import LoopedTransformer
from looplm.model.rope import rope_cos_sin


def bytes_per_place(config: LoopedConfig, strategy: CacheStrategy, num_loops: int, dtype: torch.dtype) -> int:
    """Bytes that one position takes: keys and values, states, embeddings and what exits are decided on."""
    size, signal = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    layers = config.num_prelude_layers + config.num_hidden_layers * num_sets(strategy, num_loops)
    cache = 2 * config.num_key_value_heads * config.head_dim * (layers + config.num_coda_layers)
    rows = 1 + (not hidden_is_state(config)) + (config.injection != "none") + (config.num_coda_layers > 0)
    return (cache + rows * config.hidden_size) * size + 2 * num_loops * signal


def hidden_is_state(config: LoopedConfig) -> bool:
    """Whether the next loop reads the very state that head or coda read."""
    raw_coda = config.num_coda_layers > 0 and config.coda_input == "raw"
    return (config.loop_state == "raw") == raw_coda


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on `device`; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if device.type == "cpu" and table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class Memory:
    """Places for `num_blocks` blocks of positions of up to `num_loops` loops, and who holds them.

    Tensors have two rows more than places, as the cache has (:class:`~looplm.inference.kv_cache.KVCache`).
    """

    def __init__(
        self, model: LoopedTransformer, strategy: CacheStrategy, *, num_slots: int, num_blocks: int, num_loops: int
    ) -> None:
        config, weight = model.config, model.embed_tokens.weight
        self.model, self.num_slots = model, num_slots
        self.device, self.dtype = weight.device, weight.dtype
        self.blocks = BlockPool(num_blocks)
        self.prefixes = PrefixIndex(self.blocks)
        self.cache = KVCache(
            config,
            strategy,
            num_places=num_blocks * BLOCK_SIZE,
            num_loops=num_loops,
            dtype=self.dtype,
            device=self.device,
        )
        rows = self.cache.num_places + 2
        self.states = torch.zeros(rows, config.hidden_size, dtype=self.dtype, device=self.device)
        """What the next loop of each position reads."""
        self.hidden = self.states if hidden_is_state(config) else torch.zeros_like(self.states)
        """What the latest loop of each position left for head or coda."""
        self.embeds = torch.zeros_like(self.states) if model.injection is not None else None
        self.readouts = torch.zeros_like(self.states) if model.coda else None
        """What the coda reads: the hidden state at the loop a prompt position is read out at."""
        signal = torch.promote_types(self.dtype, torch.float32)
        self.gate_logits = torch.zeros(num_loops, rows, dtype=signal, device=self.device)
        self.changes = torch.full((num_loops, rows), torch.inf, dtype=signal, device=self.device)
        self.table = torch.zeros(num_slots, 0, dtype=torch.long, device=self.device)
        """Place of each position of the request in a slot."""
        self.runs: list[int | None] = [None] * num_slots
        """Per slot, the place of position 0 if all others follow it."""
        self.cos = self.sin = torch.zeros(0, config.head_dim, dtype=self.dtype, device=self.device)

    @property
    def num_loops(self) -> int:
        return self.cache.num_loops

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that grows with the number of places."""
        return self.cache.bytes_allocated + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """The same without keys and values."""
        tensors = {id(t): t for t in (self.states, self.hidden, self.embeds, self.readouts) if t is not None}
        return sum(t.nbytes for t in (*tensors.values(), self.gate_logits, self.changes))

    def bytes_in_use(self, prefilling: Sequence[Request], decoding: Sequence[Request]) -> int:
        """Bytes of keys and values that hold something; what several requests share counts once."""
        positions = sets = 0
        two_sets = self.cache.strategy in SHARED and self.cache.num_sets == 2
        counted: set[int] = set()
        for request in (*prefilling, *decoding):
            shared = set(blocks_of(request.places[: request.reused]))
            twice = len(shared & counted) * BLOCK_SIZE
            counted |= shared
            filled = [max(0, n - twice) for n in request.filled]
            positions += filled[0]
            if self.cache.strategy in SHARED:
                sets += filled[0] * (2 if two_sets and request in prefilling else 1)
            else:
                sets += sum(filled)
        return self.cache.bytes_in_use(positions, sets)

    # --- Who holds what -----------------------------------------------------------------------------------------

    def reserve(self, request: Request, slot: int, shared: list[int]) -> bool:
        """Gives `request` a slot and the places of all positions it may come to; `shared` are those it begins with.

        False, and nothing has changed, when there is not enough room now. Kept prefixes go to make some.
        """
        held = blocks_of(shared)
        self.blocks.hold(held)
        need = num_blocks_for(request.max_positions - len(shared))
        while len(self.blocks.free) < need and self.prefixes.evict():
            pass
        fresh = self.blocks.take(need)
        if fresh is None:
            self.blocks.drop(held)
            return False
        own = [block * BLOCK_SIZE + i for block in fresh for i in range(BLOCK_SIZE)]
        request.slot, request.blocks = slot, [*held, *fresh]
        request.places = [*shared, *own][: request.max_positions]
        request.reused = len(shared)
        request.filled = [len(shared)] * request.max_loops
        self._place(request)
        return True

    def _place(self, request: Request) -> None:
        places, slot = request.places, request.slot
        missing = len(places) - self.table.shape[1]
        if missing > 0:
            self.table = torch.nn.functional.pad(self.table, (0, missing))
            self._extend_rope(len(places))
        self.table[slot, : len(places)] = torch.tensor(places, device=self.device)
        self.runs[slot] = places[0] if places == list(range(places[0], places[0] + len(places))) else None

    def _extend_rope(self, num_positions: int) -> None:
        config = self.model.config
        positions = torch.arange(num_positions, device=self.device)[None]
        cos, sin = rope_cos_sin(positions, config.head_dim, config.rope_theta, self.dtype, config.position_scaling)
        self.cos, self.sin = cos[0], sin[0]

    def release(self, request: Request) -> None:
        """Takes slot and places back at once."""
        self.blocks.drop(request.blocks)
        request.blocks, request.places, request.slot = [], [], -1

    def grow(self, num_blocks: int, num_loops: int) -> "Memory":
        """A larger memory with all that is in this one, at the same places."""
        larger = Memory(
            self.model, self.cache.strategy, num_slots=self.num_slots, num_blocks=num_blocks, num_loops=num_loops
        )
        larger.blocks, larger.prefixes = self.blocks, self.prefixes
        larger.blocks.grow(num_blocks)
        larger.table, larger.runs, larger.cos, larger.sin = self.table, self.runs, self.cos, self.sin
        larger.cache.copy_from(self.cache)
        places = slice(0, self.cache.num_places)
        for name in ("states", "hidden", "embeds", "readouts"):
            mine, theirs = getattr(larger, name), getattr(self, name)
            if mine is not None:
                mine[places] = theirs[places]
        larger.gate_logits[: self.num_loops, places] = self.gate_logits[:, places]
        larger.changes[: self.num_loops, places] = self.changes[:, places]
        return larger

    # --- Where the positions of a pass lie ----------------------------------------------------------------------

    def context(
        self, layout: Layout, loop_idx: LoopIndex, *, in_place: bool = False
    ) -> tuple[AttentionContext, Int[Tensor, "B S"]]:
        """What the layers of a pass over `layout` share, and the place of every column. `loop_idx` is 0 for prelude
        and coda.

        in_place: where every position is a row, kernels store and read it where it lies.
        """
        rope = self.cos[layout.positions], self.sin[layout.positions]
        if in_place and layout.positions.shape[1] == 1:
            places, mask = Places(self._write(layout), None, None, self.rows(chain.from_iterable(layout.pieces))), None
        else:
            places, mask = self.places(layout), layout.mask()
        return AttentionContext(*rope, mask, self.cache.view(places, loop_idx)), places.write

    def rows(self, numbers: Iterable[int]) -> Rows:
        """Single positions as the kernels read them, from four numbers each: those of a `Segment`."""
        stride = 0 if self.cache.strategy in SHARED else self.cache.stride
        return Rows(numbers, self.table, (self.cos, self.sin), stride)

    def places(self, layout: Layout) -> Places:
        """The places that a pass over `layout` writes and reads."""
        write = self._write(layout)
        run = self.runs[layout.pieces[0].slot] if len(layout.pieces) == 1 else None
        if run is not None:
            return Places(write, None, slice(run, run + layout.num_keys))
        read = self.table[:, : layout.num_keys][layout.slots]
        if any(piece.stop < layout.num_keys for piece in layout.pieces):
            keys = torch.arange(layout.num_keys, device=self.device)
            read = torch.where(keys <= layout.positions[:, -1:], read, self.cache.zero_place)
        return Places(write, read, None)

    def _write(self, layout: Layout) -> Int[Tensor, "B S"]:
        write = self.table[layout.slots[:, None], layout.positions]
        return write if layout.real is None else torch.where(layout.real, write, self.cache.trash_place)
