"""How much memory the engine takes: estimated before it is taken, within a limit where one is stated."""

import heapq
import math
from collections.abc import Sequence

import torch

from looplm.errors import UserError
from looplm.inference.blocks import BLOCK_SIZE, num_blocks_for
from looplm.inference.memory import Memory, bytes_per_place, free_bytes
from looplm.inference.request import Request
from looplm.model.flops import CacheStrategy
from looplm.model.looped import LoopedTransformer


class DoesNotFit(UserError):
    """One request is too long, for the context or for memory; others may be served."""


SPARE_PLACES = 2
"""Rows of every tensor that hold no position."""
MOST_OF_FREE = 0.8
"""Share of the free memory that is taken where requests could use all of it."""


def bytes_for(model: LoopedTransformer, strategy: CacheStrategy, num_blocks: int, num_loops: int) -> int:
    """Bytes that `num_blocks` blocks take for positions of up to `num_loops` loops."""
    places = num_blocks * BLOCK_SIZE + SPARE_PLACES
    return places * bytes_per_place(model.config, strategy, num_loops, model.embed_tokens.weight.dtype)


def blocks_within(model: LoopedTransformer, strategy: CacheStrategy, limit: int, num_loops: int) -> int:
    """The most blocks whose memory stays within `limit` bytes."""
    per_place = bytes_per_place(model.config, strategy, num_loops, model.embed_tokens.weight.dtype)
    return max(0, (limit // per_place - SPARE_PLACES) // BLOCK_SIZE)


def check_fits(
    model: LoopedTransformer, strategy: CacheStrategy, limit: int | None, max_positions: int, num_loops: int
) -> None:
    """Raises DoesNotFit for a request that could never run within `limit`."""
    need = bytes_for(model, strategy, num_blocks_for(max_positions), num_loops)
    if limit is not None and need > limit:
        raise DoesNotFit(
            f"{max_positions} positions at {num_loops} loops take {amount(need)} of cache and states, more than the "
            f"memory limit of {amount(limit)}. Shorten the prompt, lower max_tokens, use fewer loops or a cache that "
            "keeps one set of keys, or raise memory_bytes."
        )


def amount(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def ensure(
    memory: Memory | None,
    model: LoopedTransformer,
    strategy: CacheStrategy,
    *,
    num_slots: int,
    limit: int | None,
    idle: bool,
    requests: Sequence[Request],
) -> Memory:
    """A memory in which waiting requests can begin: `memory` itself, a larger one with all it holds, or a new one.

    `requests` are those that run and those that wait; `idle`: nothing of theirs is in memory.
    With a limit, as much is taken at once as the limit allows and `num_slots` requests could use. It is laid out for
    more loops only while nothing runs: a request that needs them waits. Without a limit it grows as requests need it,
    as far as the system has the memory; what does not fit then waits. Raises DoesNotFit when a request does not fit
    even alone.
    """
    loops = max(request.max_loops for request in requests)
    sizes = [num_blocks_for(request.max_positions) for request in requests]
    blocks, largest = sum(heapq.nlargest(num_slots, sizes)), max(sizes)
    if memory is not None and memory.num_loops >= loops and (limit is not None or memory.blocks.num_blocks >= blocks):
        return memory
    if limit is not None:
        if memory is not None and not idle:
            return memory
        most = num_slots * num_blocks_for(model.config.max_position_embeddings)
        blocks = min(most, blocks_within(model, strategy, limit, loops))
        return create(model, strategy, num_slots, blocks, loops, at_least=largest)
    if memory is None:
        return create(model, strategy, num_slots, blocks, loops, at_least=largest)
    loops, blocks = max(loops, memory.num_loops), max(blocks, memory.blocks.num_blocks)
    if bytes_for(model, strategy, blocks, loops) <= (free_bytes(memory.device) or math.inf):
        return memory.grow(blocks, loops)
    return create(model, strategy, num_slots, blocks, loops, at_least=largest) if idle else memory


def create(
    model: LoopedTransformer,
    strategy: CacheStrategy,
    num_slots: int,
    num_blocks: int,
    num_loops: int,
    *,
    at_least: int,
) -> Memory:
    """Takes memory for `num_blocks`, or for as many as the system has room for, `at_least` so many.

    Raises DoesNotFit that says how much it would be when there is not as much.
    """
    need = bytes_for(model, strategy, num_blocks, num_loops)
    free = free_bytes(model.embed_tokens.weight.device)
    if free is not None and need > free:
        num_blocks = blocks_within(model, strategy, int(MOST_OF_FREE * free), num_loops)
        if num_blocks < at_least:
            raise too_much(bytes_for(model, strategy, at_least, num_loops), at_least, num_loops)
    try:
        return Memory(model, strategy, num_slots=num_slots, num_blocks=num_blocks, num_loops=num_loops)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise too_much(need, num_blocks, num_loops) from None


def too_much(need: int, num_blocks: int, num_loops: int) -> DoesNotFit:
    """What to say of memory that is not there."""
    return DoesNotFit(
        f"No memory for {num_blocks * BLOCK_SIZE:,} positions at {num_loops:,} loops: they take {amount(need)}. Use "
        "fewer loops, a lower max_tokens, shorter prompts, a smaller max_batch, or a cache that keeps one set of keys."
    )
