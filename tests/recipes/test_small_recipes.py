"""The small twins: the stages of the large recipes in the same order, at a size that runs here, and they do run."""

from pathlib import Path

import pytest

import looplm
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import load_recipe
from looplm.training.run import run
from looplm.training.stage_recipe import StageRecipe

RECIPES = Path(looplm.__file__).parent / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(name: str, *overrides: str) -> RunRecipe:
    return load_recipe(RECIPES / f"{name}.yaml", overrides)


def test_every_large_recipe_has_a_twin() -> None:
    assert sorted(path.stem for path in (RECIPES / "small").glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_has_the_stages_of_its_original(name: str) -> None:
    def outline(stage: StageRecipe) -> tuple[object, ...]:
        upcycled = stage.upcycle.order if stage.upcycle is not None else None
        return stage.name, stage.num_loops, stage.objective, stage.schedule.kind, stage.rope_theta, upcycled

    large, small = load(name), load(f"small/{name}")
    if name == "ouro_sft":  # its checkpoint knows its own depth
        assert small.stages[0].num_loops is None and small.stages[0].epochs == large.stages[0].epochs == 2
        return
    assert [outline(stage) for stage in small.stages] == [outline(stage) for stage in large.stages]


@pytest.mark.slow
def test_a_twin_runs(tmp_path: Path) -> None:
    """Five stages, upcycled on the way, two steps each, on less text."""
    name = "ouro_2p6b"
    recipe = load(f"small/{name}")
    overrides = ["tokenizer.vocab_size=300", "evaluation.max_tokens=300"]
    for i, stage in enumerate(recipe.stages):
        overrides += [f"stages.{i}.num_steps=2", f"stages.{i}.schedule.warmup_steps=1"]
        assert stage.data is not None
        for j, source in enumerate(stage.data.sources):
            key = "max_bytes" if source.kind == "stdlib" else "arguments"
            overrides.append(
                f"stages.{i}.data.sources.{j}.{key}=" + ("200_000" if key == "max_bytes" else "{max_bytes: 200_000}")
            )
    overrides.append("evaluation.data.sources.0.max_bytes=200_000")
    run(load(f"small/{name}", *overrides), tmp_path / "run")
    last = looplm.load(tmp_path / "run" / recipe.stages[-1].name)
    assert last.model.config.num_hidden_layers == 2 and last.model.config.num_loops == 4
