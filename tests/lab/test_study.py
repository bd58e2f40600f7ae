"""Studies as data: every shipped one gives sound recipes; grids, overrides and shapes do what they say."""

import itertools
from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.lab.study import STUDIES, Plan, import_named, load_study, plan_study
from looplm.lab.study_grid import shape_of
from looplm.lab.study_run import planned_cells
from looplm.training.architectures import stage_configs, starting_config
from looplm.training.recipe import NewModel, TrainTokenizer

KEY = "stages.0.optimizer.lr"

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
    own.write_text(own.read_text().replace("{base", "{" + grids).replace("against: lr", "against: shape"))
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


@pytest.mark.parametrize(
    "override",
    [
        "stages.0.optimizer.lr=1",
        "stages.train.optimizer.lr=1",
        "stages.0.optimizer={lr: 1}",  # above what the study varies
        "model.architecture.num_loops=3",
        "seed=3",
        "seed=0",
        "name=mine",
    ],
)
def test_overriding_what_a_study_varies_is_refused(own: Path, override: str) -> None:
    with pytest.raises(UserError, match="varies"):
        plan_study(own, "small", overrides=[override])


def test_an_override_below_a_mapping_that_a_study_varies_is_refused() -> None:
    with pytest.raises(UserError, match="varies along prior"):
        plan_study("priors", "small", overrides=["stages.0.objective.prior.stop=0.2"])


def test_an_override_above_what_varies_is_taken_where_nothing_of_it_is_lost(own: Path) -> None:
    plan = plan_study(own, "small", seeds=1, overrides=["stages.0.optimizer={eps: 1e-7}"])
    optimizers = [cell.recipe.stages[0].optimizer.model_dump() for cell in plan.cells]
    assert {(found["lr"], found["eps"]) for found in optimizers} == {(0.01, 1e-7), (0.001, 1e-7)}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.0.num_loops=2", "another number of loops than the axis shape says"),
        ("tokenizer={kind: load, path: mine}", "sets what the study makes itself"),
        ("data_cache=mine", "sets what the study makes itself"),
    ],
)
def test_what_a_study_makes_itself_is_not_to_be_set(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_study("fold", "small", overrides=[override])


@pytest.mark.parametrize(
    ("arguments", "refused"), [("max_k: 3, seed: 7", True), ("max_k: 3, seed: 0", False), ("max_k: 3", False)]
)
def test_a_seed_inside_an_override_is_refused_where_it_would_be_lost(arguments: str, refused: bool) -> None:
    overrides = [f"stages.0.data.sources.0.arguments={{{arguments}}}"]
    if refused:
        with pytest.raises(UserError, match="--seeds"):
            plan_study("fold", "small", overrides=overrides)
    else:
        plan = plan_study("fold", "small", seeds=2, overrides=overrides)
        assert [cell.arguments for cell in plan.cells[:2]] == [{"max_k": 3, "seed": 0}, {"max_k": 3, "seed": 1}]


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


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (
            f"x: {{a-b: {KEY}=1, a: {KEY}=2}}\n  y: {{c: [], b-c: stages.0.log_every=2}}",
            "share the directory a-b-c-seed0",
        ),
        ("lr: {key: stages.0.optimizer.lr, values: [1e-3, 0.001]}", "has the level 0.001 2 times"),
        ("lr: {key: stages.0.optimizer.lr, values: [1, 1.0]}", "have the same recipe"),
        ("shape: [1x2, 1x2]", "has the level 1x2 2 times"),
        ("shape: []", "axis shape has no levels"),
        ("x: {}", "axis x has no levels"),
        ("x: {key: stages.0.optimizer.lr, values: []}", "axis x has no levels"),
        ("shape: {a: model.architecture.num_loops=2}", "shape is a list of shapes"),
        ("x: {key: seed, values: [1, 2]}", "'seed=1' of the axis x sets what the study varies itself"),
        ("x: {key: name, values: [a, b]}", "of the axis x sets what the study varies itself"),
        ("x: {a: stages.0.optimizer.lr=1}\n  y: {b: stages.0.optimizer.lr=2}", "of the axis x .* along y"),
        ("x: {a: stages.0.optimizer.lr=1}\n  y: {b: 'stages.0.optimizer={lr: 2}'}", "axis x .* along y"),
        ("x: {a: 'stages.0.optimizer={lr: 2}'}\n  y: {b: stages.0.optimizer.lr=1}", "axis x .* along y"),
        ("x: {a: [], b: []}", r"\(x a\) and \(x b\) have the same recipe"),
        ("x: {a: ''}", "is no override"),
    ],
)
def test_axes_that_would_train_less_than_they_say_are_refused(own: Path, axes: str, words: str) -> None:
    text = own.read_text()
    before, after = text[: text.index("grid:")], text[text.index("table:") :]
    own.write_text(f"{before}grid:\n  {axes}\n{after}".replace(", against: lr", ""))
    with pytest.raises(UserError, match=words):
        plan_study(own, "small", seeds=1)


