"""Layer duplication: which layer each copies, what stays, and the case in which only the bookkeeping changes."""

import pytest
import torch

import looplm
from looplm.conversion.upcycling import duplicated_layers, upcycle
from looplm.errors import UserError
from looplm.hf.modeling import OuroForCausalLM

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])


def test_orders():
    assert duplicated_layers(3, 6, "stacked") == [0, 1, 2, 0, 1, 2]
    assert duplicated_layers(3, 6, "interleaved") == [0, 0, 1, 1, 2, 2]
    assert duplicated_layers(2, 6, "interleaved") == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("fields", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1}, {"qk_norm": True}], ids=str)
@torch.no_grad()
def test_stacked_at_half_the_loops_is_the_original(make_looped, fields):
    """Exactly, where nothing acts between two loops: no final norm, no injection."""
    model = make_looped(final_norm="none", **fields)
    grown = upcycle(model, 4, "stacked")
    for loops in (1, 2):
        torch.testing.assert_close(
            grown(IDS, num_loops=loops).logits, model(IDS, num_loops=2 * loops).logits, rtol=0, atol=1e-10
        )
    interleaved = upcycle(model, 4, "interleaved")
    assert not torch.allclose(interleaved(IDS, num_loops=2).logits, model(IDS, num_loops=4).logits)


@pytest.mark.parametrize("order", ["stacked", "interleaved"])
@torch.no_grad()
def test_every_layer_and_bank_is_a_copy(make_looped, order):
    model = make_looped(lora_rank=2, injection="scalar", tie_word_embeddings=True, attention_bias=True)
    grown = upcycle(model, 6, order)
    layer_of = duplicated_layers(2, 6, order)
    for new, old in enumerate(layer_of):
        for part in (lambda m: m.layers, lambda m: m.lora):
            expected, found = part(model.model)[old].state_dict(), part(grown.model)[new].state_dict()
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(grown.model.injection.norm.weight, model.model.injection.norm.weight)
    assert torch.equal(grown.model.early_exit_gate.weight, model.model.early_exit_gate.weight)
    assert grown.lm_head.weight is grown.model.embed_tokens.weight
    assert grown.model.config.num_hidden_layers == 6
    assert grown(IDS).logits.isfinite().all()


@torch.no_grad()
def test_the_injection_of_a_layer_goes_with_it(make_looped):
    model = make_looped(injection="concat_layers")
    grown = upcycle(model, 4, "interleaved")
    for new, old in enumerate((0, 0, 1, 1)):
        expected = model.model.injection.layers[old].proj.weight
        assert torch.equal(grown.model.injection.layers[new].proj.weight, expected)


def test_the_original_is_left_alone_and_shares_nothing(make_looped):
    model = make_looped()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    grown = upcycle(model, 4)
    addresses = [parameter.data_ptr() for parameter in [*grown.parameters(), *model.parameters()]]
    assert len(addresses) == len(set(addresses))
    with torch.no_grad():
        for parameter in grown.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_mode_dtype_and_frozen_parameters_carry_over(make_looped):
    model = make_looped().to(torch.bfloat16).train()
    model.requires_grad_(False)
    model.model.early_exit_gate.requires_grad_(True)
    grown = upcycle(model, 4)
    assert grown.training
    assert {parameter.dtype for parameter in grown.parameters()} == {torch.bfloat16}
    trainable = [name for name, parameter in grown.named_parameters() if parameter.requires_grad]
    assert trainable == ["model.early_exit_gate.weight", "model.early_exit_gate.bias"]


def test_it_trains(make_looped):
    grown = upcycle(make_looped().float().train(), 4)
    grown(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in grown.parameters())


@torch.no_grad()
def test_an_ouro_model_stays_one(tmp_path, make_looped):
    from pathlib import Path

    model = looplm.load(Path(__file__).resolve().parents[1] / "golden" / "gqa")
    layers = model.model.config.num_hidden_layers
    grown = upcycle(model, 2 * layers)
    assert isinstance(grown, OuroForCausalLM)
    assert grown.config.max_window_layers == 2 * layers
    assert grown.config.layer_types == ["full_attention"] * (2 * layers)
    again = looplm.load(looplm.save_checkpoint(grown, tmp_path / "grown"))
    assert torch.equal(again(IDS).logits, grown(IDS).logits)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 5])
def test_only_whole_copies(make_looped, wanted):
    with pytest.raises(UserError, match="multiple: 4, 6"):
        upcycle(make_looped(), wanted)


def test_unknown_order(make_looped):
    with pytest.raises(UserError, match="stacked"):
        upcycle(make_looped(), 4, "sideways")
