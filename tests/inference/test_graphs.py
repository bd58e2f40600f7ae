"""Captured passes, by a recorder that, like a CUDA graph, does again what was done, on the very same tensors.

What a pass reads from Python or from any tensor that is not a buffer of its own is frozen in the record, so that the
second pass of a shape would be wrong.
"""

import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from looplm.errors import UserError
from looplm.inference import reference, reference_shared
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import ConfidenceExit, FixedDepth, HiddenDiffExit, QuantileExit
from looplm.inference.graphs import FEWEST_KEYS, GraphedModel, Shape
from looplm.inference.sampling import SamplingParams
from looplm.inference.speculative import Speculation

TEN = SamplingParams(max_tokens=10, logprobs=True)
EXITS = [QuantileExit(0.5), FixedDepth(5), HiddenDiffExit(2.5), ConfidenceExit(kl=0.5), QuantileExit(0.3)]


class Recorder(TorchDispatchMode):
    """Every operation on tensors, with the very tensors it read and gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        now = {}
        for func, args, kwargs, out in self.calls:
            args, kwargs = tree_map(
                lambda x: now.get(id(x), x) if isinstance(x, Tensor) else x,
                (args, kwargs),
            )
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor):
                    now[id(old)] = new


def record(run):
    recorder = Recorder()
    with recorder:
        run()
    return recorder.replay


def graphed(lm, **options):
    engine = Engine(lm, native_kernels=False, **options)
    engine._run_by = engine._graphed = GraphedModel(lm, record)
    return engine


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", ["scalar_lora", "prelude_coda", "raw_state"])
def test_a_batch_is_the_oracle(shape, make_lm, make_prompts):
    """Requests of several lengths come and go; shapes repeat, rows are padded, the memory grows in between."""
    lm, prompts = make_lm(shape), make_prompts(10, seed=3)
    engine = graphed(lm, max_batch=5, chunk_size=random.Random(shape).choice([4, 8]))
    for half in (slice(0, 5), slice(5, 10)):
        for prompt, exit, result in zip(prompts[half], EXITS, engine.generate(prompts[half], TEN, EXITS), strict=True):
            expected = reference.generate(lm, prompt, TEN, exit)
            assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
            assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
    graphs = engine._run_by.graphs
    assert engine.stats.weight_passes > 3 * len(graphs.passes) > 0
    assert {rows for rows, _, _ in graphs.passes} >= {1, 2, 4, 8}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("strategy", ["fill", "last", "mean", "first"])
def test_shared_caches(strategy, make_lm, make_prompts):
    lm, prompts = make_lm("gqa"), make_prompts(5, seed=7)
    exits = [QuantileExit(0.5), QuantileExit(0.3), FixedDepth(3), QuantileExit(0.8), FixedDepth(1)]
    results = graphed(lm, kv_cache=strategy, max_batch=3).generate(prompts, TEN, exits)
    for prompt, exit, result in zip(prompts, exits, results, strict=True):
        expected = reference_shared.generate(lm, [prompt], TEN, exit, strategy)
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)


@pytest.mark.usefixtures("unchecked_shapes")
def test_drafts(make_lm, make_prompts):
    lm, prompts = make_lm("gqa"), make_prompts(3, seed=8)
    engine = graphed(lm)
    results = engine.generate(prompts, TEN, FixedDepth(4), speculation=Speculation(1, 3))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference.generate(lm, prompt, TEN, FixedDepth(4)).token_ids
    assert engine.stats.drafted_tokens


def test_a_short_row_reads_nothing_of_a_longer_one_before_it(make_lm):
    """In the buffers of a shape: neither its mask nor its places, where a broken request has left NaN since."""
    lm = make_lm("gqa")
    lm.model.embed_tokens.weight.data[7] = torch.nan
    engine = graphed(lm, share_prefixes=False)
    (long,) = engine.generate([[1, 2] * 10], TEN, FixedDepth(4))
    (broken,) = engine.generate([[7, *[1, 2] * 10]], TEN, FixedDepth(4))
    (short,) = engine.generate([[3, 4]], TEN, FixedDepth(4))
    assert (long.finish_reason, broken.finish_reason, short.finish_reason) == ("length", "error", "length")
    expected = reference.generate(lm, [3, 4], TEN, FixedDepth(4))
    assert short.token_ids == expected.token_ids
    assert short.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


def test_a_padded_row_writes_nowhere(make_lm):
    """Three rows in the buffers of four: what the fourth wrote last is a place that has another owner now."""
    lm = make_lm("gqa")
    engine = graphed(lm, max_batch=4, share_prefixes=False)
    long, short = [[i] * 20 for i in range(3)], [[i] for i in range(4)]
    for prompts in (long, short, long):
        results = list(engine.generate(prompts, TEN, FixedDepth(4)))
    for prompt, result in zip(long, results, strict=True):
        expected = reference.generate(lm, prompt, TEN, FixedDepth(4))
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


def test_new_weights_and_new_memory_drop_the_graphs(make_lm):
    lm = make_lm()
    engine = graphed(lm)
    list(engine.generate([[1, 2]], TEN, FixedDepth(4)))
    graphs = engine._run_by.graphs
    before = graphs.cache
    assert graphs.passes
    list(engine.generate([[1] * 40], TEN, FixedDepth(4)))
    assert graphs.cache is engine._memory.cache is not before
    with torch.no_grad():  # in place: a graph reads the weights where they are
        lm.model.layers[0].mlp.down_proj.weight.mul_(-1)
    (changed,) = engine.generate([[1, 2]], TEN, FixedDepth(4))
    assert changed.token_ids == reference.generate(lm, [1, 2], TEN, FixedDepth(4)).token_ids
    lm.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(-lm.model.layers[0].mlp.down_proj.weight)
    (moved,) = engine.generate([[1, 2]], TEN, FixedDepth(4))
    assert moved.token_ids == reference.generate(lm, [1, 2], TEN, FixedDepth(4)).token_ids


def test_shapes_are_few():
    assert Shape.around(5, 1, 3) == (8, 1, FEWEST_KEYS)
    for keys in range(1, 3000):
        padded = Shape.around(1, 1, keys).keys
        assert keys <= padded <= max(FEWEST_KEYS, 1.125 * keys + 8)
    assert len({Shape.around(1, 1, keys).keys for keys in range(1, 8193)}) <= 64


def test_they_need_a_gpu(make_lm):
    with pytest.raises(UserError, match="cuda_graphs needs a model on a CUDA device, not on cpu"):
        Engine(make_lm(), cuda_graphs=True)
    assert not isinstance(Engine(make_lm())._run_by, GraphedModel)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["scalar_lora", "prelude_coda"])
def test_on_a_gpu_the_text_is_that_without(shape, make_lm, make_prompts):
    lm, prompts = make_lm(shape).cuda(), make_prompts(5, seed=3)
    engine = Engine(lm, max_batch=3)
    assert isinstance(engine._run_by, GraphedModel)
    results = list(engine.generate(prompts, TEN, EXITS))
    for result, expected in zip(
        results, Engine(lm, max_batch=3, cuda_graphs=False).generate(prompts, TEN, EXITS), strict=True
    ):
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
    assert engine._run_by.graphs.passes
