"""One micro-batch: all loops forward, and what the stage's objective makes of them."""

import torch
from torch import Tensor

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss, gate_loss, geometric_prior, last_loop_loss, routing_loss
from looplm.objectives.expected_loss import Metrics
from looplm.training.rows import Batch
from looplm.training.stage_recipe import (
    ExpectedLossRecipe,
    GateLossRecipe,
    GeometricPrior,
    LastLoopRecipe,
    StageRecipe,
)


def weigh_loops(
    model: LoopLMForCausalLM, batch: Batch, stage: StageRecipe, num_loops: int, num_tokens: int
) -> tuple[Tensor, Metrics]:
    """The stage's loss of a batch run at `num_loops`, and its metrics.

    num_tokens: predicted tokens of the whole step, all micro-batches and ranks; losses and metrics of the parts then
        add up. Run it through `model.within`, so that a sharded model is gathered once for trunk and head.
    """
    output = model.model(
        batch["input_ids"],
        document_ids=batch["document_ids"],
        num_loops=num_loops,
        backprop_loops=stage.backprop_loops,
    )
    labels, recipe = batch["labels"], stage.objective
    if isinstance(recipe, GateLossRecipe):
        return gate_loss(model, output, labels, label_shift=recipe.label_shift, num_tokens=num_tokens)
    if isinstance(recipe, LastLoopRecipe):
        return last_loop_loss(model, output, labels, num_tokens=num_tokens)
    if isinstance(recipe, ExpectedLossRecipe):
        prior = None  # the entropy: a uniform prior up to a constant
        if isinstance(recipe.prior, GeometricPrior):
            prior = geometric_prior(num_loops, recipe.prior.stop).to(output.gate_logits.device, torch.float32)
        return expected_loss(
            model, output, labels,
            beta=recipe.beta, smoothing=recipe.smoothing, prior=prior, num_tokens=num_tokens,
        )  # fmt: skip
    return routing_loss(model, output, labels, gate_weight=recipe.gate_weight, num_tokens=num_tokens)