def test_a_place_in_two_grids_is_refused(own: Path) -> None:
    own.write_text(own.read_text().replace("{base", "{grid: [{lr: {a: stages.0.optimizer.lr=1}}, {lr: {a: "
                                           "stages.0.optimizer.lr=1}}], base"))  # fmt: skip
    with pytest.raises(UserError, match=r"The place \(lr a\) stands in two grids"):
        plan_study(own, "small", seeds=1)


def test_one_level_may_be_as_in_the_base(own: Path) -> None:
    own.write_text(own.read_text().replace("shallow: model.architecture.num_loops=1", "shallow: []"))
    assert {cell.levels["depth"] for cell in plan_study(own, "small").cells} == {"shallow", "deep"}


def test_values_are_set_exactly_and_named_as_briefly_as_they_differ(own: Path) -> None:
    def values(text: str) -> list[tuple[str, float]]:
        own.write_text(before.replace("[1e-2, 1e-3]", text))
        cells = plan_study(own, "small", seeds=1).cells
        return [(cell.levels["lr"], cell.recipe.stages[0].optimizer.lr) for cell in cells[::2]]

    before = own.read_text()
    assert values("[0.0012345678]") == [("0.00123457", 0.0012345678)]
    assert values("[0.0012345678, 0.0012345679]") == [("0.0012345678", 0.0012345678), ("0.0012345679", 0.0012345679)]
    assert values("[1e30, 2]") == [("1e30", 1e30), ("2", 2.0)]


def test_truth_and_text_that_looks_like_something_else_stay_what_they_are(own: Path) -> None:
    before = own.read_text()
    tied = before.replace("stages.0.optimizer.lr, values: [1e-2, 1e-3]",
                          "model.architecture.tie_word_embeddings, values: [true, false]")  # fmt: skip
    own.write_text(tied)
    found = []
    for cell in plan_study(own, "small", seeds=1).cells:
        assert isinstance(cell.recipe.model, NewModel)
        found.append((cell.levels["lr"], cell.recipe.model.architecture.tie_word_embeddings))
    assert found == [("true", True)] * 2 + [("false", False)] * 2
    own.write_text(before.replace("[1e-2, 1e-3]", '["0.01"]'))
    with pytest.raises(UserError, match="must be a number"):
        plan_study(own, "small")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("table: [train_loss]", "table: [loss_curve]", "the table shows loss_curve, a curve"),
        ("table: [train_loss]", "table: [train_loss, scaling]", "the table shows scaling, a record"),
        ("table: [train_loss]", "table: [train_los]", "which no cell has; did you mean train_loss"),
        ("against: lr", "against: lrr", "names the axis lrr; did you mean lr"),
        ("against: lr", "per: [depht]", "names the axis depht; did you mean depth"),
        ("against: lr", "against: lr, per: [depth]", "has `against` and `per`"),
        ("{figure: train_loss, against: lr}", "{figure: warnings}", "the plot shows warnings, a record"),
        ("{figure: train_loss, against: lr}", "{figure: exit_pdf, against: lr}", "exit_pdf, a list"),
        ("table:", "measure: looplm.nothing:measure\ntable:", "cannot be imported .*PYTHONPATH"),
        ("table:", "measure: looplm:nothing\ntable:", "cannot be imported"),
        ("table:", "tokenizer: looplm:__version__\ntable:", "is no function"),
    ],
)
def test_what_can_never_be_shown_or_measured_is_refused_before_training(
    own: Path, before: str, after: str, words: str
) -> None:
    assert before in own.read_text()
    own.write_text(own.read_text().replace(before, after))
    with pytest.raises(UserError, match=words):
        plan_study(own, "small")


def test_a_study_that_measures_may_show_what_is_unknown_until_then(own: Path) -> None:
    own.write_text(own.read_text().replace("table: [train_loss]", "measure: looplm.lab.fold:measure\ntable: [mine]"))
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
    layer = 4 * 24 * 24 + 3 * 24 * 72 + 2 * 24
    assert found["w241x1"].num_parameters == 512 * 24 + layer + 24
    assert found["w241x4"].num_parameters == 512 * 24 + layer + 24 + 25  # and the gate


def test_the_sizes_of_the_scaling_study_are_those_of_the_paper() -> None:
    plan, totals = plan_study("scaling", "paper", seeds=1), {}
    for levels, found in planned_cells(plan):
        totals.setdefault(levels["size"], found.num_parameters)  # the first shape of a size is its standard model
    paper = {"53M": 53e6, "134M": 134e6, "374M": 374e6, "778M": 778e6, "1.364B": 1.364e9}
    assert totals == {name: pytest.approx(size, rel=0.01) for name, size in paper.items()}
