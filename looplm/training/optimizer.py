"""AdamW over what a stage trains, the freezing that goes with its objective, and its state from stage to stage."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.lora import trains
from looplm.training.stage_recipe import LastLoopRecipe, LoraRecipe, Objective, OptimizerRecipe, trains_gate_alone

OptimizerState = dict[str, dict[str, Tensor]]
"""AdamW's `step`, `exp_avg` and `exp_avg_sq` by parameter name."""


def freeze_for(
    model: LoopLMForCausalLM, objective: Objective, frozen: Sequence[str] = (), lora: LoraRecipe | None = None
) -> None:
    """Leaves trainable what the objective trains, less what `frozen` names: in Stage II the gate alone, of the last
    loop all else.

    lora: then of the model only the corrections, and what the recipe trains besides.
    frozen: names of parameters within the bare model, or with the head, with wildcards ("embed_tokens.*",
        "lm_head.*"). Raises UserError for a name that fits nothing, and when nothing is left to train.
    """
    gate_only = trains_gate_alone(objective)
    model.requires_grad_(not gate_only)
    model.model.early_exit_gate.requires_grad_(True)
    names = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    if lora is not None:
        for name, parameter in names.items():
            parameter.requires_grad_(trains(name, lora))
    if isinstance(objective, LastLoopRecipe):
        model.model.early_exit_gate.requires_grad_(False)
    for pattern in frozen:
        fitting = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"model.{pattern}")]
        if not fitting:
            raise UserError(
                f"freeze names {pattern!r}, but no parameter is called so; names are like {next(iter(names))}."
            )
        for name in fitting:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("Nothing is left to train: freeze names every parameter that the objective would teach.")


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors and scalars (norms, biases, injection) without weight decay.

    Its state is there from the start, as it is before the first step, so that it can be saved and loaded into at any
    time, for parameters too that get no gradient (the gate, at a depth of 1).
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True
    )
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """State by parameter name, for the next stage's optimizer; not copied."""
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def carry_over(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> bool:
    """Takes over the moments of the stage before, if it trained the very same parameters; says whether it did."""
    here = {name: p for name, p in model.named_parameters() if p in optimizer.state}
    if here.keys() != state.keys() or any(state[name]["exp_avg"].shape != p.shape for name, p in here.items()):
        return False
    for name, parameter in here.items():
        for key, value in optimizer.state[parameter].items():
            value.copy_(state[name][key])
    return True
