"""Recipe files: what YAML means here, what is wrong and in which line, overrides, and the way back to YAML."""

from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import dump_recipe, load_recipe, parse_recipe, read_yaml
from looplm.training.stage_recipe import BatchRamp

SMALL = """\
name: small
model:
  kind: new
  architecture:
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    head_dim: 16
    num_loops: 2
tokenizer: {kind: train, vocab_size: 300}
stages:
  - name: first
    num_steps: 4
    seq_len: 16
    batch_tokens: 64
    objective: {kind: expected_loss, beta: 1e-1}
    optimizer: {lr: 1e-3}
    data: {sources: [{kind: stdlib}]}
  - name: second
    tokens: 3e2
    seq_len: 16
    batch_tokens: 64
    objective: {kind: gate_loss}
    optimizer: {lr: .5e-2}
    data: {sources: [{kind: stdlib}]}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_recipe(path, overrides)
    return str(error.value)


def changed(path: Path, old: str, new: str) -> Path:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


# --- YAML -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3e12", 3e12), ("1E5", 1e5), ("-.5", -0.5), ("2_097_152", 2_097_152), ("010", 10), ("+7", 7),
     ("true", True), ("yes", "yes"), ("on", "on"), ("off", "off"), ("4:20", "4:20"), ("2026-01-01", "2026-01-01"),
     ("null", None), ("~", None), ("", None), ("1_", "1_"), ("0x10", "0x10"), ("'1e-3'", "1e-3"),
     ("[1, 2e0]", [1, 2.0])],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found, _ = read_yaml(text, "here")
    assert found == value and type(found) is type(value)


def test_anchors_and_merges() -> None:
    found, _ = read_yaml("a: &x {lr: 1e-3, eps: 1}\nb: {<<: *x, eps: 2}\nc: *x", "here")
    assert found["b"] == {"lr": 1e-3, "eps": 2} and found["c"] == found["a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "here, line 3: the key a is given twice (first in line 1)"),
        ("a:\n  b: 1\n  c: {d: 1, d: 2}", "here, line 3: the key d is given twice"),
        ("a:\n\tb: 1", "here, line 2: the line is indented with a tab; YAML wants spaces."),
        ("a: 1\n\tb: 1", "here, line 2: the line is indented with a tab"),
        ("a:\t\tb", "here, line 1: there is a tab before a value; YAML wants a space."),
        ("a: 1\nb: " + 5000 * "1", "here, line 2: a number of 5,000 digits is too long"),
        ("a: [1, 2", "here, line 1: "),
        ("a: b: c", "here, line 1: "),
        ("a: 1\n---\nb: 2", "here, line 2: a second document begins"),
        ("a: !!python/object/apply:os.system [ls]", "here, line 1: "),
        ("a: !thing 1", "without tags"),
        ("a: \x07", "here, line 1: the character U+0007 is not allowed"),
        ("? [1, 2]\n: 3", "a key must be a plain word"),
        ("a: 1\n1: 2", "line 2: a key must be a plain word"),
        ("a: 1\n~: 2", "line 2: a key must be a plain word"),
        ("a: " + "[" * 5000, "nested more deeply"),
        ("a: &x [*x]", "here refers to itself"),
        ("a: *nothing", "here, line 1: found undefined alias"),
    ],
)
def test_what_is_no_yaml_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_yaml(text, "here")
    assert said in str(error.value)


def test_aliases_of_aliases_do_not_blow_up() -> None:
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(UserError, match="repeats its anchors too often"):
        read_yaml("\n".join(lines), "here")


# --- Files ----------------------------------------------------------------------------------------------------------


def test_a_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert [stage.name for stage in recipe.stages] == ["first", "second"]
    assert (recipe.stages[0].optimizer.lr, recipe.stages[1].optimizer.lr, recipe.stages[1].tokens) == (1e-3, 5e-3, 300)


def test_byte_order_mark_and_carriage_returns(recipe_file: Path) -> None:
    plain = load_recipe(recipe_file)
    recipe_file.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_recipe(recipe_file) == plain


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty; a recipe needs"), (b"# nothing\n", "is empty"), (b"- a\n- b\n", "does not hold a mapping"),
     (b"name: a\nx: \xff\n", "line 2: the file is not UTF-8"), (b"text", "does not hold a mapping"),
     ("name: a\n".encode("utf-16"), "line 1: the file is not UTF-8")],
)  # fmt: skip
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert said in complaint(path)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    assert "There is no recipe" in complaint(tmp_path / "none.yaml")
    assert "cannot be read" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("beta: 1e-1", "betta: 1e-1", "stages.0.objective.betta (line 18): unknown key; did you mean beta?"),
        ("lr: 1e-3", "lrr: 1e-3", "stages.0.optimizer.lrr (line 19): unknown key; did you mean lr?"),
        ("head_dim: 16", "head_dim: 15", "model.architecture (line 4): head_dim is 15"),
        ("hidden_size: 32", "hiden_size: 32", "model.architecture.hiden_size (line 5): unknown key; did you mean"),
        ("num_loops: 2", "num_loops: 0", "num_loops is 0; it must be positive"),
        ("batch_tokens: 64", "batch_tokens: 60", "stages.0 (line 14): batch_tokens 60 is not a multiple"),
        ("kind: gate_loss", "kind: gate_los", "kind is 'gate_los'; did you mean gate_loss?"),
        ("kind: stdlib", "kind: stdlb", "stages.0.data.sources.0 (line 20): kind is 'stdlb'; did you mean stdlib?"),
        ("{kind: stdlib}", "{kind: files, paths: []}", "data.sources.0.paths (line 20): is a list of 0"),
        ("num_steps: 4", "num_steps: four", "stages.0.num_steps (line 15): is 'four'; it must be a whole number."),
        ("num_steps: 4", "num_steps: 4\n    epochs: 2", "give exactly one of tokens, num_steps and epochs"),
        ("num_steps: 4", "schedule: {warmup_steps: 5}\n    num_steps: 4", "warmup_steps 5 is longer than the stage"),
        ("num_steps: 4", "num_loops: {kind: uniform, min: 3, max: 2}\n    num_steps: 4", "min 3 is above max 2"),
        ("objective: {kind: gate_loss}", "objective: {kind: gate_loss}\n    num_loops: 1", "gate_loss needs"),
        ("name: second", "name: first", "two stages have the same name"),
        ("name: second", "name: checkpoints", "a stage cannot be called checkpoints"),
        ("    data: {sources: [{kind: stdlib}]}\n  - name: second", "  - name: second", "stage first has no data"),
    ],
)  # fmt: skip
def test_wrong_recipes_name_path_line_and_what_was_meant(recipe_file: Path, old: str, new: str, said: str) -> None:
    assert said in complaint(changed(recipe_file, old, new))


# --- Overrides ------------------------------------------------------------------------------------------------------


def test_overrides(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        ["seed=3", "stages.0.optimizer.lr=2e-3", "stages.second.tokens=1e3", "checkpoints.every=2",
         "stages.first.batch_tokens={start: 64, end: 128, over_tokens: 100, increments: 1}"],
    )  # fmt: skip
    assert (recipe.seed, recipe.checkpoints.every, recipe.stages[0].optimizer.lr) == (3, 2, 2e-3)
    assert recipe.stages[1].tokens == 1000
    assert recipe.stages[0].batch_tokens == BatchRamp(start=64, end=128, over_tokens=100, increments=1)
    assert load_recipe(recipe_file, ["stages.0.rope_theta="]).stages[0].rope_theta is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seeed=3", "seeed (command line): unknown key; did you mean seed?"),
        ("seed=99999999999999999999999", "seed (command line): is 99999999999999999999999; it must be below"),
        ("SEED=3", "SEED (command line): unknown key; did you mean seed?"),
        ("telemetri.wandb=1", "telemetri (command line): unknown key; did you mean telemetry?"),
        ("stages.0.data={sources: [{kind: files, paths: [a], format: tokens}]}", "(tokenizer.kind: load)"),
        ("stages.0.data={sources: [{kind: shards, path: nowhere}]}", "(tokenizer.kind: load)"),
        ("stages.0.optimizer.lrr=1", "stages.0.optimizer.lrr (command line): unknown key; did you mean lr?"),
        ("stages.frist.num_steps=1", "stages has no element frist; did you mean first?"),
        ("stages.2.num_steps=1", "stages has 2 elements, counted from 0"),
        ("stages.0.num_steps.x=1", "goes too deep: stages.0.num_steps is 4, which has no keys"),
        ("seed", "'seed' is no override; write key=value"),
        ("=3", "is no override"),
        ("stages..x=1", "has an empty key"),
        ("seed=[1", "The override 'seed=[1', line 1: "),
        ("seed=abc", "seed (command line): is 'abc'; it must be a whole number."),
        ("stages.0.num_steps=0", "stages.0.num_steps (command line): is 0; it must be above 0."),
    ],
)
def test_wrong_overrides(recipe_file: Path, override: str, said: str) -> None:
    assert said in complaint(recipe_file, override)


# --- The way back ---------------------------------------------------------------------------------------------------


def test_a_dumped_recipe_is_the_same_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["stages.0.optimizer.lr=1e-5", "stages.0.optimizer.eps=1e-12", "seed=7"])
    text = dump_recipe(recipe)
    assert parse_recipe(text, "again") == recipe
    assert dump_recipe(parse_recipe(text, "again")) == text
    assert "weight_decay: 0.1" in text  # defaults are written out


@pytest.mark.parametrize("name", ["1e-3", "true", "null", "007", "3.", "a b", "1_000"])
def test_text_that_looks_like_something_else_stays_text(recipe_file: Path, name: str) -> None:
    recipe = load_recipe(recipe_file, [f"name='{name}'"])
    assert recipe.name == name
    assert parse_recipe(dump_recipe(recipe), "again").name == name


def test_shipped_recipes_survive_the_way_back(shipped: Path) -> None:
    recipe = load_recipe(shipped)
    assert isinstance(recipe, RunRecipe)
    assert parse_recipe(dump_recipe(recipe), "again") == recipe


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shipped" in metafunc.fixturenames:
        root = Path(__file__).parents[2] / "looplm" / "recipes"
        metafunc.parametrize(
            "shipped", sorted(root.rglob("*.yaml")), ids=lambda path: path.relative_to(root).as_posix()
        )
