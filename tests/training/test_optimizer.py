"""What is trained, and what is decayed."""

import pytest
import torch

from looplm.errors import UserError
from looplm.training.optimizer import build_optimizer, carry_over, freeze_for, optimizer_state
from looplm.training.stage_recipe import ExpectedLossRecipe, GateLossRecipe, OptimizerRecipe

RECIPE = OptimizerRecipe(lr=2e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_stage_one_trains_everything_and_stage_two_the_gate(make_model):
    model = make_model(tie_word_embeddings=False)
    gate = {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    everything = trainable(model)
    freeze_for(model, GateLossRecipe())
    assert trainable(model) == gate < everything
    freeze_for(model, ExpectedLossRecipe(beta=0.1))
    assert trainable(model) == everything


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_vectors_and_scalars_do_not(make_model, tied: bool):
    model = make_model(tie_word_embeddings=tied, injection="scalar", lora_rank=2, attention_bias=True, qk_norm=True)
    optimizer = build_optimizer(model, RECIPE)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.early_exit_gate.weight"} < decayed
    assert ("lm_head.weight" in decayed) == (not tied)
    assert {"model.norm.weight", "model.injection.logit", "model.early_exit_gate.bias"} < kept
    assert all("norm" in name or "bias" in name or "injection.logit" in name for name in kept)


def test_adam_is_given_what_the_recipe_says(make_model):
    for group in build_optimizer(make_model(), RECIPE).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.9), 1e-6)


def test_only_what_is_trainable_is_in_the_optimizer(make_model):
    model = make_model()
    freeze_for(model, GateLossRecipe())
    parameters = [p for group in build_optimizer(model, RECIPE).param_groups for p in group["params"]]
    assert sum(p.numel() for p in parameters) == 16 + 1
    model.model.early_exit_gate.weight.requires_grad_(False)
    (group,) = build_optimizer(model, RECIPE).param_groups
    assert torch.equal(group["params"][0], model.model.early_exit_gate.bias)
    assert group["weight_decay"] == 0.0


def test_frozen_names_may_leave_out_the_prefix_and_hold_wildcards(make_model):
    model = make_model(tie_word_embeddings=False, num_hidden_layers=2)
    everything = trainable(model)
    freeze_for(model, ExpectedLossRecipe(beta=0.1), ("embed_tokens.*", "lm_head.weight", "model.layers.1.mlp.*"))
    assert everything - trainable(model) == {
        "model.embed_tokens.weight", "lm_head.weight",
        *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    freeze_for(model, ExpectedLossRecipe(beta=0.1))
    assert trainable(model) == everything, "a later stage trains them again"


def test_a_tied_weight_is_frozen_under_either_name(make_model):
    for name in ("lm_head.weight", "embed_tokens.weight"):
        freeze_for(model := make_model(), ExpectedLossRecipe(beta=0.1), (name,))
        assert not model.lm_head.weight.requires_grad


def test_a_name_that_fits_nothing_and_nothing_left_to_train_are_user_errors(make_model):
    with pytest.raises(UserError, match=r"freeze names 'layer\.0\.\*', but no parameter is called so"):
        freeze_for(make_model(), ExpectedLossRecipe(beta=0.1), ("layer.0.*",))
    with pytest.raises(UserError, match="Nothing is left to train"):
        freeze_for(make_model(), GateLossRecipe(), ("early_exit_gate.*",))


def test_its_state_is_there_before_the_first_step_and_adam_s_own(make_model):
    """As torch makes it in the first step, which must not differ for it."""
    models = [make_model(), make_model()]
    ours = build_optimizer(models[0], RECIPE)
    theirs = torch.optim.AdamW(
        [{k: v for k, v in group.items() if k in ("weight_decay",)} | {"params": params}
         for group, params in zip(ours.param_groups, groups_like(ours, *models), strict=True)],
        lr=RECIPE.lr, betas=RECIPE.betas, eps=RECIPE.eps, fused=True,
    )  # fmt: skip
    for _ in range(2):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
        assert ours.state[mine].keys() == theirs.state[other].keys()
        for key, value in theirs.state[other].items():
            assert torch.equal(ours.state[mine][key], value) and ours.state[mine][key].dtype == value.dtype


def groups_like(optimizer, model, other):
    """The parameters of `other` in the groups that those of `model` have."""
    twins = dict(zip(model.parameters(), other.parameters(), strict=True))
    return [[twins[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def stepped(model):
    optimizer = build_optimizer(model, RECIPE)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer


def test_moments_are_carried_over_to_the_same_parameters(make_model):
    model = make_model()
    state = optimizer_state(model, stepped(model))
    fresh = build_optimizer(model, RECIPE)
    assert carry_over(model, fresh, state)
    for name, parameter in model.named_parameters():
        for key, value in fresh.state[parameter].items():
            assert torch.equal(value, state[name][key]) and value is not state[name][key]
    assert {float(s["step"]) for s in fresh.state.values()} == {1.0}


def test_moments_of_other_parameters_are_not_taken_over(make_model):
    model = make_model()
    state = optimizer_state(model, stepped(model))
    for other in (make_model(num_hidden_layers=2), make_model(intermediate_size=32)):
        fresh = build_optimizer(other, RECIPE)
        assert not carry_over(other, fresh, state)
        assert {float(s["step"]) for s in fresh.state.values()} == {0.0}
    freeze_for(model, GateLossRecipe())
    assert not carry_over(model, build_optimizer(model, RECIPE), state)
