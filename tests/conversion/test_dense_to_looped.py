"""Conversion against transformers' own implementations: at one loop nothing has changed, whatever was asked for."""

import math

import pytest
import torch

import looplm
from looplm.conversion.dense_to_looped import Looping, dense_to_looped, looped_config, start_gate_bias
from looplm.errors import UserError
from looplm.model.config import LoopedConfig
from looplm.model.flops import count_parameters
from looplm.model.gate import expected_loops

DENSE = [
    "llama",
    "llama_tied",
    "llama_biases",
    "llama3_rope",
    "linear_rope",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_yarn",
    "qwen3_mscale",
]
IDS = torch.tensor([[5, 9, 2, 7, 31, 30, 4, 4, 11, 20, 1, 36, 8, 8, 3, 17, 6, 25, 12, 33, 2, 14, 35, 0, 19, 10] * 2])


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_one_loop_is_the_dense_model(make_dense, name):
    dense = make_dense(name)
    looped = dense_to_looped(dense)
    torch.testing.assert_close(looped(IDS, num_loops=1).logits, dense(IDS).logits, rtol=0, atol=1e-10)
    assert not torch.allclose(looped(IDS, num_loops=2).logits, dense(IDS).logits)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_yarn", "qwen3"])
@torch.no_grad()
def test_from_a_directory_in_its_own_dtype(save_dense, make_dense, name, tmp_path):
    directory = save_dense(name)
    looped = dense_to_looped(directory)
    assert {parameter.dtype for parameter in looped.parameters()} == {torch.float32}
    dense = make_dense(name).float()
    torch.testing.assert_close(looped(IDS, num_loops=1).logits, dense(IDS).logits, rtol=0, atol=1e-5)
    again = looplm.load(looplm.save_checkpoint(looped, tmp_path / "looped"))
    assert torch.equal(again(IDS).logits, looped(IDS).logits)
    assert dense_to_looped(directory, dtype="bf16").dtype == torch.bfloat16


