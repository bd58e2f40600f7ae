"""AdamW over what a stage trains, and the freezing that goes with its objective."""

import torch
from torch import nn

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.recipe import GateLossRecipe, Objective, OptimizerRecipe


def freeze_for(model: LoopLMForCausalLM, objective: Objective) -> None:
    """Leaves trainable what the objective trains: the gate alone in Stage II, everything otherwise."""
    gate_only = isinstance(objective, GateLossRecipe)
    model.requires_grad_(not gate_only)
    model.model.early_exit_gate.requires_grad_(True)


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors and scalars (norms, biases, injection) without weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True
    )
