"""Studies as data: every shipped one gives sound recipes; grids, overrides and shapes do what they say."""

import itertools
from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.lab.study import STUDIES, Plan, import_named, load_study, plan_study, shape_of
from looplm.lab.study_run import planned_cells
from looplm.training.architectures import stage_configs, starting_config
from looplm.training.recipe import NewModel, TrainTokenizer

SHIPPED = [
    (file.stem, preset) for file in sorted(STUDIES.glob("*.yaml")) for preset in load_study(file.stem)[1].presets
]


@pytest.mark.parametrize(("name", "preset"), SHIPPED)
def test_every_cell_of_a_shipped_study_is_a_sound_recipe(name: str, preset: str) -> None:
    plan = plan_study(name, preset, seeds=1)
    names = [cell.name for cell in plan.cells]
    assert len(set(names)) == len(names) == len(plan.places)
    for cell in plan.cells:
        assert isinstance(cell.recipe.model, NewModel) and cell.recipe.seed == cell.seed == 0
        if plan.study.tokenizer is None and preset == "small":
            stage_configs(cell.recipe, starting_config(cell.recipe))
    for panel in plan.study.plot:
        assert panel.against is None or panel.against in plan.axes
        assert set(panel.per or ()) <= set(plan.axes)


@pytest.mark.parametrize(("name", "preset"), SHIPPED)
def test_cells_differ_only_in_what_the_grid_says(name: str, preset: str) -> None:
    plan = plan_study(name, preset, seeds=2)
    recipes = {(tuple(cell.levels.values()), cell.seed): cell.recipe.model_dump() for cell in plan.cells}
    assert len({str(recipe | {"name": ""}) for recipe in recipes.values()}) == len(recipes)


def test_dense_cells_of_a_task_have_no_gate_to_train_and_both_stages_read_the_same_data() -> None:
    cells = {cell.levels["shape"]: cell.recipe for cell in plan_study("fold", "small", seeds=1).cells}
    assert [stage.name for stage in cells["1x4"].stages] == ["train", "gate"]
    assert [stage.name for stage in cells["4x1"].stages] == ["train"]
    cell = plan_study("fold", "small", seeds=3).cells[2]
    train, gate = cell.recipe.stages
    assert train.data == gate.data and train.seq_len == gate.seq_len == 6
    assert cell.arguments == {"max_k": 4, "seed": 2}


def test_functions_named_by_shipped_studies_exist() -> None:
    for name in {name for name, _ in SHIPPED}:
        study = load_study(name)[1]
        for function in (study.tokenizer, study.measure):
            assert function is None or callable(import_named(function))


def test_the_grid_is_the_product_of_its_axes_times_seeds(own: Path) -> None:
    plan = plan_study(own, "small")
    expected = [f"{lr}-{depth}-seed{seed}" for lr, depth, seed in
                itertools.product(("0.01", "0.001"), ("shallow", "deep"), (0, 1))]  # fmt: skip
    assert [cell.name for cell in plan.cells] == expected and plan.axes == ("lr", "depth")
    deep = plan.cells[-1].recipe
    assert isinstance(deep.model, NewModel) and deep.model.architecture.num_loops == 4
    stage = deep.stages[0]
    assert stage.optimizer.lr == 1e-3 and deep.seed == 1 and stage.num_steps == 3
    assert stage.objective.model_dump()["beta"] == 0.2 and isinstance(deep.tokenizer, TrainTokenizer)


def test_overrides_of_the_command_line_reach_every_cell(own: Path) -> None:
    plan = plan_study(own, "small", seeds=1, overrides=["stages.0.num_steps=7"])
    assert {cell.recipe.stages[0].num_steps for cell in plan.cells} == {7} and len(plan.cells) == 4


def test_several_grids_stand_beside_each_other(own: Path) -> None:
    grids = "grid: [{shape: [1x1, 1x2]}, {shape: [3x1]}], base"
    own.write_text(own.read_text().replace("{base", "{" + grids))
    plan = plan_study(own, "small", seeds=1)
    assert [cell.levels for cell in plan.cells] == [{"shape": "1x1"}, {"shape": "1x2"}, {"shape": "3x1"}]
    last = plan.cells[-1].recipe.model
    assert isinstance(last, NewModel) and last.architecture.num_hidden_layers == 3
    assert last.architecture.num_loops == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["study", "small"], "There is no study study"),
        (["priorz", "small"], "did you mean priors"),
        (["reachability", "paper"], "has no preset paper"),
    ],
)
def test_unknown_studies_and_presets_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_study(*arguments)


@pytest.mark.parametrize("override", ["stages.0.optimizer.lr=1", "model.architecture.num_loops=3", "seed=3"])
def test_overriding_what_a_study_varies_is_refused(own: Path, override: str) -> None:
    with pytest.raises(UserError, match="varies"):
        plan_study(own, "small", overrides=[override])


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title: A study", "titel: A study", "did you mean title"),
        ("depth:\n    shallow", "shape: [2by4]\n  depth:\n    shallow", "is no shape"),
        ("depth:\n    shallow", "more: [a, b]\n  depth:\n    shallow", "without saying what they set"),
        ("shallow:", '"sha/llow":', "is called 'sha/llow'"),
        ("num_loops=1", "num_loop=1", "did you mean num_loops"),
        ("base.yaml", "gone.yaml", "There is no recipe"),
    ],
)
def test_mistakes_in_a_study_file_are_named(own: Path, before: str, after: str, words: str) -> None:
    own.write_text(own.read_text().replace(before, after))
    with pytest.raises(UserError, match=words):
        plan_study(own, "small")


def test_shapes() -> None:
    assert shape_of("12x3") == (12, 3)
    for text in ("0x2", "2x0", "2x", "axb", "2x3x4"):
        with pytest.raises(UserError, match="is no shape"):
            shape_of(text)


# --- Plans ----------------------------------------------------------------------------------------------------------


def planned(plan: Plan) -> dict[str, tuple[int, int, int | None, float | None]]:
    return {
        "-".join(levels.values()): (found.core_parameters, found.num_loops, found.num_tokens, found.flops)
        for levels, found in planned_cells(plan)
    }


def test_a_plan_shows_equal_parameters_and_equal_work_where_the_shapes_say_so() -> None:
    found = planned(plan_study("scaling", "small", seeds=1))
    looped, dense, deep = found["w64-1x4"], found["w64-1x1"], found["w64-4x1"]
    assert looped[0] == dense[0] == deep[0] / 4
    assert looped[1:3] == (4, 409_600)
    assert looped[3] is not None and dense[3] is not None and looped[3] == pytest.approx(4 * dense[3])


def test_a_plan_of_a_task_knows_its_vocabulary_and_needs_no_file() -> None:
    plan = plan_study("capo", "small", seeds=1)
    found = dict((levels["width"] + levels["shape"], found) for levels, found in planned_cells(plan))
    layer = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32
    assert found["w321x1"].num_parameters == 512 * 32 + layer + 32
    assert found["w321x4"].num_parameters == 512 * 32 + layer + 32 + 33  # and the gate


def test_the_sizes_of_the_scaling_study_are_those_of_the_paper() -> None:
    plan, totals = plan_study("scaling", "paper", seeds=1), {}
    for levels, found in planned_cells(plan):
        totals.setdefault(levels["size"], found.num_parameters)  # the first shape of a size is its standard model
    paper = {"53M": 53e6, "134M": 134e6, "374M": 374e6, "778M": 778e6, "1.364B": 1.364e9}
    assert totals == {name: pytest.approx(size, rel=0.01) for name, size in paper.items()}
