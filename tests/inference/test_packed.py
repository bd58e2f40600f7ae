"""Packed matrices multiply as the model's own do, follow them when they change, and leave the model as it was."""

import pytest
import torch

from looplm.errors import UserError
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.packed import PackedLinear, PackedModel, can_pack, packed_model
from looplm.inference.sampling import SamplingParams

TEN = SamplingParams(max_tokens=10, logprobs=True)
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)


def wide(make_lm, shape="gqa"):
    return make_lm(shape, hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=101).bfloat16()


@needs_bf16
@pytest.mark.parametrize("shape", ["gqa", "scalar_lora", "prelude_coda"])
def test_texts_are_those_of_the_plain_model(shape, make_lm, make_prompts):
    lm = wide(make_lm, shape)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    prompts = make_prompts(4)
    plain = list(Engine(lm, pack_weights=False).generate(prompts, TEN, QuantileExit(0.5)))
    engine = Engine(lm)
    assert engine._packed is not None and len(engine._packed.layers) > 5
    assert list(engine.generate(prompts, TEN, QuantileExit(0.5))) == plain
    assert {name for name, _ in lm.named_modules() if "packed" in name} == set()
    assert not any(isinstance(module, PackedLinear) for module in lm.modules())
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())


@needs_bf16
def test_weights_that_change_in_place_are_packed_anew(make_lm):
    lm = wide(make_lm)
    engine = Engine(lm, share_prefixes=False)
    (before,) = engine.generate([[1, 2, 3]], TEN, FixedDepth(4))
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
        lm.lm_head.weight.mul_(0.5)
    (after,) = engine.generate([[1, 2, 3]], TEN, FixedDepth(4))
    (fresh,) = Engine(lm, pack_weights=False).generate([[1, 2, 3]], TEN, FixedDepth(4))
    assert after == fresh != before


def test_what_was_computed_with_other_weights_is_not_used_again(make_lm):
    """In any dtype: a prompt that has been read before is read anew."""
    lm = make_lm()
    engine = Engine(lm)
    prompt = [3, 1, 4, 1, 5, 9] * 6
    list(engine.generate([prompt], TEN, FixedDepth(4)))
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    (after,) = engine.generate([prompt], TEN, FixedDepth(4))
    (fresh,) = Engine(lm).generate([prompt], TEN, FixedDepth(4))
    assert after == fresh


def test_weights_that_change_while_a_prompt_is_read(make_lm):
    """It goes on, half old and half new, but serves no other."""
    lm = make_lm()
    engine, prompt = Engine(lm, chunk_size=4), [3, 1, 4, 1, 5, 9] * 6
    (request,) = engine.submit(prompt, TEN, FixedDepth(4))
    engine.step()
    assert request.prefilling
    with torch.no_grad():
        lm.model.layers[0].self_attn.v_proj.weight.mul_(-1.3)
    engine.submit([1, 2, 3], TEN, FixedDepth(4))
    while engine.num_unfinished:
        engine.step()
    (after,) = engine.generate([[*prompt, 5, 6]], TEN, FixedDepth(4))
    (fresh,) = Engine(lm, chunk_size=4).generate([[*prompt, 5, 6]], TEN, FixedDepth(4))
    assert after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-12)
    assert engine.stats.shared_prompt_tokens == 0


def test_another_dtype_wants_another_engine(make_lm):
    lm = make_lm()
    engine = Engine(lm)
    lm.float()
    with pytest.raises(UserError, match="dtype or device has changed"):
        engine.generate([[1, 2, 3]], TEN, FixedDepth(4))


@needs_bf16
def test_a_forward_is_bit_for_bit(make_lm):
    lm = wide(make_lm)
    packed = PackedModel(lm, pack=True, kernels=None)
    input_ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        assert torch.equal(lm.model(input_ids).loop_hidden_states[-1], packed.model(input_ids).loop_hidden_states[-1])


def test_other_dtypes_run_as_they_are(make_lm):
    lm = make_lm()
    assert not can_pack(lm) and packed_model(lm, None, False) is None
    with pytest.raises(UserError, match="pack_weights needs a bfloat16 model"):
        Engine(lm, pack_weights=True)
