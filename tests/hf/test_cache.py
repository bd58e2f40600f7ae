"""`generate` and hand-driven caches: cached = uncached for any batch, padding, chunking and depth (float64)."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from looplm.errors import UserError
from looplm.hf.modeling import CACHE_FIELD

ARCHITECTURES = {
    "ouro": {},
    "prelude and coda": {"num_prelude_layers": 1, "num_coda_layers": 1, "loop_state": "raw"},
    "scalar, LoRA": {"injection": "scalar", "lora_rank": 2, "qk_norm": True, "tie_word_embeddings": True},
}


def left_padded() -> tuple[Tensor, Tensor]:
    """Three prompts of 7, 4 and 1 tokens. None is the padding token, which `generate` would mask by itself."""
    ids = torch.randint(1, 37, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :6] = 0
    return ids, mask


@pytest.fixture(params=ARCHITECTURES)
def model(request, make_model):
    return make_model(**ARCHITECTURES[request.param])


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("num_loops", [None, 2, 4])
def test_generate_with_and_without_cache(model, num_loops: int | None, num_beams: int):
    """At the trained depth, below it and above it; beam search reorders the cache of every loop."""
    ids, mask = left_padded()
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "num_loops": num_loops, "num_beams": num_beams}
    cached = model.generate(ids, do_sample=False, use_cache=True, pad_token_id=0, **kwargs)
    assert cached.shape == (3, 13)
    assert torch.equal(cached, model.generate(ids, do_sample=False, use_cache=False, pad_token_id=0, **kwargs))


def test_depth_of_a_call_counts(make_model):
    """Were num_loops lost on its way through `generate`, the tests above would compare a thing with itself."""
    model = make_model()
    ids = torch.randint(1, 37, (4, 5))
    outputs = [model.generate(ids, max_new_tokens=8, do_sample=False, num_loops=n, pad_token_id=0) for n in (1, 3)]
    assert not torch.equal(*outputs)
    model.config.num_loops = 1  # the config's own depth is read at the call, not copied at construction
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), outputs[0])


def test_left_padded_rows_are_those_of_the_prompts_alone(model):
    ids, mask = left_padded()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row].bool()], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(together[row, 7:], alone[0, -6:])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_chunked_prefill(model, name: str):
    """The same cache through calls of 3, 1 and 3 tokens, padded on the left, under either name of the argument."""
    ids, mask = left_padded()
    whole = model(ids, attention_mask=mask)
    kv_cache, start = DynamicCache(), 0
    for stop in (3, 4, 7):
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{name: kv_cache})
        assert out.past_key_values is kv_cache
        real = mask[:, start:stop].bool()
        torch.testing.assert_close(out.logits[real], whole.logits[:, start:stop][real], rtol=0, atol=1e-9)
        start = stop
    assert kv_cache.get_seq_length() == 7


def test_generate_reads_a_prompt_in_chunks(model):
    ids, mask = left_padded()
    kwargs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, prefill_chunk_size=3, **kwargs), model.generate(ids, **kwargs))


def test_generate_goes_on_from_a_cache(make_model):
    model = make_model()
    ids = torch.randint(1, 37, (2, 5))
    kwargs = {"do_sample": False, "pad_token_id": 0}
    first = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **kwargs)
    longer = torch.cat((first.sequences, ids), dim=1)
    with_cache = model.generate(longer, **{CACHE_FIELD: first[CACHE_FIELD]}, max_new_tokens=3, **kwargs)
    assert torch.equal(with_cache, model.generate(longer, max_new_tokens=3, **kwargs))


@torch.no_grad()
def test_a_cache_is_made_only_when_asked_for(make_model):
    model, ids = make_model(), torch.randint(1, 37, (2, 4))
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 4
    assert len(model(ids, use_cache=True).past_key_values) == 3 * 2


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused(make_model):
    model, ids = make_model(), torch.randint(1, 37, (1, 4))
    with pytest.raises(UserError, match=r"DynamicCache with 2 layers does not fit.*R\*L = 6 cache slots"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(UserError, match=r"StaticCache.*R\*L = 6"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(UserError, match="it must be a transformers Cache"):
        model(ids, past_key_values=((torch.zeros(1), torch.zeros(1)),))
    with pytest.raises(UserError, match="two names of one argument"):
        model(ids, past_key_values=DynamicCache(), cache=DynamicCache())
    with pytest.raises(UserError, match="contradicts"):
        model(ids, past_key_values=DynamicCache(), use_cache=False)
    with pytest.raises(UserError, match="cache_implementation is 'static'"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)


@torch.no_grad()
def test_a_cache_filled_at_another_depth_is_refused(make_model):
    """Its deeper slots lack the earlier positions; reading on would be silently wrong."""
    model, ids, kv_cache = make_model(), torch.randint(1, 37, (1, 4)), DynamicCache()
    model(ids, past_key_values=kv_cache, num_loops=2)
    with pytest.raises(UserError, match="holds 4 positions, but only 0 at loop 3 of layer 0"):
        model(ids, past_key_values=kv_cache, num_loops=3)
