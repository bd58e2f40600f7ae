"""Kernels of this CPU do what the model's own layers do, in place; without them PyTorch does it and says so."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from looplm.errors import UserError
from looplm.inference import native
from looplm.inference.blocks import BLOCK_SIZE
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.layout import Segment, lay_out
from looplm.inference.memory import Memory
from looplm.inference.native_block import FEW, NativeBlock
from looplm.inference.native_pass import NativeTransformer
from looplm.inference.packed import PackedModel, kernels_for, packed_model
from looplm.inference.passes import core_pass
from looplm.inference.request import Request
from looplm.inference.sampling import SamplingParams
from looplm.model.norm import RMSNorm

TEN = SamplingParams(max_tokens=10, logprobs=True)
built = not isinstance(native.library(), native.Unavailable)
needs_kernels = pytest.mark.skipif(not built, reason="there is no C++ compiler here")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
PLACEMENTS = ["ouro", "pre", "magic", "post", "sandwich"]


def filled_memory(model, strategy="per_loop", positions=40):
    """A memory with two requests of 40 positions whose places do not lie side by side, and keys everywhere."""
    memory = Memory(model, strategy, num_slots=3, num_blocks=2 * -(-positions // BLOCK_SIZE) + 3, num_loops=4)
    taken = memory.blocks.take(2)
    for slot in (2, 0):
        request = Request(
            index=0, sample=0, parts=[[1] * positions], sampling=TEN, exit=FixedDepth(4), max_loops=4,
            end_token_ids=frozenset(), generator=None,
        )  # fmt: skip
        assert memory.reserve(request, slot, [])
        if taken:
            memory.blocks.drop(taken[:1])
            taken = taken[1:]
    generator = torch.Generator().manual_seed(3)
    for stored in (*memory.cache.keys, *memory.cache.values):
        stored.copy_(torch.randn(stored.shape, generator=generator, dtype=torch.float64))
    return memory


def both_ways(lm, dtype, strategy, segments):
    """One core pass over `segments`, by kernels and by PyTorch: states, and all keys and values."""
    lm = lm.to(dtype)
    native_model = PackedModel(lm, pack=False, kernels=kernels_for(lm.model)).model
    results = []
    for model, width in ((native_model, 1), (lm.model, None)):
        memory = filled_memory(lm.model, strategy)
        layout = lay_out(segments, memory.device, width)
        context, at = memory.context(layout, layout.loop_idx, in_place=width == 1)
        states = torch.randn(memory.states.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
            dtype
        )
        with torch.inference_mode():
            memory.states[at] = model.run_core(states[at], layout.loop_idx, states[at].flip(-1), context)
        memory.states[memory.cache.trash_place] = 0
        for stored in (*memory.cache.keys, *memory.cache.values):
            stored[memory.cache.trash_place :: memory.cache.stride] = 0
        results.append((memory.states, *memory.cache.keys, *memory.cache.values))
    return results


MIXED = [Segment(2, 1, 20, 24), Segment(0, 3, 0, 1), Segment(2, 0, 30, 31), Segment(0, 0, 38, 40)]


@needs_kernels
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("shape", ["ouro", "gqa", "scalar_lora", "raw_state"])
def test_a_pass_is_that_of_pytorch(shape, few, make_lm, monkeypatch):
    monkeypatch.setitem(FEW, torch.float64, few)
    for ours, theirs in zip(*both_ways(make_lm(shape), torch.float64, "per_loop", MIXED), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@needs_kernels
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_norm_placement(placement, few, make_lm, monkeypatch):
    monkeypatch.setitem(FEW, torch.float64, few)
    lm = make_lm("gqa", norm_placement=placement, mlp_bias=True, attention_output_bias=True)
    for ours, theirs in zip(*both_ways(lm, torch.float64, "per_loop", MIXED), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@needs_kernels
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 50])
def test_whole_vectors_and_what_is_left_over(head_dim, dtype, few, make_lm, monkeypatch):
    """Sizes that fill 64 bytes, and sizes that do not."""
    monkeypatch.setitem(FEW, dtype, few)
    hidden, wide = (128, 192) if head_dim != 50 else (75, 53)
    lm = make_lm("gqa", hidden_size=hidden, intermediate_size=wide, head_dim=head_dim)
    for ours, theirs in zip(*both_ways(lm, dtype, "per_loop", MIXED), strict=True):
        size = theirs.abs().max().item()
        assert (ours - theirs).abs().max().item() <= TOLERANCE[dtype] * size


@needs_kernels
@pytest.mark.parametrize("strategy", ["fill", "last", "mean", "first"])
def test_every_cache_strategy(strategy, make_lm):
    segments = [Segment(2, 1, 20, 21), Segment(0, 0, 38, 39)]
    for ours, theirs in zip(*both_ways(make_lm("gqa"), torch.float64, strategy, segments), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_work(threads, make_lm):
    lm = make_lm("gqa").double()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for ours, theirs in zip(*both_ways(lm, torch.float64, "per_loop", MIXED), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_long_texts_are_read_by_all_threads_and_get_the_same_bits(dtype, make_lm):
    """One row, or three, of more than two stretches of places; alone or beside others; by one thread or more."""
    lm = make_lm("gqa", max_position_embeddings=1024).to(dtype)
    model = PackedModel(lm, pack=False, kernels=kernels_for(lm.model)).model
    together = [Segment(2, 1, 650, 651), Segment(0, 0, 600, 602)]
    alone = [Segment(2, 1, 650, 651), Segment(0, 0, 600, 601), Segment(0, 0, 601, 602)]
    before, states = torch.get_num_threads(), []
    for passes, threads, run_by in (
        ([together], 1, model), ([together], 2, model), ([[one] for one in alone], 2, model), ([together], 1, lm.model)
    ):  # fmt: skip
        memory = filled_memory(lm.model, positions=700)
        memory.states.copy_(torch.randn(memory.states.shape, generator=torch.Generator().manual_seed(5)))
        try:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for segments in passes:
                    core_pass(run_by, memory, segments, [[]] * len(segments), changes=False)
        finally:
            torch.set_num_threads(before)
        memory.states[memory.cache.trash_place] = 0  # PyTorch's padding goes there
        states.append(memory.states)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    torch.testing.assert_close(states[0], states[3], atol=TOLERANCE[dtype] * 10, rtol=TOLERANCE[dtype])


WHOLE = [
    {},
    {"injection": "scalar"},
    {"injection": "concat", "loop_state": "raw"},
    {"norm_placement": "magic", "final_norm": "frms"},
    {"num_prelude_layers": 1, "injection": "add"},
    {"num_coda_layers": 1, "coda_input": "raw"},
    {"final_norm": "none"},
    {"injection": "concat_layers"},  # not in one call: it stands between the layers
]


@needs_kernels
@pytest.mark.parametrize("strategy", ["per_loop", "last"])
@pytest.mark.parametrize("shape", WHOLE, ids=lambda shape: "-".join(map(str, shape.values())) or "plain")
def test_a_whole_pass_in_one_call_is_that_of_pytorch(shape, strategy, make_lm, monkeypatch):
    """New positions, and such that go on at other loops; everything that a pass leaves behind."""
    lm = make_lm("gqa", **shape)
    calls = []
    run = NativeTransformer.run
    monkeypatch.setattr(NativeTransformer, "run", lambda *given: calls.append(1) or run(*given))
    segments, tokens = [Segment(2, 1, 20, 24), Segment(0, 0, 38, 40), Segment(2, 3, 3, 4)], [[], [7, 2], []]
    results = []
    for model in (PackedModel(lm, pack=False, kernels=kernels_for(lm.model)).model, lm.model):
        memory = filled_memory(lm.model, strategy)
        generator = torch.Generator().manual_seed(5)
        for kept in (memory.states, memory.hidden, memory.embeds):
            if kept is not None:
                kept.copy_(torch.randn(kept.shape, generator=generator, dtype=torch.float64))
        with torch.inference_mode():
            work = core_pass(model, memory, segments, tokens, changes=False)
        assert work == (1, 7, 0)
        # PyTorch lays out a rectangle, whose padding writes to the place that nobody reads.
        trash = memory.cache.trash_place
        for stored in (memory.states, memory.hidden, *memory.cache.keys, *memory.cache.values):
            stored[trash :: memory.cache.stride] = 0
        memory.gate_logits[:, trash] = 0
        left = [memory.states, memory.hidden, memory.gate_logits, *memory.cache.keys, *memory.cache.values]
        results.append(left if memory.embeds is None else [*left, memory.embeds[:trash]])
    assert calls == ([] if lm.model.config.injection == "concat_layers" else [1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_first_of_the_largest(dtype):
    kernels = native.Kernels(dtype)
    logits = torch.randn(5, 77).to(dtype)
    logits[0, [8, 70]] = logits[0].max() + 1  # equal: the first
    logits[1, 76], logits[2, 3], logits[3, 76] = float("nan"), float("inf"), -float("inf")
    logits[4] = torch.finfo(dtype).min
    assert kernels.best(logits) == [8, -1, -1, -1, 0]


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_of_a_few_rows(bias):
    kernels, head = native.Kernels(torch.float64), torch.nn.Linear(19, 30, bias, dtype=torch.float64)
    for rows in (1, 3, 4, 9):
        x = torch.randn(rows, 19, dtype=torch.float64)
        torch.testing.assert_close(kernels.linear(x, head.weight, head.bias), head(x), atol=1e-13, rtol=1e-13)


@needs_kernels
def test_a_row_gets_the_same_bits_beside_others(make_lm):
    """In bfloat16 too, where a few rows are concerned: drafts that are tested together stand as they would alone."""
    lm = make_lm("gqa", hidden_size=64, vocab_size=301).bfloat16()
    head = PackedModel(lm, pack=False, kernels=kernels_for(lm.model)).lm_head
    x = torch.randn(16, 64).bfloat16()
    together = head(x)
    for row in range(16):
        assert torch.equal(head(x[row : row + 1])[0], together[row])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_of_any_width_do_not_depend_on_other_rows(dtype):
    """Also where the width leaves a rest that fills no vector."""
    kernels, generator = native.Kernels(dtype), torch.Generator().manual_seed(0)
    for size in (5, 8, 12, 24, 33, 40, 72):
        x, weight, bias = (
            torch.randn(*shape, generator=generator).to(dtype) for shape in ((32, size), (37, size), (37,))
        )
        alone = torch.cat([kernels.linear(row[None], weight, bias) for row in x])
        for rows in (2, 3, 4, 5, 7, 32):
            assert torch.equal(kernels.linear(x[:rows], weight, bias), alone[:rows]), (size, rows)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_position_gets_the_same_bits_in_a_pass_of_its_own(dtype, make_lm):
    lm = make_lm("gqa", hidden_size=64, intermediate_size=96, head_dim=16).to(dtype)
    model = PackedModel(lm, pack=False, kernels=kernels_for(lm.model)).model
    together = [Segment(2, 1, 20, 27), Segment(0, 3, 5, 6), Segment(2, 0, 30, 33)]
    alone = [Segment(s.slot, s.loop_idx, p, p + 1) for s in together for p in range(s.start, s.stop)]
    states = []
    for passes in ([together], [[segment] for segment in alone]):
        memory = filled_memory(lm.model)
        memory.states.copy_(torch.randn(memory.states.shape, generator=torch.Generator().manual_seed(5)))
        with torch.inference_mode():
            for segments in passes:
                core_pass(model, memory, segments, [[]] * len(segments), changes=False)
        states.append(memory.states)
    assert torch.equal(*states)


@needs_kernels
def test_texts_are_those_of_pytorch(make_lm, make_prompts):
    lm, prompts = make_lm("gqa"), make_prompts(6)
    engine = Engine(lm, native_kernels=True)
    assert engine._packed is not None and all(isinstance(b, NativeBlock) for b in engine._packed.model.layers)
    ours = list(engine.generate(prompts, TEN, QuantileExit(0.5)))
    theirs = list(Engine(lm, native_kernels=False).generate(prompts, TEN, QuantileExit(0.5)))
    assert [(r.token_ids, r.loops) for r in ours] == [(r.token_ids, r.loops) for r in theirs]
    assert not any(isinstance(module, NativeBlock) for module in lm.modules())


@needs_kernels
def test_numbers_that_are_not_finite_stay_so(make_lm):
    lm = make_lm("ouro")
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    (result,) = Engine(lm, native_kernels=True).generate([[1, 2, 3]], TEN, FixedDepth(4))
    assert result.finish_reason == "error"


@needs_kernels
def test_weights_that_are_replaced_are_noticed(make_lm):
    lm = make_lm()
    engine = Engine(lm, native_kernels=True)
    list(engine.generate([[1, 2, 3]], TEN, FixedDepth(4)))
    layer = lm.model.layers[0].mlp.up_proj
    layer.weight.data = -1.5 * layer.weight.data
    (after,) = engine.generate([[1, 2, 3]], TEN, FixedDepth(4))
    (fresh,) = Engine(lm, native_kernels=False).generate([[1, 2, 3]], TEN, FixedDepth(4))
    assert after.token_ids == fresh.token_ids


# --- Where there are none -------------------------------------------------------------------------------------


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """A machine on which nothing has been built yet."""
    native.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    native.library.cache_clear()


def assert_pytorch_does_it(lm, caplog, reason):
    caplog.set_level(logging.INFO)
    (result,) = Engine(lm).generate([[1, 2, 3]], TEN, FixedDepth(4))
    assert len(result.token_ids) == 10
    assert reason in caplog.text and "PyTorch alone" in caplog.text
    with pytest.raises(UserError, match="native_kernels cannot be had"):
        Engine(lm, native_kernels=True)


def test_without_a_compiler(no_library, make_lm, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(no_library))
    monkeypatch.delenv("CXX", raising=False)
    assert_pytorch_does_it(make_lm(), caplog, "no C++ compiler was found")


def test_with_a_compiler_that_fails(no_library, make_lm, monkeypatch, caplog):
    broken = no_library / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho cannot do that >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert_pytorch_does_it(make_lm(), caplog, "could not build them: cannot do that")


def test_with_a_home_that_is_no_directory(no_library, make_lm, monkeypatch, caplog):
    file = no_library / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setenv("CXX", sys.executable)  # answers --version; is not asked for more
    assert_pytorch_does_it(make_lm(), caplog, "could not build them")


@pytest.mark.parametrize("way", ["hook", "forward", "dtypes"])
def test_a_model_that_is_not_plain_runs_as_it_is(way, make_lm):
    lm = make_lm()
    if way == "hook":
        lm.model.layers[0].register_forward_hook(lambda *_: None)
    elif way == "forward":
        lm.model.run_core = lm.model.run_core
    else:
        lm.model.norm.float()
    assert packed_model(lm, False) is None


class DoubledNorm(RMSNorm):
    """Not what its class says: twice as large."""

    def forward(self, x):
        return 2 * super().forward(x)


@needs_kernels
@pytest.mark.parametrize("way", ["layer norm", "subclass", "eps", "eps of a layer", "exit eps"])
def test_norms_that_the_kernels_do_not_know_are_pytorch_s(way, make_lm):
    lm = make_lm("ouro", norm_placement="magic" if way == "exit eps" else "ouro")
    if way == "layer norm":
        lm.model.norm = torch.nn.LayerNorm(12).double()
    elif way == "subclass":
        lm.model.norm.__class__ = DoubledNorm
    else:
        layer = lm.model.layers[0].input_layernorm
        {"eps": lm.model.norm, "eps of a layer": layer, "exit eps": lm.model.core_exit_norm}[way].eps = 0.5
    ours, theirs = (
        next(Engine(lm, native_kernels=native).generate([[1, 2, 3]], TEN, FixedDepth(4))) for native in (None, False)
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)


@needs_kernels
def test_two_processes_may_build_at_one_time(tmp_path):
    code = "from looplm.inference import native; print(type(native.library()).__name__)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["CDLL", "CDLL"]
    assert [path.suffix for path in (tmp_path / "looplm").iterdir()] == [".so"]


def test_nothing_is_built_at_import():
    code = "import looplm.inference; from looplm.inference import native; print(native.library.cache_info().currsize)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"
