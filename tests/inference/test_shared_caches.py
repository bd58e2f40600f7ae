"""Strategies that keep one set of keys, and `fill`: their definitions, their memory, and where they are exact."""

from itertools import pairwise

import pytest

from looplm.inference import reference, reference_shared
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.kv_cache import num_sets
from looplm.inference.memory import bytes_per_place
from looplm.inference.prompts import Parts
from looplm.inference.sampling import SamplingParams
from looplm.model.flops import cache_bytes_per_token

TEN = SamplingParams(max_tokens=10, logprobs=True)
APPROXIMATE = ["fill", "last", "mean", "first"]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("strategy", APPROXIMATE)
@pytest.mark.parametrize("shape", ["gqa", "prelude_coda", "raw_state"])
def test_a_batch_is_the_definition(strategy, shape, make_lm, make_prompts):
    lm = make_lm(shape)
    prompts = make_prompts(5, seed=7)
    exits = [QuantileExit(0.5), QuantileExit(0.3), FixedDepth(3), QuantileExit(0.8), FixedDepth(1)]
    engine = Engine(lm, kv_cache=strategy, max_batch=3, chunk_size=4)
    results = list(engine.generate(prompts, TEN, exits))
    different = 0
    for prompt, exit, result in zip(prompts, exits, results, strict=True):
        expected = reference_shared.generate(lm, [prompt], TEN, exit, strategy)
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
        # Nothing is caught up on: a position is computed as deep as it was read out.
        assert result.token_loops[1:] == result.loops[1:]
        different += result.logprobs != pytest.approx(reference.generate(lm, prompt, TEN, exit).logprobs, abs=1e-6)
    # Under `fill` only tokens that go deeper than one before them are another matter, and there are none here.
    assert different or (strategy, shape) == ("fill", "raw_state"), (
        "the strategy has changed nothing, so this test shows little"
    )
    assert engine.stats.token_loops == sum(sum(result.loops[1:]) for result in results)


@pytest.mark.parametrize("strategy", APPROXIMATE)
def test_one_loop_is_exact(strategy, make_lm, make_prompts):
    """With a single loop there is one set of keys however it is kept."""
    lm = make_lm()
    for prompt, result in zip(
        make_prompts(3), Engine(lm, kv_cache=strategy).generate(make_prompts(3), TEN, FixedDepth(1)), strict=True
    ):
        expected = reference.generate(lm, prompt, TEN, FixedDepth(1))
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)


def test_fill_is_exact_while_every_token_runs_all_loops(make_lm, make_prompts):
    lm = make_lm("scalar_lora")
    prompts = make_prompts(2)
    for prompt, result in zip(
        prompts, Engine(lm, kv_cache="fill").generate(prompts, TEN, QuantileExit(1)), strict=True
    ):
        assert result.token_ids == reference.generate(lm, prompt, TEN, QuantileExit(1)).token_ids


@pytest.mark.parametrize("strategy", ["last", "mean", "first"])
def test_the_first_token_is_exact(strategy, make_lm):
    """A prompt runs all loops, each on its own keys."""
    lm, prompt = make_lm("gqa"), [3, 1, 4, 1, 5, 9]
    (result,) = Engine(lm, kv_cache=strategy, chunk_size=2).generate([prompt], TEN, QuantileExit(0.5))
    assert result.logprobs is not None
    assert result.logprobs[0] == pytest.approx(reference.generate(lm, prompt, TEN, QuantileExit(0.5)).logprobs[0])


@pytest.mark.parametrize("strategy", ["last", "mean", "first"])
def test_parts_are_prompts_of_their_own(strategy, make_lm):
    """A second part reads what is kept of the first, so that it matters where a prompt is cut."""
    lm = make_lm("gqa")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    whole, cut = Engine(lm, kv_cache=strategy).generate([prompt, Parts(prompt[:4], prompt[4:])], TEN, FixedDepth(4))
    assert whole.logprobs != pytest.approx(cut.logprobs, abs=1e-6)
    assert whole.prompt_token_ids == cut.prompt_token_ids
    whole, cut = Engine(lm).generate([prompt, Parts(prompt[:4], prompt[4:])], TEN, FixedDepth(4))
    assert whole.logprobs == pytest.approx(cut.logprobs, abs=1e-12)


