"""The shell as a transformers model: loss, packing, tied weights, checkpointing, starting values, refusals."""

from functools import partial

import jaxtyping
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import looplm
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM
from looplm.model.looped import LoopedTransformer
from looplm.objectives import expected_loss

LABELS = torch.tensor([[3, 5, 7, 9, 11, 2], [1, 2, 3, -100, -100, 4]])
IDS = LABELS.clamp(min=0)


def test_loss_is_the_expected_loss_of_the_config(make_model):
    model = make_model(beta=0.3)
    out = model(IDS, labels=LABELS)
    wanted, _ = expected_loss(model, out, LABELS, beta=0.3)
    assert torch.equal(out.loss, wanted)
    assert out.logits.shape == (2, 6, 37)
    assert len(out.loop_hidden_states) == 3
    assert out.gate_logits.shape == (3, 2, 6)
    other, _ = expected_loss(model, out, LABELS, beta=0.0)
    assert not torch.equal(out.loss, other)


def test_loss_is_shared_out_over_the_tokens_of_the_global_batch(make_model):
    """Halves of a batch with unequal numbers of labels add up to the whole, which a mean of means would not."""
    model = make_model()
    num_tokens = torch.tensor(5 + 3)
    parts = [model(IDS[i : i + 1], labels=LABELS[i : i + 1], num_items_in_batch=num_tokens).loss for i in range(2)]
    torch.testing.assert_close(sum(parts), model(IDS, labels=LABELS).loss, rtol=1e-12, atol=0)


def test_logits_to_keep_leaves_the_loss_alone(make_model):
    model = make_model()
    out = model(IDS, labels=LABELS, logits_to_keep=1)
    assert out.logits.shape == (2, 1, 37)
    assert torch.equal(out.loss, model(IDS, labels=LABELS).loss)


def test_apply_head_lends_the_weight(make_model):
    model = make_model()
    assert model.apply_head(lambda weight, a, b: (weight is model.lm_head.weight, a, b), 1, 2) == (True, 1, 2)


@torch.no_grad()
def test_positions_that_restart_separate_documents(make_model):
    """A padding-free row, as TRL packs it: no mask, positions 0 1 2 | 0 | 0 1."""
    model, row = make_model(), IDS[:1]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    packed = model(row, position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in row.split([3, 1, 2], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    documents = torch.tensor([[4, 4, 4, 7, 9, 9]])
    assert torch.equal(model(row, document_ids=documents).logits, packed)
    assert not torch.allclose(model(row).logits, packed)


@torch.no_grad()
def test_positions_that_go_on_do_not(make_model):
    model = make_model()
    ascending = torch.arange(6)[None]
    assert torch.equal(model(IDS, position_ids=ascending).logits, model(IDS).logits)


@torch.no_grad()
def test_loop_states_under_the_usual_name(make_model):
    out = make_model()(IDS, output_hidden_states=True)
    assert out.hidden_states is out.loop_hidden_states
    assert make_model()(IDS).hidden_states is None


@torch.no_grad()
def test_a_boolean_mask_and_a_tuple(make_model):
    model = make_model()
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0
    usual = model(IDS, attention_mask=mask)
    assert torch.equal(model(IDS, attention_mask=mask.bool()).logits, usual.logits)
    assert torch.equal(model(IDS, attention_mask=mask, return_dict=False)[0], usual.logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_loops": 0}, "num_loops is 0"),
        ({"output_attentions": True}, "Attention weights are not available"),
        ({"inputs_embeds": torch.zeros(2, 6, 16)}, "inputs_embeds"),
        ({"attention_mask": torch.ones(2, 7)}, r"shape \(2, 7\); it must be \(batch, 6\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask has the shape"),
    ],
)
def test_refusals(make_model, arguments, message):
    with pytest.raises(UserError, match=message):
        make_model()(IDS, **arguments)


@pytest.mark.parametrize("depth", [1.5, 2.0, "2", True, torch.tensor(2)], ids=repr)
def test_depths_that_are_no_integers(make_model, depth):
    jaxtyping.config.update("jaxtyping_disable", True)  # as for a user
    try:
        with pytest.raises(UserError, match=r"num_loops is .*; it must be an integer"):
            make_model()(IDS, num_loops=depth)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_a_misspelt_argument_is_an_error(make_model):
    model = make_model()
    for call in (model, model.base_model):
        with pytest.raises(TypeError, match="no argument named num_loop"):
            call(IDS, num_loop=2)


@torch.no_grad()
def test_what_a_trainer_with_a_head_of_its_own_calls(make_model):
    """TRL asks the base model for its last hidden state and sends the starts of documents along in other words."""
    model, positions = make_model(), torch.tensor([[0, 1, 2, 0, 0, 1]])
    starts = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 6]), "max_length_q": 3, "seq_idx": torch.tensor([[0]])}
    usual = model(IDS[:1], position_ids=positions)
    packed = model.base_model(IDS[:1], position_ids=positions, use_cache=False, **starts)
    assert torch.equal(packed.last_hidden_state, usual.loop_hidden_states[-1])
    assert torch.equal(model.get_output_embeddings()(packed.last_hidden_state), usual.logits)
    shallow = model.base_model(IDS, num_loops=1).last_hidden_state
    assert torch.equal(shallow, model(IDS).loop_hidden_states[0])
    for call in (model, model.base_model):
        with pytest.raises(UserError, match="need position_ids that restart"):
            call(IDS[:1], **starts)
    with pytest.raises(UserError, match="fills no cache"):
        model.base_model(IDS, use_cache=True)


