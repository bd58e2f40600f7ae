"""Resuming with another recipe: what may differ, and that everything that differs is said."""

from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.training.recipe_changes import check_changes, recipe_changes
from looplm.training.recipe_file import load_recipe

SHIPPED = Path(__file__).parents[2] / "looplm" / "recipes" / "small" / "two_stage_1p4b.yaml"


def changes(*overrides: str, stage: int = 0) -> dict[str, bool]:
    found = recipe_changes(load_recipe(SHIPPED), load_recipe(SHIPPED, overrides), stage)
    return {str(change): change.allowed for change in found}


def test_the_same_recipe_has_no_changes() -> None:
    assert changes() == {}


@pytest.mark.parametrize(
    "override",
    ["checkpoints.every=7", "telemetry.tensorboard=false", "evaluation.every=3", "evaluation=", "data_workers=1",
     "name=other", "data_cache=tokens", "stages.0.log_every=1", "stages.0.micro_batch_rows=2", "stages.0.compile=true",
     "stages.0.activation_checkpointing=layer", "stages.0.divergence.on_nan=skip", "stages.1.optimizer.lr=1",
     "stages.1.num_steps=19", "stages.1.data.sources=[{kind: stdlib}]", "telemetry.wandb={project: x}"],
)  # fmt: skip
def test_what_may_change(override: str) -> None:
    found = changes(override)
    assert found and all(found.values()), found


@pytest.mark.parametrize(
    "override",
    ["seed=1", "stages.0.optimizer.lr=1", "stages.0.num_steps=9000", "stages.0.batch_tokens=4096",
     "stages.0.objective.beta=0", "stages.0.precision=bf16", "stages.0.name=x", "model.architecture.hidden_size=64",
     "tokenizer.vocab_size=300", "stages.0.data.sources=[{kind: stdlib, part: all}]", "stages.0.num_loops=2",
     "stages.0.freeze=[norm.weight]", "stages.0.schedule.warmup_steps=1"],
)  # fmt: skip
def test_what_may_not(override: str) -> None:
    found = changes(override)
    assert found and not all(found.values()), found


def test_a_stage_that_has_begun_is_fixed() -> None:
    assert changes("stages.1.optimizer.lr=1", stage=1) == {"stages.1.optimizer.lr: 0.001 -> 1.0": False}


def test_everything_refused_is_named_with_old_and_new() -> None:
    before, after = load_recipe(SHIPPED), load_recipe(SHIPPED, ["seed=5", "stages.0.num_loops=3", "data_workers=1"])
    with pytest.raises(UserError) as error:
        check_changes(recipe_changes(before, after, 0), "runs/x")
    text = str(error.value)
    assert "\n  seed: 0 -> 5\n  stages.0.num_loops: 4 -> 3\nMay change: name, telemetry" in "\n" + text.replace(
        "\n  stages", "\n  stages"
    )
    assert "  data_workers" not in text and "runs/x/recipe.yaml" in text


def test_added_and_missing_values_are_told_apart() -> None:
    found = changes("stages.0.batch_tokens={start: 2048, end: 4096, over_tokens: 100, increments: 1}")
    assert "stages.0.batch_tokens: 2048 -> absent" in found
    assert "stages.0.batch_tokens.start: absent -> 2048" in found
