"""Which positions of the preallocated memory belong to whom: blocks, and prompts whose blocks are kept for reuse.

A block is `BLOCK_SIZE` consecutive places. It may have several holders: requests that share a prefix, and the index
of prefixes. Only the request that took a block writes to it, and only at positions that no other holder reads, so
that nothing is ever copied.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

BLOCK_SIZE = 16


def num_blocks_for(num_positions: int) -> int:
    """Blocks that hold `num_positions`."""
    return -(-num_positions // BLOCK_SIZE)


class BlockPool:
    """Free blocks and the number of holders of the others."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))  # ascending
        self.holders = [0] * num_blocks

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks for one holder, consecutive where there is such a run; None when there are too few."""
        if count > len(self.free):
            return None
        start = self._run(count)
        taken = self.free[start : start + count]
        del self.free[start : start + count]
        for block in taken:
            self.holders[block] = 1
        return taken

    def _run(self, count: int) -> int:
        """Where in `free` the first run of `count` consecutive blocks begins; 0 when there is none."""
        start = 0
        for i, block in enumerate(self.free):
            if block - self.free[start] != i - start:
                start = i
            if i - start + 1 >= count:
                return start
        return 0

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self.holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder fewer; a block without any is free."""
        for block in blocks:
            self.holders[block] -= 1
        gone = [block for block in blocks if not self.holders[block]]
        if gone:
            self.free = sorted(self.free + gone)

    def grow(self, num_blocks: int) -> None:
        """Adds blocks at the end."""
        self.free += range(self.num_blocks, num_blocks)
        self.holders += [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks


@dataclass(eq=False)
class Prefix:
    """Tokens that follow a parent prefix, and where what was computed for them lies."""

    parent: "Prefix | None"
    key: tuple[Hashable, int | None, tuple[int, ...]]
    places: list[int]
    """Of its own tokens."""
    stop: int
    """Positions up to its end, parents included."""
    child_lengths: dict[int, int] = field(default_factory=dict)
    """Length in tokens -> how many children are that long."""

    @property
    def blocks(self) -> list[int]:
        """Blocks that its places lie in."""
        return blocks_of(self.places)


def blocks_of(places: Sequence[int]) -> list[int]:
    """The blocks that `places` lie in, each once, in order."""
    return list(dict.fromkeys(place // BLOCK_SIZE for place in places))


class PrefixIndex:
    """Computed prefixes, each a chain of pieces from the start of a prompt; the least recently used go first.

    A chain belongs to a `space`: what must agree, beside the tokens, for one computation to serve another request.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.prefixes: OrderedDict[Hashable, Prefix] = OrderedDict()
        self.roots: dict[Hashable, dict[int, int]] = {}

    def find(self, space: Hashable, tokens: Sequence[int], limit: int) -> list[Prefix]:
        """The longest chain of pieces that `tokens` begins with, of at most `limit` positions."""
        chain: list[Prefix] = []
        while True:
            last = chain[-1] if chain else None
            start = last.stop if last else 0
            for length in sorted(self._lengths(space, last), reverse=True):
                found = self.prefixes.get(self._key(space, last, tokens[start : start + length]))
                if found is not None and start + length <= limit:
                    self.prefixes.move_to_end(found.key)
                    chain.append(found)
                    break
            else:
                return chain

    def find_parts(self, space: Hashable, parts: Sequence[Sequence[int]]) -> list[Prefix]:
        """The longest chain whose pieces are the first of `parts`, each whole."""
        chain: list[Prefix] = []
        for part in parts:
            found = self.prefixes.get(self._key(space, chain[-1] if chain else None, part))
            if found is None:
                break
            self.prefixes.move_to_end(found.key)
            chain.append(found)
        return chain

    def keep(self, space: Hashable, parent: Prefix | None, tokens: Sequence[int], places: list[int]) -> Prefix:
        """Enters what was computed for `tokens` after `parent`, and holds its blocks; an entry that is there stays."""
        key = self._key(space, parent, tokens)
        if key in self.prefixes:
            self.prefixes.move_to_end(key)
            return self.prefixes[key]
        prefix = Prefix(parent, key, places, (parent.stop if parent else 0) + len(tokens))
        self.pool.hold(prefix.blocks)
        self.prefixes[key] = prefix
        lengths = self._lengths(space, parent)
        lengths[len(tokens)] = lengths.get(len(tokens), 0) + 1
        return prefix

    def evict(self) -> bool:
        """Forgets the least recently used prefix that nothing builds on; False if there is none.

        Its blocks are free once no request holds them either.
        """
        for prefix in self.prefixes.values():
            if not prefix.child_lengths:
                space, _, tokens = prefix.key
                del self.prefixes[prefix.key]
                lengths = self._lengths(space, prefix.parent)
                lengths[len(tokens)] -= 1
                if not lengths[len(tokens)]:
                    del lengths[len(tokens)]
                self.pool.drop(prefix.blocks)
                return True
        return False

    def _lengths(self, space: Hashable, parent: Prefix | None) -> dict[int, int]:
        return parent.child_lengths if parent else self.roots.setdefault(space, {})

    @staticmethod
    def _key(
        space: Hashable, parent: Prefix | None, tokens: Sequence[int]
    ) -> tuple[Hashable, int | None, tuple[int, ...]]:
        # The parent itself, not its key: keys would nest.
        return space, id(parent) if parent else None, tuple(tokens)