@pytest.mark.parametrize("injection", ["none", "scalar", "add", "concat", "concat_layers"])
@pytest.mark.parametrize(("core", "counts"), [(None, (0, 6, 0)), ((2, 4), (2, 2, 2)), ((2, 6), (2, 4, 0))], ids=str)
@torch.no_grad()
def test_injection_and_split_leave_the_first_loop_alone(make_dense, injection, core, counts):
    dense = make_dense("qwen3")
    looped = dense_to_looped(dense, core=core, injection=injection, lora_rank=2, num_loops=2)
    config = looped.model.config
    assert (config.num_prelude_layers, config.num_hidden_layers, config.num_coda_layers) == counts
    torch.testing.assert_close(looped(IDS, num_loops=1).logits, dense(IDS).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("core", [None, (2, 4)])
@torch.no_grad()
def test_later_loops_are_what_the_options_say(make_dense, core):
    """Loop 2 by hand, from transformers' own layers: they run again on what injection makes of state and embedding."""
    dense = make_dense("llama")
    first, last = core or (0, 6)
    looped = dense_to_looped(dense, core=core, lora_rank=2)

    def run(x, layers):
        positions = torch.arange(IDS.shape[1])[None]
        rope = dense.model.rotary_emb(x, positions)
        for layer in layers:
            x = layer(x, position_embeddings=rope, attention_mask=None)
        return x

    layers = dense.model.layers
    embeds = run(dense.model.embed_tokens(IDS), layers[:first])
    raw = run(embeds, layers[first:last])
    state = raw if core else dense.model.norm(raw)
    size = embeds.square().mean(-1).sqrt().median() if core else dense.model.embed_tokens.weight.square().mean().sqrt()
    if core:
        size = looped.model.injection.norm.weight[0]  # over other tokens
    unit = state / (state.square().mean(-1, keepdim=True) + dense.config.rms_norm_eps).sqrt()
    w = 1 / (1 + math.exp(-looped.model.injection.logit.item()))
    assert w == pytest.approx(0.99, abs=1e-4)
    raw = run(w * embeds + (1 - w) * size * unit, layers[first:last])
    expected = dense.lm_head(dense.model.norm(run(raw, layers[last:])))
    torch.testing.assert_close(looped(IDS, num_loops=2).logits, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_concat_starts_as_no_injection(make_dense):
    dense = make_dense("llama")
    kinds = ("none", "concat", "add", "concat_layers", "concat_random")
    none, concat, add, layers, random = (dense_to_looped(dense, injection=kind)(IDS).logits for kind in kinds)
    assert torch.equal(concat, none) and torch.equal(layers, none)
    assert not torch.allclose(add, none) and not torch.allclose(random, none)


@torch.no_grad()
def test_the_injection_norm_has_the_size_of_what_enters_the_core(make_dense):
    dense = make_dense("llama")
    size = dense_to_looped(dense).model.injection.norm.weight
    assert torch.allclose(size, dense.model.embed_tokens.weight.square().mean().sqrt())
    looped = dense_to_looped(dense, core=(2, 6), calibration_ids=IDS)
    bare = looped.model
    entering = bare.encode(IDS, bare.context(IDS))
    assert torch.allclose(bare.injection.norm.weight, entering.square().mean(-1).sqrt().median())


@pytest.mark.parametrize(("loops", "depth"), [(3, None), (3, 1.2), (4, 3.5), (8, 2.0), (1, None)])
@torch.no_grad()
def test_depth_starts_where_asked(make_dense, loops, depth):
    looped = dense_to_looped(make_dense("llama"), num_loops=loops, start_depth=depth)
    found = expected_loops(looped(IDS).gate_logits)
    assert torch.allclose(found, torch.tensor(depth or (1 + loops) / 2, dtype=found.dtype), atol=1e-9)


@pytest.mark.parametrize("depth", [0.0, 1.0, 3.0, 7.0, float("nan")])
def test_a_depth_that_no_hazard_gives(depth):
    with pytest.raises(UserError, match="between 1 and 3"):
        start_gate_bias(3, depth)


def test_special_tokens_and_generation_settings_carry_over(save_dense):
    directory = save_dense("qwen3", eos_token_id=[2, 5])
    looped = dense_to_looped(directory)
    assert (looped.config.bos_token_id, looped.config.eos_token_id) == (1, [2, 5])
    assert looped.generation_config.eos_token_id == [2, 5]


def test_a_model_in_memory_is_copied(make_dense):
    dense = make_dense("llama")
    looped = dense_to_looped(dense)
    assert not {p.data_ptr() for p in looped.parameters()} & {p.data_ptr() for p in dense.parameters()}


def test_the_loops_train(make_dense):
    looped = dense_to_looped(make_dense("llama"), lora_rank=2, core=(1, 5)).train()
    looped(IDS, labels=IDS).loss.backward()
    silent = [name for name, p in looped.named_parameters() if p.grad is None]
    assert silent == []


# --- The paper's shape ----------------------------------------------------------------------------------------------

QWEN3_1P7B = LoopedConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    num_loops=1,
    norm_placement="pre",
    qk_norm=True,
    tie_word_embeddings=True,
)


def test_parameter_totals_of_the_paper():
    """Closing the Loop, section 4.4: rank 32 on three loops of Qwen3-1.7B, counted with the head apart and tied."""
    count = count_parameters(looped_config(QWEN3_1P7B, Looping(lora_rank=32)))
    assert count.lora == 104_595_456
    assert (count.gate, count.injection) == (2049, 2049)
    assert count.total_separate_head == 2_136_339_458
    assert count.total == 1_825_174_530


# --- Options that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core": (4, 2)}, "core is 4:2"),
        ({"core": (0, 7)}, "core is 0:7; it must lie within the model's layers, 0:6"),
        ({"num_loops": 0}, "num_loops is 0"),
        ({"lora_from": "svd"}, "lora_rank of 1 or more, injection none"),
        ({"lora_from": "svd", "lora_rank": 2, "injection": "none", "num_loops": 4}, "core's 6 layers are no multiple"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_rank": 100_000_000}, "lora_rank is 100,000,000; the matrices of this model"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(make_dense, options, message):
    with pytest.raises(UserError, match=message):
        dense_to_looped(make_dense("llama"), **options)


@pytest.mark.parametrize("name", ["llama3_rope", "qwen3_yarn"])
@pytest.mark.parametrize("loops", [1, 2])
@torch.no_grad()
def test_the_engine_runs_what_was_converted(make_dense, name, loops):
    """Scaled positions, a prelude, and a coda that reads raw states: cached and early as in one forward."""
    looped = dense_to_looped(make_dense(name), core=(1, 4), lora_rank=2)
    with torch.no_grad():
        for bank in looped.model.lora.parameters():
            bank.normal_(std=0.1)
    prompt = IDS[0, :20].tolist()
    sampling = looplm.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine = looplm.Engine(looped, None)
    (result,) = engine.generate([prompt], sampling, looplm.FixedDepth(loops))
    text = prompt
    for _ in range(20):
        logits = looped(torch.tensor([text]), num_loops=loops).logits[0, -1]
        text = [*text, int(logits.argmax())]
    assert result.token_ids == text[len(prompt) :]
