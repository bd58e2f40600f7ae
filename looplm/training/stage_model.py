"""The model of a run: built for the first stage, changed between stages, gathered to be saved."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from looplm.conversion.dense_to_looped import dense_to_looped
from looplm.conversion.lora_banks import with_banks
from looplm.conversion.upcycling import upcycle
from looplm.errors import UserError
from looplm.hf.adapter import adapt_alike, add_adapter, hold_projections, merge_adapter
from looplm.hf.config import LoopLMConfig
from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM
from looplm.model.config import LoopedConfig
from looplm.training.architectures import stage_changes
from looplm.training.lora import is_named
from looplm.training.recipe import CheckpointModel, ConvertedModel, NewModel, RunRecipe, StartingScales
from looplm.training.stage_recipe import ExpectedLossRecipe, LoraRecipe, StageRecipe


def build_model(recipe: RunRecipe, config: LoopedConfig, tokenizer: PreTrainedTokenizerBase) -> LoopLMForCausalLM:
    """The model that the first stage begins with, in float32 on the CPU; the same on every rank.

    config: what the recipe says it is. Raises UserError for a checkpoint that cannot be loaded or is something else.
    """
    match recipe.model:
        case NewModel():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(recipe.seed)
                model = LoopLMForCausalLM(new_shell_config(config, tokenizer))
                apply_scales(model, recipe.model.scales)
            return model
        case CheckpointModel():
            model = load(recipe.model.path, dtype=torch.float32)
            where = recipe.model.path
        case ConvertedModel():
            model = convert(recipe.model, recipe.seed)
            where = f"{recipe.model.source}, looped,"
    check_architecture(model.model.config, config, where)
    return model


def new_shell_config(config: LoopedConfig, tokenizer: PreTrainedTokenizerBase) -> LoopLMConfig:
    """The config of a new checkpoint, with the tokenizer's special tokens."""
    return LoopLMConfig.from_model_config(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def apply_scales(model: LoopLMForCausalLM, scales: StartingScales) -> None:
    """Sets the sizes of embeddings, branches and state at the start."""
    if scales.embedding is not None:
        nn.init.normal_(model.model.embed_tokens.weight, std=scales.embedding)
    for name, weight in model.model.named_parameters():
        if name.endswith("layernorm_2.weight"):
            nn.init.constant_(weight, scales.branch_norm)
        elif name == "norm.weight":
            nn.init.constant_(weight, scales.final_norm)


def convert(recipe: ConvertedModel, seed: int) -> LoopLMForCausalLM:
    """The dense source, looped as the recipe says."""
    first, _, last = (recipe.core or "").partition(":")
    looped = recipe.architecture
    return dense_to_looped(
        recipe.source,
        num_loops=looped.num_loops,
        injection=looped.injection,
        core=(int(first), int(last)) if recipe.core is not None else None,
        loop_state=looped.loop_state,
        lora_rank=looped.lora_rank,
        lora_alpha=looped.lora_alpha,
        lora_from=recipe.lora_from,
        start_depth=recipe.start_depth,
        dtype=torch.float32,
        seed=seed,
    )


def check_architecture(found: LoopedConfig, wanted: LoopedConfig, where: str) -> None:
    """Raises UserError naming the fields in which a model is not what the recipe says."""
    differences = [
        f"{field.name} is {getattr(found, field.name)}, not {getattr(wanted, field.name)}"
        for field in dataclasses.fields(LoopedConfig)
        # A drawn start matters no more, and a context only bounds what may be asked of the model.
        if field.name not in ("initializer_range", "max_position_embeddings")
        and not _same(getattr(found, field.name), getattr(wanted, field.name))
    ]
    if differences:
        raise UserError(
            f"{where} is not the model that the recipe describes: {'; '.join(differences)}. Correct "
            "model.architecture, or choose another model."
        )


def _same(found: Any, wanted: Any) -> bool:
    # A GGUF file keeps its numbers in float32, where 1e-5 is another one.
    return math.isclose(found, wanted, rel_tol=1e-6) if isinstance(found, float) else found == wanted


def change_for_stage(model: LoopLMForCausalLM, stage: StageRecipe, seed: int = 0) -> LoopLMForCausalLM:
    """The model as `stage` trains it: upcycled, with an adapter, or the same with another RoPE base, depth or context
    in its configs.

    An upcycled or adapted model is a new one, whole even if `model` was sharded. seed: of an adapter's start.
    """
    changes, lora = stage_changes(model.model.config, stage), stage.lora
    if stage.upcycle is not None or lora is not None:
        model = gathered(model)
    if stage.upcycle is not None:
        model = upcycle(model, stage.upcycle.num_layers, stage.upcycle.order)
    if lora is not None and lora.per_loop:
        loops = changes.get("num_loops", model.model.config.num_loops)
        model = with_banks(model, lora.rank, lora.alpha, int(loops), seed)
    elif lora is not None:
        add_adapter(model, lora.rank, lora.alpha, lora.targets, seed)
    if lora is not None and lora.base == "bf16":
        hold_projections(model, lora.targets, torch.bfloat16)
    model.model.config = dataclasses.replace(model.model.config, **changes)
    shell = {name: value for name, value in changes.items() if name != "num_hidden_layers"}
    if isinstance(stage.objective, ExpectedLossRecipe):
        shell["beta"] = stage.objective.beta
    for name, value in shell.items():
        setattr(model.config, name, value)
    return model


def gathered(model: LoopLMForCausalLM) -> LoopLMForCausalLM:
    """The model itself, or a whole copy of a sharded one; then every rank must call this, and each gets a copy."""
    if not isinstance(model, FSDPModule):
        return model
    kind = OuroForCausalLM if isinstance(model, OuroForCausalLM) else LoopLMForCausalLM
    with torch.device("meta"):
        whole = kind(model.config)
    weights = {}
    for name, weight in model.state_dict().items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weights[name] = full.detach().clone()
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    adapt_alike(model, whole)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    whole.generation_config = model.generation_config
    return whole.train(model.training)


def merged_after(model: LoopLMForCausalLM, lora: LoraRecipe) -> LoopLMForCausalLM:
    """The whole model after a LoRA stage, in float32, its adapter merged; banks stay. Changes it in place."""
    if lora.per_loop:
        hold_projections(model, lora.targets, torch.float32)
    merge_adapter(model)
    return model.requires_grad_(True)


def trained_besides(model: LoopLMForCausalLM, lora: LoraRecipe) -> list[str]:
    """Names of the parameters that a LoRA stage has trained besides its corrections."""
    return [name for name, _ in model.named_parameters() if is_named(name, lora.also_train)]


def adapter_directory(run_dir: Path, stage: StageRecipe) -> Path:
    """Where a finished stage's adapter lies, alone."""
    return run_dir / f"{stage.name}-adapter"


def stage_directory(run_dir: Path, stage: StageRecipe) -> Path:
    """Where a finished stage's checkpoint lies."""
    return run_dir / stage.name
