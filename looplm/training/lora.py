"""What a LoRA stage trains and holds, from the recipe alone: names, shapes and bytes."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from looplm.model.config import LoopedConfig
from looplm.model.lora import projection_sizes
from looplm.training.stage_recipe import LoraRecipe, StageRecipe


def lora_shapes(config: LoopedConfig, stage: StageRecipe) -> dict[str, tuple[int, ...]]:
    """Name and shape of the corrections that the stage puts beside the projections, shared by all loops.

    Per-loop banks are not among them: they are part of the architecture (`lora_rank`).
    """
    recipe = stage.lora
    if recipe is None or recipe.per_loop:
        return {}
    stacks = {"prelude": config.num_prelude_layers, "layers": config.num_hidden_layers, "coda": config.num_coda_layers}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (in_features, out_features) in projection_sizes(config).items():
        for stack, num_layers in stacks.items():
            for layer in range(num_layers if name in recipe.targets else 0):
                part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                path = f"model.{stack}.{layer}.{part}.{name}"
                shapes[f"{path}.lora_a"] = (recipe.rank, in_features)
                shapes[f"{path}.lora_b"] = (out_features, recipe.rank)
    return shapes


def trains(name: str, recipe: LoraRecipe) -> bool:
    """Whether a LoRA stage trains the parameter `name`: a correction, or what `also_train` names."""
    is_correction = name.startswith("model.lora.") if recipe.per_loop else name.endswith((".lora_a", ".lora_b"))
    return is_correction or is_named(name, recipe.also_train)


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern, within the bare model or with the head, fits the name of a parameter."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"model.{pattern}") for pattern in patterns)


def is_adapted(name: str, recipe: LoraRecipe) -> bool:
    """Whether `name` is the weight of a projection that gets a correction."""
    path, _, last = name.rpartition(".")
    return last == "weight" and path.rpartition(".")[2] in recipe.targets


def is_held_narrow(name: str, stage: StageRecipe) -> bool:
    """Whether the stage holds the parameter `name` in bfloat16."""
    return stage.lora is not None and stage.lora.base == "bf16" and is_adapted(name, stage.lora)


def held_bytes(shapes: Mapping[str, tuple[int, ...]], stage: StageRecipe) -> int:
    """Bytes of all parameters while the stage trains: float32, but for a frozen base in bfloat16."""
    return sum((2 if is_held_narrow(name, stage) else 4) * math.prod(shape) for name, shape in shapes.items())
