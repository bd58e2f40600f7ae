"""Memory: a stated limit that holds, requests that wait for it, blocks never lost and never shared by mistake."""

import pytest
import torch

from looplm.errors import UserError
from looplm.inference import capacity
from looplm.inference.blocks import BLOCK_SIZE, BlockPool, PrefixIndex, num_blocks_for
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.kv_cache import KVCache, Places
from looplm.inference.memory import Memory
from looplm.inference.sampling import SamplingParams

EIGHT = SamplingParams(max_tokens=8)

# --- Blocks -----------------------------------------------------------------------------------------------------


def test_blocks_come_in_runs_where_there_are_any():
    pool = BlockPool(10)
    first, second = pool.take(3), pool.take(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    pool.drop(first)
    assert pool.take(4) == [5, 6, 7, 8]
    assert pool.take(4) == [0, 1, 2, 9]
    assert pool.take(1) is None


def test_a_block_is_free_when_its_last_holder_is_gone():
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.hold([blocks[0]])
    pool.drop(blocks)
    assert pool.free == [1]
    pool.drop([0])
    assert pool.free == [0, 1]


def test_prefixes_are_found_by_their_longest_chain():
    pool = BlockPool(6)
    index = PrefixIndex(pool)
    pool.take(4)
    tokens = list(range(40))
    a = index.keep("space", None, tokens[:16], list(range(16)))
    b = index.keep("space", a, tokens[16:32], list(range(16, 32)))
    tail = index.keep("space", b, tokens[32:35], list(range(32, 35)))
    pool.drop([0, 1, 2, 3])
    assert pool.free == [3, 4, 5]
    assert index.find("space", tokens, 40) == [a, b, tail]
    assert index.find("space", tokens, 34) == [a, b]
    assert index.find("space", [*tokens[:20], 99, *tokens[21:]], 40) == [a]
    assert index.find("another", tokens, 40) == []
    assert index.keep("space", a, tokens[16:32], [7] * 16) is b
    assert index.find_parts("space", [tokens[:16], tokens[16:30]]) == [a]
    assert index.evict() and index.find("space", tokens, 40) == [a, b]
    assert index.evict() and index.evict() and not index.evict()
    assert pool.free == list(range(6))


def test_least_recently_used_goes_first():
    pool = BlockPool(3)
    index = PrefixIndex(pool)
    pool.take(3)
    for i in range(3):
        index.keep("space", None, [i] * 16, list(range(16 * i, 16 * i + 16)))
    pool.drop([0, 1, 2])
    index.find("space", [0] * 16, 16)
    assert index.evict() and pool.free == [1]
    assert index.evict() and pool.free == [1, 2]


# --- The cache --------------------------------------------------------------------------------------------------


def make_cache(lm, strategy="per_loop"):
    return KVCache(
        lm.model.config, strategy, num_places=32, num_loops=4, dtype=torch.float64, device=torch.device("cpu")
    )


def test_padding_writes_where_nobody_reads(make_lm):
    cache = make_cache(make_lm())
    write = torch.tensor([[cache.trash_place, 3], [5, 6]])
    read = torch.tensor([[3, cache.zero_place], [5, 6]])
    new = torch.full((2, 2, 2, 6), 2.0, dtype=torch.float64)
    keys, _ = cache.view(Places(write, read, None), torch.tensor([0, 2])).update(new, new, 0, 0)
    assert keys[0, 0].eq(2).all() and keys[0, 1].eq(0).all() and keys[1].eq(2).all()
    rows = cache.keys[0].flatten(1).any(-1).nonzero().flatten().tolist()
    assert rows == [3, cache.trash_place, 2 * cache.stride + 5, 2 * cache.stride + 6]


def test_a_larger_cache_holds_the_same(make_lm):
    lm = make_lm("prelude_coda")
    small, large = (
        make_cache(lm),
        KVCache(
            lm.model.config, "per_loop", num_places=48, num_loops=5, dtype=torch.float64, device=torch.device("cpu")
        ),
    )
    for stored in (*small.keys, *small.values):
        stored.normal_()
    large.copy_from(small)
    for mine, theirs in zip(large.keys, small.keys, strict=True):
        for loop in range(len(theirs) // small.stride):
            assert torch.equal(mine[loop * large.stride :][:32], theirs[loop * small.stride :][:32])


def test_what_others_have_left_is_never_read(make_lm):
    """The broken prompt holds the first places, which an empty table points to; a masked NaN would still be NaN."""
    lm = make_lm("gqa")
    lm.model.embed_tokens.weight.data[7] = torch.nan
    prompts = [[7, *[3] * 8], [4], [1, 2] * 10]
    results = list(Engine(lm, share_prefixes=False).generate(prompts, SamplingParams(max_tokens=2), FixedDepth(4)))
    assert results[0].finish_reason == "error"
    for prompt, result in zip(prompts[1:], results[1:], strict=True):
        (alone,) = Engine(lm).generate([prompt], SamplingParams(max_tokens=2), FixedDepth(4))
        assert result.token_ids == alone.token_ids and len(result.token_ids) == 2


# --- Limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["per_loop", "last", "mean"])
def test_a_limit_holds_and_requests_wait_for_it(strategy, make_lm, make_prompts):
    lm, prompts = make_lm("gqa"), make_prompts(6)
    free = list(Engine(lm, kv_cache=strategy).generate(prompts, EIGHT, QuantileExit(0.5)))
    limit = capacity.bytes_for(lm.model, strategy, 3, 4)
    engine = Engine(lm, kv_cache=strategy, memory_bytes=limit)
    tight = list(engine.generate(prompts, EIGHT, QuantileExit(0.5)))
    assert [r.token_ids for r in tight] == [r.token_ids for r in free]
    assert engine._memory is not None
    assert engine._memory.num_bytes == engine.stats.cache_bytes + engine.stats.state_bytes == limit
    assert engine.stats.cache_bytes_in_use <= engine.stats.cache_bytes


def test_a_request_that_can_never_fit_is_refused_alone(make_lm):
    lm = make_lm()
    engine = Engine(lm, memory_bytes=capacity.bytes_for(lm.model, "per_loop", 2, 4))
    engine.submit([1] * 20, EIGHT, FixedDepth(4))
    with pytest.raises(UserError, match="36 positions at 4 loops take .* more than the memory limit of"):
        engine.submit([1] * 29, EIGHT, FixedDepth(4))
    with pytest.raises(UserError, match="at 9 loops"):
        engine.submit([1] * 20, EIGHT, FixedDepth(9))
    results = []
    while engine.num_unfinished:
        results += engine.step()
    assert [len(result.token_ids) for result in results] == [8]


def test_a_deeper_request_waits_until_the_memory_can_be_laid_out_anew(make_lm):
    lm = make_lm()
    engine = Engine(lm, memory_bytes=capacity.bytes_for(lm.model, "per_loop", 6, 6), share_prefixes=False)
    requests = [engine.submit([1, 2], EIGHT, FixedDepth(n))[0] for n in (2, 2)]
    engine.step()
    requests += engine.submit([1, 2], EIGHT, FixedDepth(6))
    engine.step()
    assert engine._memory is not None and engine._memory.num_loops == 2 and requests[2].slot == -1
    while engine.num_unfinished:
        engine.step()
    assert engine._memory.num_loops == 6
    assert [request.loops for request in requests] == [[2] * 8, [2] * 8, [6] * 8]
    assert engine._memory.num_bytes <= engine.memory_bytes


def test_without_a_limit_memory_grows_under_running_requests(make_lm):
    lm = make_lm("scalar_lora")
    long = SamplingParams(max_tokens=30)
    (alone,) = Engine(lm).generate([[1, 2, 3]], long, QuantileExit(0.5))
    engine = Engine(lm)
    (request,) = engine.submit([1, 2, 3], long, QuantileExit(0.5))
    for _ in range(9):
        engine.step()
    small = engine._memory
    engine.submit([4] * 30, EIGHT, FixedDepth(5))
    while engine.num_unfinished:
        engine.step()
    assert engine._memory is not small and engine._memory.num_loops == 5
    assert request.token_ids == alone.token_ids and request.loops == alone.loops


def test_what_the_system_has_not_got_is_said_before_it_is_taken(make_lm, monkeypatch):
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(capacity, "Memory", None)
    with pytest.raises(UserError, match=r"No memory for 16 positions.* they take \d+\.\d KiB"):
        next(Engine(make_lm()).generate([[1]], EIGHT, FixedDepth(1)))


def test_requests_wait_where_the_system_has_not_got_memory_for_all(make_lm, make_prompts, monkeypatch):
    """Also while others run: nothing fails that could run later."""
    lm, prompts = make_lm(), make_prompts(6)
    expected = [r.token_ids for r in Engine(lm).generate(prompts, EIGHT, FixedDepth(4))]
    free = int(capacity.bytes_for(lm.model, "per_loop", 3, 4) / capacity.MOST_OF_FREE) + 1
    monkeypatch.setattr(capacity, "free_bytes", lambda device: free)
    engine = Engine(lm, share_prefixes=False)
    assert [r.token_ids for r in engine.generate(prompts, EIGHT, FixedDepth(4))] == expected
    assert engine._memory is not None and engine._memory.blocks.num_blocks == 3
    engine.submit([1] * 20, EIGHT, FixedDepth(4))
    engine.step()
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 10)
    (late,) = engine.submit([2] * 20, EIGHT, FixedDepth(4))
    while engine.num_unfinished:
        engine.step()
    assert late.finish_reason == "length"


def test_cancellation_frees_at_once(make_lm):
    lm = make_lm()
    engine = Engine(lm, memory_bytes=capacity.bytes_for(lm.model, "per_loop", 2, 4), share_prefixes=False)
    (first,) = engine.submit([1] * 20, EIGHT, FixedDepth(4))
    (second,) = engine.submit([2] * 20, EIGHT, FixedDepth(4))
    for _ in range(6):
        engine.step()
    assert first.slot >= 0 and second.slot < 0 and not engine._memory.blocks.free
    engine.cancel([first])
    assert first.finish_reason == "cancelled" and len(engine._memory.blocks.free) == 2
    engine.step()
    assert second.slot >= 0
    engine.cancel([first, second])
    assert engine.num_unfinished == 0 and engine.step() == []
    assert engine.result(first).finish_reason == "cancelled"


def test_a_thousand_requests_at_once_and_all_cancelled(make_lm):
    lm = make_lm(num_hidden_layers=1)
    engine = Engine(lm, memory_bytes=capacity.bytes_for(lm.model, "per_loop", 8, 4))
    requests = [engine.submit([1 + i % 20, 2], SamplingParams(max_tokens=3), FixedDepth(1))[0] for i in range(1000)]
    for _ in range(8):
        engine.step()
    assert sum(request.finish_reason == "length" for request in requests) >= 16
    engine.cancel(requests)
    assert engine.num_unfinished == 0
    assert len(engine._scheduler.free_slots) == engine.max_batch
    (result,) = engine.generate([[5, 2]], SamplingParams(max_tokens=3), FixedDepth(1))
    assert result.finish_reason == "length"


def test_an_abandoned_iterator_leaves_nothing_behind(make_lm):
    engine = Engine(make_lm())
    results = engine.generate([[1], [2], [3]], EIGHT, FixedDepth(1))
    next(results)
    results.close()
    assert engine.num_unfinished == 0


def test_bytes_are_estimated_as_they_are_taken(make_lm):
    for shape in ("ouro", "raw_state", "prelude_coda"):
        lm = make_lm(shape)
        for strategy in ("per_loop", "last", "mean"):
            memory = Memory(lm.model, strategy, num_slots=2, num_blocks=3, num_loops=3)
            assert memory.num_bytes == capacity.bytes_for(lm.model, strategy, 3, 3)
            assert capacity.blocks_within(lm.model, strategy, memory.num_bytes, 3) == 3
            assert capacity.blocks_within(lm.model, strategy, memory.num_bytes - 1, 3) == 2
    assert num_blocks_for(BLOCK_SIZE) == 1 and num_blocks_for(BLOCK_SIZE + 1) == 2