def test_expected_loss_for_trainers_that_compute_it(make_model):
    model = make_model(beta=0.3)
    loss = model.expected_loss(model(IDS), LABELS, num_items_in_batch=4)
    assert torch.equal(loss, model(IDS, labels=LABELS, num_items_in_batch=4).loss)


def test_tied_weights_are_one_parameter(make_config):
    tied = LoopLMForCausalLM(make_config(tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    free = LoopLMForCausalLM(make_config())
    assert free.lm_head.weight is not free.model.embed_tokens.weight
    assert tied.num_parameters() == free.num_parameters() - 37 * 16


def test_resized_vocabulary(make_config):
    model = LoopLMForCausalLM(make_config(tie_word_embeddings=True))
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model(torch.tensor([[39]])).logits.shape == (1, 1, 40)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.vocab_size, model.model.config.vocab_size) == (40, 40)


@pytest.mark.parametrize("injection", ["none", "scalar", "add", "concat"])
def test_starting_values_are_those_of_the_model(make_config, injection: str):
    """transformers would draw them again, and part of the concat injection would not survive that."""
    config = make_config(injection=injection, lora_rank=2, norm_placement="sandwich")
    torch.manual_seed(3)
    shell = LoopLMForCausalLM(config)
    torch.manual_seed(3)
    bare = LoopedTransformer(config.to_model_config())
    for name, parameter in bare.named_parameters():
        assert torch.equal(shell.model.get_parameter(name), parameter), name
    assert 0.2 < shell.lm_head.weight.std() < 0.4


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_activation_checkpointing_changes_no_gradient(make_model, every_n_layers: int, use_reentrant: bool):
    model = make_model(lora_rank=2, injection="scalar", num_coda_layers=1).train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(IDS, labels=LABELS).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    calls: list[object] = []

    def counting(function, *args):
        calls.append(args[0])
        return checkpoint(function, *args, use_reentrant=use_reentrant)

    model._set_gradient_checkpointing(True, counting, every_n_layers=every_n_layers)
    for ours, theirs in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert len(calls) == {1: 2 * 3 + 3, 2: 1 * 3 + 3}[every_n_layers]  # layers times loops; the coda is layer 2
    with pytest.raises(UserError, match="activation checkpointing"):
        model(IDS, use_cache=True)
    with torch.no_grad():
        assert model(IDS, use_cache=True).past_key_values is not None
    model._set_gradient_checkpointing(False, partial(pytest.fail, "still in use"))
    gradients()


def test_auto_classes(make_config, tied_ouro, tmp_path):
    looplm.register()
    looplm.register()
    ouro = AutoModelForCausalLM.from_pretrained(tied_ouro)
    assert type(ouro) is OuroForCausalLM
    assert torch.equal(ouro.lm_head.weight, looplm.load(tied_ouro).lm_head.weight)
    assert ouro.lm_head.weight is ouro.model.embed_tokens.weight
    model = AutoModelForCausalLM.from_config(make_config(injection="concat", lora_rank=2))
    assert type(model) is LoopLMForCausalLM
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_model_config() == model.config.to_model_config()
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)
