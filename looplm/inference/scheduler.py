"""Which requests wait, which read their prompts, which decode; and whose work serves others.

First come, first served: a waiting request begins as soon as there is a slot and room for all it may come to. It lets
others pass only while the prompt is computed that it is going to share.
"""

from collections.abc import Hashable, Iterable, Sequence

from looplm.inference.blocks import BLOCK_SIZE, Prefix, blocks_of
from looplm.inference.kv_cache import SHARED
from looplm.inference.memory import Memory
from looplm.inference.request import Family, Flight, Request


class Scheduler:
    """Requests by what they do, and the slots of those that run."""

    def __init__(self, num_slots: int, *, share: bool) -> None:
        self.share = share
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.free_slots = list(range(num_slots))

    @property
    def running(self) -> list[Request]:
        """Requests that hold a slot."""
        return [*self.prefilling, *self.decoding]

    @property
    def holding(self) -> list[Request]:
        """Requests for which something is in memory: those that run, and those that wait for a slot beside a prompt
        that has been computed for them."""
        waiting = [r for r in self.waiting if r.family is not None and r.family.places is not None]
        return [*self.prefilling, *self.decoding, *waiting]

    def holds(self, request: Request) -> bool:
        """Whether it waits or runs here."""
        return request in self.waiting or request in self.prefilling or request in self.decoding

    def add(self, requests: Iterable[Request]) -> None:
        """Puts requests at the end of the queue."""
        self.waiting += requests

    def admit(self, memory: Memory, now: float) -> list[Request]:
        """Begins waiting requests, in order. Returns those whose prompt is in already: they need a first token."""
        joined = self._admit(memory, now, reuse=True)
        if self.waiting and not (self.prefilling or self.decoding):
            # Sharing takes up to a block a piece more than a prompt of one's own; alone, every request fits.
            self._dissolve_families(memory)
            joined = self._admit(memory, now, reuse=False)
        return joined

    def _admit(self, memory: Memory, now: float, *, reuse: bool) -> list[Request]:
        joined: list[Request] = []
        still: list[Request] = []
        for position, request in enumerate(self.waiting):
            if not self.free_slots or request.max_loops > memory.num_loops:
                still += self.waiting[position:]
                break
            if self._shares_soon(request, memory):
                still.append(request)
            elif not self._begin(request, memory, now, joined, reuse=reuse):
                still += self.waiting[position:]
                break
        self.waiting = still
        return joined

    def _dissolve_families(self, memory: Memory) -> None:
        """Frees prompts that are held for samples which wait; the next one computes it anew."""
        for family in dict.fromkeys(r.family for r in self.waiting if r.family is not None):
            if family.places is not None:
                memory.blocks.drop(_blocks(family))
                family.places = family.logits = family.first = None

    def _begin(self, request: Request, memory: Memory, now: float, joined: list[Request], *, reuse: bool) -> bool:
        family = request.family
        ready = family is not None and family.places is not None
        if ready:
            shared: list[int] = family.places  # type: ignore[union-attr, assignment]
        else:
            chain = self._chain(request, memory) if reuse else []
            shared = [place for prefix in chain for place in prefix.places]
            request.prefix = chain[-1] if chain else None
        if not memory.reserve(request, self.free_slots[-1], shared):
            return False
        self.free_slots.pop()
        if family is not None:
            family.waiting.remove(request)
        if ready:
            assert family is not None
            request.part, request.prefix = len(request.parts), family.prefix
            request.prompt_logprobs = family.prompt_logprobs
            request.flights = [Flight(len(shared) - 1, now, loop=family.loop, logits=family.logits)]
            self.decoding.append(request)
            joined.append(request)
            self._close(family, memory)
            return True
        while request.part_stop <= len(shared):
            request.part += 1
        if family is not None:
            family.first = request
        self.prefilling.append(request)
        return True

    def prompt_is_in(self, request: Request, memory: Memory) -> None:
        """Moves a request on to decoding; its prompt is kept for those that begin alike."""
        self.prefilling.remove(request)
        self.decoding.append(request)
        if self.share and request.shared:
            self._keep_prompt(request, memory)
        family = request.family
        if family is not None:
            family.places, family.prefix = request.places[: len(request.prompt_token_ids)], request.prefix
            family.prompt_logprobs = request.prompt_logprobs
            memory.blocks.hold(_blocks(family))
            self._close(family, memory)

    def release(self, request: Request, memory: Memory | None) -> None:
        """Takes a request out, wherever it is, and frees what it holds at once."""
        family = request.family
        if request in self.waiting:
            self.waiting.remove(request)
            if family is not None:
                family.waiting.remove(request)
                if memory is not None:
                    self._close(family, memory)
            return
        assert memory is not None
        (self.prefilling if request in self.prefilling else self.decoding).remove(request)
        if family is not None and family.first is request and family.places is None:
            family.first = None  # another sample computes the prompt
        if self.share and request.shared and request.finish_reason in ("stop", "length"):
            self._keep_text(request, memory)
        self.free_slots.append(request.slot)
        memory.release(request)

    def _close(self, family: Family, memory: Memory) -> None:
        if family.places is not None and not family.waiting:
            memory.blocks.drop(_blocks(family))
            family.places = family.logits = None

    # --- Prefixes -----------------------------------------------------------------------------------------------

    def _chain(self, request: Request, memory: Memory) -> list[Prefix]:
        if not self.share or request.sampling.prompt_logprobs:
            return []
        space = prefix_space(request, memory)
        if memory.cache.strategy in SHARED:
            return memory.prefixes.find_parts(space, request.parts[:-1])
        # The last position is always run: its logits are wanted.
        return memory.prefixes.find(space, request.prompt_token_ids, len(request.prompt_token_ids) - 1)

    def _shares_soon(self, request: Request, memory: Memory) -> bool:
        """Whether a prompt that is being read will serve `request` better than what is there."""
        family = request.family
        if family is not None and family.first is not None:
            return family.places is None and family.first.prefilling
        if not self.share or request.sampling.prompt_logprobs or not self.prefilling:
            return False
        space = prefix_space(request, memory)
        alike = [r for r in self.prefilling if prefix_space(r, memory) == space]
        if memory.cache.strategy in SHARED:
            best = max((_common_parts(request.parts[:-1], r.parts) for r in alike), default=0)
            return best > len(self._chain(request, memory))
        prompt = request.prompt_token_ids
        best = max((common_prefix(prompt, r.prompt_token_ids) for r in alike), default=0)
        if min(best, len(prompt) - 1) < BLOCK_SIZE:
            return False
        chain = self._chain(request, memory)
        return min(best, len(prompt) - 1) - (chain[-1].stop if chain else 0) >= BLOCK_SIZE

    def _keep_prompt(self, request: Request, memory: Memory) -> None:
        space, prompt = prefix_space(request, memory), request.prompt_token_ids
        if memory.cache.strategy in SHARED:
            stop = 0
            for part in request.parts:
                stop += len(part)
                if stop > request.reused:
                    places = request.places[stop - len(part) : stop]
                    request.prefix = memory.prefixes.keep(space, request.prefix, part, places)
            return
        self._keep_run(request, memory, space, request.reused, len(prompt))

    def _keep_text(self, request: Request, memory: Memory) -> None:
        """Generated positions that have been through all loops are as good as a prompt's, where the cache is exact."""
        if memory.cache.strategy == "per_loop" and not memory.model.coda and request.prefix is not None:
            start = len(request.prompt_token_ids)
            ready = min(*request.filled, start + len(request.token_ids))
            self._keep_run(request, memory, prefix_space(request, memory), start, ready)

    @staticmethod
    def _keep_run(request: Request, memory: Memory, space: Hashable, start: int, stop: int) -> None:
        for first in range(start, stop, BLOCK_SIZE):
            end = min(first + BLOCK_SIZE, stop)
            request.prefix = memory.prefixes.keep(
                space, request.prefix, request.tokens(first, end), request.places[first:end]
            )


def _blocks(family: Family) -> list[int]:
    assert family.places is not None
    return blocks_of(family.places)


def prefix_space(request: Request, memory: Memory) -> Hashable:
    """What must agree for the prompt of one request to serve another, beside its tokens.

    The coda's keys depend on the loop a position is read out at, and so on the policy.
    """
    return request.max_loops, request.exit if memory.model.coda else None


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_parts(one: Sequence[list[int]], other: Sequence[list[int]]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