@pytest.mark.parametrize("strategy", ["per_loop", *APPROXIMATE])
@pytest.mark.parametrize("shape", ["gqa", "raw_state"])
def test_memory_is_that_of_the_cost_model(strategy, shape, make_lm):
    """Bytes that hold something at the peak over prompt and text, and bytes that are taken."""
    lm = make_lm(shape)
    config = lm.model.config
    cost = cache_bytes_per_token(config, strategy, dtype_bytes=8)
    engine = Engine(lm, kv_cache=strategy)
    (_,) = engine.generate([[5] * 30], SamplingParams(max_tokens=3), FixedDepth(4))
    # 30 positions of the prompt while it is read, 32 in the end.
    assert engine.stats.cache_bytes_in_use == max(30 * cost.prefill_peak, 32 * cost.decode)
    sets = num_sets(strategy, 4)
    assert engine.stats.cache_bytes == (32 + 2) * sets * cache_bytes_per_token(config, "last", dtype_bytes=8).decode
    memory = engine._memory
    assert memory is not None
    assert memory.num_bytes == (32 + 2) * bytes_per_place(config, strategy, 4, memory.dtype)


def test_one_set_is_a_quarter_of_four(make_lm):
    taken = {}
    for strategy in ("per_loop", "last", "mean", "first"):
        engine = Engine(make_lm(), kv_cache=strategy)
        list(engine.generate([[1] * 40], TEN, FixedDepth(4)))
        taken[strategy] = engine.stats.cache_bytes
    assert taken["last"] <= 1.05 / 4 * taken["per_loop"]
    assert max(taken["mean"], taken["first"]) <= 2.05 / 4 * taken["per_loop"]


@pytest.mark.parametrize("strategy", APPROXIMATE)
def test_early_exit_saves_token_loops_at_any_batch(strategy, make_lm, make_prompts):
    work = {}
    for kv_cache in ("per_loop", strategy):
        engine = Engine(make_lm(), kv_cache=kv_cache)
        list(engine.generate(make_prompts(4), TEN, [FixedDepth(1)] * 3 + [FixedDepth(4)]))
        work[kv_cache] = engine.stats.token_loops
    assert work[strategy] == work["per_loop"]  # fixed depths leave nothing to catch up on
    for kv_cache in ("per_loop", strategy):
        engine = Engine(make_lm(), kv_cache=kv_cache)
        results = list(engine.generate(make_prompts(4), TEN, QuantileExit(0.5)))
        claimed = sum(sum(result.loops[1:]) for result in results)
        assert (engine.stats.token_loops > claimed) == (kv_cache == "per_loop")


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("strategy", ["mean", "first"])
def test_a_deeper_request_may_come_while_a_prompt_of_one_loop_is_read(strategy, make_lm, make_prompts):
    """Memory for one loop has one set; it becomes two while part of the prompt has gone through."""
    lm = make_lm("raw_state")
    short, deep = make_prompts(2, seed=3)
    short = [*short, *range(20)]
    engine = Engine(lm, kv_cache=strategy, chunk_size=3)
    engine.submit(short, TEN, FixedDepth(1), index=0)
    engine.step()
    assert engine.num_unfinished == 1, "the prompt is half read"
    engine.submit(deep, TEN, FixedDepth(3), index=1)
    results = {}
    while engine.num_unfinished:
        results |= {result.index: result for result in engine.step()}
    for index, (prompt, exit) in enumerate([(short, FixedDepth(1)), (deep, FixedDepth(3))]):
        expected = reference_shared.generate(lm, [prompt], TEN, exit, strategy)
        assert results[index].token_ids == expected.token_ids
        assert results[index].logprobs == pytest.approx(expected.logprobs, abs=1e-7)


def test_sets(make_lm):
    assert [num_sets("per_loop", n) for n in (1, 4)] == [num_sets("fill", n) for n in (1, 4)] == [1, 4]
    assert [num_sets("last", n) for n in (1, 4)] == [1, 1]
    assert [num_sets("mean", n) for n in (1, 4)] == [num_sets("first", n) for n in (1, 4)] == [1, 2]
    assert all(a <= b for a, b in pairwise(num_sets("mean", n) for n in range(1, 6)))
