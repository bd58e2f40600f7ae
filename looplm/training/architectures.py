"""Which model each stage of a recipe trains, from the recipe alone: shapes, not weights."""

import dataclasses
from typing import TYPE_CHECKING

from looplm.conversion.dense_source import any_tokenizer
from looplm.conversion.upcycling import duplicated_layers
from looplm.data.tokenizer import require_vocabulary
from looplm.errors import UserError
from looplm.hf.checkpoint import CONFIG, find_checkpoint, read_config
from looplm.model.config import LoopedConfig
from looplm.model.flops import parameter_shapes
from looplm.training.lora import is_adapted, is_named, lora_shapes
from looplm.training.memory import deepest, is_trained, shallowest
from looplm.training.recipe import CheckpointModel, RunRecipe, TrainTokenizer
from looplm.training.stage_recipe import ExpectedLossRecipe, RoutingRecipe, StageRecipe, trains_gate_alone
from looplm.training.steps import StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def starting_config(recipe: RunRecipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> LoopedConfig:
    """The model as the first stage finds it.

    Without a `tokenizer`, as for a plan, sizes come from the recipe, and a checkpoint or tokenizer is looked for only
    where the recipe leaves something open. Raises UserError for a checkpoint that cannot be found or read.
    """
    model = recipe.model
    if model.architecture is None:
        assert isinstance(model, CheckpointModel)  # the schema asks the others for one
        directory = find_checkpoint(model.path, files=[CONFIG])
        return read_config(directory / CONFIG).to_model_config()
    fields = dict(model.architecture)
    if fields["vocab_size"] is None:
        fields["vocab_size"] = _vocabulary(recipe, tokenizer)
    if fields["max_position_embeddings"] is None:
        fields["max_position_embeddings"] = max(stage.seq_len for stage in recipe.stages)
    if tokenizer is not None:
        require_vocabulary(tokenizer, fields["vocab_size"])
    return LoopedConfig(**fields)


def _vocabulary(recipe: RunRecipe, tokenizer: "PreTrainedTokenizerBase | None") -> int:
    if tokenizer is not None:
        return len(tokenizer)
    if isinstance(recipe.tokenizer, TrainTokenizer):
        return recipe.tokenizer.vocab_size
    try:
        return len(any_tokenizer(recipe.tokenizer.path))
    except UserError as error:
        raise UserError(
            f"The vocabulary's size is not known: the recipe gives none, and its tokenizer cannot be asked ({error}) "
            "Set model.architecture.vocab_size."
        ) from None


def stage_configs(recipe: RunRecipe, start: LoopedConfig) -> list[LoopedConfig]:
    """The model that each stage trains. Raises UserError for an upcycling that does not fit."""
    configs = []
    for stage in recipe.stages:
        start = dataclasses.replace(start, **stage_changes(start, stage))
        configs.append(start)
    return configs


def stage_changes(config: LoopedConfig, stage: StageRecipe) -> dict[str, int | float]:
    """The fields of the config that a stage changes before it begins.

    Stage I at a fixed depth makes it the model's own; per-loop LoRA banks tie a model to the depth they were made for.
    """
    changes: dict[str, int | float] = {}
    if stage.upcycle is not None:
        duplicated_layers(config.num_hidden_layers, stage.upcycle.num_layers, stage.upcycle.order)
        changes["num_hidden_layers"] = stage.upcycle.num_layers
    if stage.rope_theta is not None:
        changes["rope_theta"] = stage.rope_theta
    trains_model = not trains_gate_alone(stage.objective)
    if trains_model and isinstance(stage.num_loops, int) and not config.lora_rank:
        changes["num_loops"] = stage.num_loops
    if stage.lora is not None and stage.lora.per_loop:
        if config.lora_rank:
            raise UserError(
                f"Stage {stage.name}: the model has LoRA banks of rank {config.lora_rank} already. Train those: leave "
                "lora out and freeze the rest."
            )
        changes |= {"lora_rank": stage.lora.rank, "lora_alpha": stage.lora.alpha}
    if stage.seq_len > config.max_position_embeddings:
        changes["max_position_embeddings"] = stage.seq_len
    return changes


def check_stage(config: LoopedConfig, stage: StageRecipe, steps: StepPlan | None, num_ranks: int = 1) -> None:
    """Raises UserError for an objective that the stage's depth or length leaves nothing to do, for names that no
    parameter has, for a stage that trains nothing, for a truncation that is none or past which no gradient reaches
    the embeddings, and for a batch that cannot be shared or cut as asked.

    steps: None where the length is not known yet, as in epochs; what depends on it is then left out.
    """
    _check_batch(stage, steps, num_ranks)
    names = [*parameter_shapes(config), *lora_shapes(config, stage), "lm_head.weight"]
    lora = stage.lora
    for key, patterns in (("freeze", stage.freeze), ("lora.also_train", lora.also_train if lora is not None else ())):
        for pattern in patterns:
            if not any(is_named(name, (pattern,)) for name in names):
                raise UserError(
                    f"Stage {stage.name}: {key} names {pattern!r}, but no parameter is called so; names are like "
                    f"{names[0]} and {names[1]}."
                )
    if lora is not None and any(is_adapted(name, lora) and is_named(name, lora.also_train) for name in names):
        raise UserError(
            f"Stage {stage.name}: lora.also_train names projections that lora.targets leaves frozen. Take them out of "
            "one of the two."
        )
    depth, objective = deepest(config, stage), stage.objective
    _check_truncation(config, stage)
    alone = "gate_only" if isinstance(objective, ExpectedLossRecipe) else "gate_loss"
    if trains_gate_alone(objective) and depth < 2:
        raise UserError(
            f"Stage {stage.name}: {alone} needs a model of 2 loops or more; after a single one nothing is decided."
        )
    shapes = [*parameter_shapes(config), *lora_shapes(config, stage)]
    # After a single loop nothing is decided, and the gate gets no gradient.
    if all(depth == 1 and name.startswith("model.early_exit_gate.") for name in shapes if is_trained(name, stage)):
        gate = f", and {alone} trains the gate alone" * trains_gate_alone(objective)
        raise UserError(f"Stage {stage.name} trains nothing: freeze covers all that it would train{gate}.")
    needed = (depth - 1) * objective.phase_steps if isinstance(objective, RoutingRecipe) else 0
    if isinstance(objective, RoutingRecipe) and steps is not None and needed >= steps.num_steps:
        raise UserError(
            f"Stage {stage.name}: the routing curriculum needs {depth - 1} phases of {objective.phase_steps} steps "
            f"before it reaches {depth} loops, and the stage has {steps.num_steps}. Shorten phase_steps."
        )


def _check_batch(stage: StageRecipe, steps: StepPlan | None, num_ranks: int) -> None:
    # So many steps a stage of unknown length has at least.
    fewest = max(1, stage.schedule.warmup_steps + (stage.schedule.decay_steps or 0))
    (steps or StepPlan(stage, fewest)).check_ranks(num_ranks)
    batch = stage.batch_tokens
    rows = (batch if isinstance(batch, int) else batch.end) // stage.seq_len
    if stage.micro_batch_rows is not None and stage.micro_batch_rows > rows:
        raise UserError(
            f"Stage {stage.name}: micro_batch_rows is {stage.micro_batch_rows}, and a step has {rows} row"
            f"{'s' * (rows != 1)}; it must be at most that."
        )


def _check_truncation(config: LoopedConfig, stage: StageRecipe) -> None:
    """Past truncated loops, gradient reaches embeddings by injection or a tied head only, a prelude by injection."""
    kept, tied, depth = stage.backprop_loops, config.tie_word_embeddings, deepest(config, stage)
    if kept is not None and kept > depth:
        raise UserError(
            f"Stage {stage.name}: backprop_loops is {kept}, and the stage runs {depth} loop{'s' * (depth != 1)} at "
            "most. Lower it, or leave it out to carry gradient through all."
        )
    if kept is None or kept >= shallowest(config, stage) or config.injection != "none":
        return
    cut_off = [
        name
        for name in parameter_shapes(config)
        if is_trained(name, stage)
        and (name.startswith("model.prelude.") or (name == "model.embed_tokens.weight" and not tied))
    ]
    if cut_off:
        raise UserError(
            f"Stage {stage.name}: with backprop_loops {kept} below the depth no gradient would ever reach {cut_off[0]}"
            f"{' and others' * (len(cut_off) > 1)}: the first loop alone reads them. Give the model an injection, "
            "leave backprop_loops out, or freeze them."
        )
