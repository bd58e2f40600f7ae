"""The small twins: the stages of the large recipes in the same order, at a size that runs here, and they do run."""

from pathlib import Path

import pytest
import torch

import looplm
from looplm.conversion.checked import export_checkpoint
from looplm.training.baseline import dense_twin
from looplm.training.plan import plan_run
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import load_recipe
from looplm.training.run import run
from looplm.training.stage_recipe import StageRecipe

RECIPES = Path(looplm.__file__).parent / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(name: str, *overrides: str) -> RunRecipe:
    return load_recipe(RECIPES / f"{name}.yaml", overrides)


def test_every_large_recipe_has_a_twin() -> None:
    assert {path.stem for path in (RECIPES / "small").glob("*.yaml")} == {*NAMES, "convert_smollm2"}


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


def test_smollm2_beside_its_dense_twin() -> None:
    recipe = load("small/convert_smollm2")
    twin = dense_twin(recipe, Path("run"))
    looped, dense = (plan_run(each).stages[0] for each in (recipe, twin))
    # The sizes of the released model; gate and injection are a vector and a number each.
    assert dense.num_parameters_without_gate == 134_515_008
    assert looped.num_parameters == 134_515_008 + 2 * 577
    assert looped.length is not None and dense.length is not None
    assert looped.length.num_tokens == dense.length.num_tokens and looped.length.num_steps == dense.length.num_steps
    assert looped.length.flops > 2.9 * dense.length.flops


@pytest.mark.slow
def test_lora_runs(tmp_path: Path) -> None:
    """The shipped checkpoint, two steps on less text; merged by the run or by hand, it is the same model."""
    overrides = ["stages.lora.num_steps=2", "stages.lora.schedule.warmup_steps=1",
                 "stages.lora.data.sources.0.arguments={max_bytes: 300_000}",
                 "stages.lora.seq_len=128", "stages.lora.batch_tokens=512"]  # fmt: skip
    run(load("small/lora_ouro_1p4b", *overrides), tmp_path / "run")
    exported = export_checkpoint(
        "stdlib-small", tmp_path / "ouro", "ouro", adapter=tmp_path / "run" / "lora-adapter", dtype="float32"
    )
    merged, other = looplm.load(tmp_path / "run" / "lora"), looplm.load(exported.target)
    for name, weight in merged.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    before = looplm.load("stdlib-small", dtype="float32").state_dict()
    moved = {
        name.rpartition(".")[0]
        for name, weight in before.items()
        if not torch.equal(weight, merged.state_dict()[name])
    }
    assert moved == {"model.early_exit_gate"} | {name.rpartition(".")[0] for name in before if "_proj.weight" in name}
