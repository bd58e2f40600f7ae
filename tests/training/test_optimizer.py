"""What is trained, and what is decayed."""

import pytest
import torch

from looplm.training.optimizer import build_optimizer, freeze_for
from looplm.training.recipe import ExpectedLossRecipe, GateLossRecipe, OptimizerRecipe

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
