"""Per-loop LoRA banks on a looped model that has none (Closing the Loop, 4.4)."""

import dataclasses

import torch

from looplm.conversion.dense_to_looped import new_parameter
from looplm.conversion.exporting import SHELL_FIELDS
from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM


def with_banks(
    model: LoopLMForCausalLM, rank: int, alpha: float = 32.0, num_loops: int | None = None, seed: int = 0
) -> LoopLMForCausalLM:
    """The model with a bank of rank `rank` for each of `num_loops` loops (the model's own when None), all of which
    change nothing until they are trained.

    It is one of ours, whatever `model` was, since the Ouro format has no place for banks, and shares all else with it.
    Raises UserError for a model that has banks.
    """
    config = model.model.config
    if config.lora_rank:
        raise UserError(f"The model has LoRA banks of rank {config.lora_rank} already: train those.")
    loops = config.num_loops if num_loops is None else num_loops
    config = dataclasses.replace(config, lora_rank=rank, lora_alpha=alpha, num_loops=loops)
    shell = {name: getattr(model.config, name) for name in SHELL_FIELDS}
    with torch.device("meta"):
        other = LoopLMForCausalLM(LoopLMConfig.from_model_config(config, **shell))
    other.config.dtype = model.dtype
    generator, like = torch.Generator().manual_seed(seed), model.lm_head.weight
    weights = model.state_dict()
    for name, bank in other.named_parameters():
        if name.startswith("model.lora."):
            weights[name] = new_parameter(name, tuple(bank.shape), config, generator).to(like.device, like.dtype)
    other.load_state_dict(weights, assign=True)
    other.tie_weights()
    other.generation_config = model.generation_config
    return other.train(model.training)
