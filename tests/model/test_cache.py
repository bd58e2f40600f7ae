"""The exact cache: decoding through it, in any chunks, is the forward over the whole; and how slots are numbered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError
from looplm.model.cache import GrowingKVCache, cache_slot
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedOutput, LoopedTransformer

MakeModel = Callable[..., LoopedTransformer]

WIRINGS = [
    pytest.param({"num_key_value_heads": 4}, id="ouro"),
    pytest.param({"num_key_value_heads": 1, "qk_norm": True}, id="multi-query"),
    pytest.param(
        {
            "num_prelude_layers": 2,
            "num_coda_layers": 1,
            "injection": "scalar",
            "lora_rank": 2,
            "norm_placement": "sandwich",
            "loop_state": "raw",
        },
        id="everything",
    ),
]
TOKENS = 9


def in_chunks(
    model: LoopedTransformer, ids: Tensor, chunks: list[int], mask: Tensor | None = None, num_loops: int | None = None
) -> LoopedOutput:
    """The whole output, computed chunk by chunk through one cache."""
    cache = GrowingKVCache(model.config)
    outs, start = [], 0
    for size in chunks:
        end = start + size
        seen = None if mask is None else mask[:, :end]
        outs.append(model(ids[:, start:end], attention_mask=seen, num_loops=num_loops, cache=cache))
        start = end
        assert cache.seq_len == end
    assert start == ids.shape[1]
    states = zip(*(out.loop_hidden_states for out in outs), strict=True)
    return LoopedOutput(tuple(torch.cat(s, dim=1) for s in states), torch.cat([o.gate_logits for o in outs], dim=2))


def assert_same_at(mask: Tensor, a: LoopedOutput, b: LoopedOutput) -> None:
    for x, y in zip(a.loop_hidden_states, b.loop_hidden_states, strict=True):
        torch.testing.assert_close(x[mask], y[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(a.gate_logits[:, mask], b.gate_logits[:, mask], rtol=0, atol=1e-12)


CHUNKS = [
    pytest.param([1] * TOKENS, id="token-by-token"),
    pytest.param([5, 1, 1, 1, 1], id="prefill-and-decode"),
    pytest.param([4, 3, 2], id="chunked-prefill"),
    pytest.param([TOKENS], id="at-once"),
]


@pytest.mark.parametrize("options", WIRINGS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_cached_equals_uncached(make_model: MakeModel, options: dict[str, Any], chunks: list[int]):
    model = make_model(**options)
    ids = torch.randint(31, (3, TOKENS))
    everywhere = torch.ones(3, TOKENS, dtype=torch.bool)
    assert_same_at(everywhere, in_chunks(model, ids, chunks), model(ids))


@pytest.mark.parametrize("options", WIRINGS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_cached_equals_uncached_in_a_padded_batch(
    make_model: MakeModel, options: dict[str, Any], chunks: list[int], side: str
):
    """Padding to the right of a prompt stands in the middle once tokens have been added behind it."""
    model = make_model(**options)
    ids = torch.randint(31, (3, TOKENS))
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    for row, padding in enumerate((0, 2, 4)):
        if side == "left":
            mask[row, :padding] = 0
        else:
            mask[row, 5 - padding : 5] = 0
    cached = in_chunks(model, ids, chunks, mask)
    assert_same_at(mask.bool(), cached, model(ids, attention_mask=mask))
    for row in range(3):
        real = mask[row].bool()
        alone = model(ids[row, real][None])
        for ours, theirs in zip(cached.loop_hidden_states, alone.loop_hidden_states, strict=True):
            torch.testing.assert_close(ours[row, real], theirs[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_loops", [1, 5])
def test_cached_equals_uncached_at_other_depths(make_model: MakeModel, num_loops: int):
    model = make_model(lora_rank=2)
    ids = torch.randint(31, (2, TOKENS))
    everywhere = torch.ones(2, TOKENS, dtype=torch.bool)
    cached = in_chunks(model, ids, [4, 1, 3, 1], num_loops=num_loops)
    assert_same_at(everywhere, cached, model(ids, num_loops=num_loops))


def test_loops_do_not_share_keys(make_model: MakeModel):
    """Reading another loop's keys is the mistake that generic caches make; it must show."""
    model = make_model()
    ids = torch.randint(31, (1, TOKENS))
    cache = GrowingKVCache(model.config)
    model(ids[:, :-1], cache=cache)
    cache.keys[0], cache.keys[2] = cache.keys[2], cache.keys[0]  # layer 0 of loops 1 and 2
    wrong = model(ids[:, -1:], cache=cache)
    assert (wrong.gate_logits[..., 0] - model(ids).gate_logits[..., -1]).abs().max() > 1e-3


def test_slots_are_numbered_as_in_ouro(make_model: MakeModel):
    model = make_model(num_hidden_layers=3, num_loops=4)
    config = model.config
    assert [cache_slot(config, layer, loop) for loop in range(4) for layer in range(3)] == list(range(12))
    cache = GrowingKVCache(config)
    assert cache.seq_len == 0
    model(torch.randint(31, (2, 5)), cache=cache)
    assert sorted(cache.keys) == sorted(cache.values) == list(range(4 * 3))
    assert all(entry.shape == (2, 5, 2, 6) for entry in (*cache.keys.values(), *cache.values.values()))


def test_prelude_has_one_slot_a_layer_and_coda_one_a_loop(make_config: Callable[..., LoopedConfig]):
    config = make_config(num_prelude_layers=2, num_hidden_layers=3, num_coda_layers=1, num_loops=2)
    first, second = ([cache_slot(config, layer, loop) for layer in range(6)] for loop in range(2))
    assert first == [0, 1, 2, 3, 4, 5]
    assert second == [0, 1, 6, 7, 8, 9]


def test_a_slot_holds_what_its_loop_projected(make_model: MakeModel):
    """The loop-r values are v_proj of what the layer reads in loop r; the keys of position 0 are not rotated."""
    model = make_model(num_hidden_layers=1)
    ids = torch.randint(31, (1, 4))
    cache = GrowingKVCache(model.config)
    out = model(ids, cache=cache)
    state = model.embed_tokens(ids)
    for loop in range(3):
        layer = model.get_submodule("layers.0")
        x = layer.get_submodule("input_layernorm")(state)
        value = layer.get_submodule("self_attn.v_proj")(x).reshape(1, 4, 2, 6)
        key = layer.get_submodule("self_attn.k_proj")(x).reshape(1, 4, 2, 6)
        torch.testing.assert_close(cache.values[loop], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(cache.keys[loop][:, 0], key[:, 0], rtol=0, atol=1e-12)
        assert (cache.keys[loop][:, 1:] - key[:, 1:]).abs().max() > 1e-2
        state = out.loop_hidden_states[loop]


def test_a_deeper_call_after_a_shallow_one_is_refused(make_model: MakeModel):
    """The deeper loops lack the earlier positions; running on would attend to part of the text."""
    model = make_model()
    cache = GrowingKVCache(model.config)
    model(torch.randint(31, (1, 4)), num_loops=1, cache=cache)
    with pytest.raises(UserError, match="ran fewer loops"):
        model(torch.randint(31, (1, 1)), num_loops=3, cache=cache)


def test_rows_at_different_loops_are_refused(make_model: MakeModel):
    cache = GrowingKVCache(make_model().config)
    with pytest.raises(TypeError, match="loop_idx must be an int"):
        cache.update(torch.zeros(2, 1, 2, 6), torch.zeros(2, 1, 2, 6), 0, torch.tensor([0, 1]))
