"""Studies: one question, a grid of training runs that differ in what is asked about, and a figure with error bars.

A study is a small file in `studies/`. Each of its cells is an ordinary recipe (:mod:`looplm.training.recipe`): a base
from `studies/base/`, the preset's values, those of the cell's place in the grid, and a seed.

Reading order: here (which cells there are) -> `study_run` (processes) -> `study_cell` (one of them, and what is
measured) -> `study_results` (table, plot, results.json).
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from looplm.data.recipe import GeneratorSource
from looplm.errors import UserError
from looplm.strict import Strict, nearest, parse
from looplm.training.baseline import language_stages
from looplm.training.recipe import NewModel, RunRecipe
from looplm.training.recipe_file import Origins, apply_override, read_text, read_yaml

STUDIES = Path(__file__).parent / "studies"
"""The studies that come with the package, known by name; their bases lie in `base/`."""

SHAPE = "shape"
"""The axis whose levels are "KxR", K layers looped R times: "2x6" beside "2x1" (as many parameters, dense) and "12x1"
(as much work, dense)."""

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

Override = str | list[str]
"""key=value, as on the command line of `looplm train`; or several."""


class Values(Strict):
    """An axis that sets one key of the recipe to each of some values, which also name its levels."""

    key: str
    values: list[str | int | float] = Field(min_length=1)


Axis = Annotated[list[str] | Values | dict[str, Override], Field(union_mode="left_to_right")]
"""Levels of the axis `shape`; the values of a key; or overrides by the name of the level."""

Grid = dict[str, Axis]
"""Axes by their names; cells are all their combinations."""


class Panel(Strict):
    """One picture of the plot."""

    figure: str
    """A scalar, a list (over its index from 1) or a curve."""
    against: str | None = None
    """For a scalar: the axis of the grid it is drawn over; the other axes become lines."""
    per: list[str] | None = None
    """For a list or a curve: axes that get a line a level, all others averaged like seeds. None: all of them."""
    scale: Literal["linear", "log"] = "linear"
    label: str | None = None
    """Of the vertical axis; the figure's name when None."""
    over: str | None = None
    """Of the horizontal axis."""


class Preset(Strict):
    """One size of a study."""

    base: str
    """The recipe that cells begin from: a file in `studies/base`, without .yaml; or a path with it, from the folder of
    the study."""
    overrides: list[str] = []
    grid: Grid | list[Grid] | None = None
    """Instead of the study's; several stand beside each other, with the same axes."""
    seeds: int = Field(default=3, gt=0)
    time: str
    """What it takes, and on what."""


class Study(Strict):
    """A study file."""

    title: str
    question: str
    """What is asked, and what the paper found, with its section."""
    grid: Grid = {}
    seed_keys: list[str] = []
    """Keys that get the cell's seed besides `seed` itself, such as the seed of a task's generator."""
    tokenizer: str | None = Field(default=None, pattern=FUNCTION)
    """For a synthetic task: module:function, called with the arguments of the recipe's generator."""
    measure: str | None = Field(default=None, pattern=FUNCTION)
    """What is measured of a finished model besides held-out loss and telemetry: module:function, called with the
    model, its tokenizer and the arguments of the recipe's generator; a dict of figures."""
    table: list[str] = Field(min_length=1)
    """Figures that get a column."""
    plot: list[Panel] = Field(min_length=1)
    presets: dict[Literal["small", "paper"], Preset]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a study."""

    name: str
    """Names its directory."""
    levels: dict[str, str]
    """Its place in the grid: level by axis."""
    seed: int
    recipe: RunRecipe
    arguments: dict[str, Any]
    """Of the recipe's generator, for `tokenizer` and `measure`; empty for text."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study at one size, all cells worked out and checked."""

    name: str
    study: Study
    preset: str
    cells: tuple[Cell, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the grid, in their order."""
        return tuple(self.cells[0].levels)

    @property
    def places(self) -> list[dict[str, str]]:
        """Every place of the grid once, seeds left out."""
        return list({tuple(cell.levels.items()): cell.levels for cell in self.cells}.values())


def load_study(name: str | Path) -> tuple[Path, Study]:
    """A study's file and content: a YAML file, or a shipped one by name. Raises UserError where there is none."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        shipped = sorted(file.stem for file in STUDIES.glob("*.yaml"))
        if str(name) not in shipped:
            close = nearest(str(name), shipped)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(shipped)}."
            raise UserError(f"There is no study {name}; {hint}")
        path = STUDIES / f"{name}.yaml"
    data, origins = _read(path)
    return path, parse(Study, data, str(path), origins)


def plan_study(name: str | Path, preset: str, *, seeds: int | None = None, overrides: Sequence[str] = ()) -> Plan:
    """All cells of a study, their recipes checked.

    seeds: how many; the preset's when None. overrides: key=value for the recipes of all cells.
    Raises UserError for an unknown study or preset, for an override of what the study varies, and for what is wrong in
    any recipe.
    """
    file, study = load_study(name)
    name = file.stem
    sizes: Mapping[str, Preset] = study.presets  # pyright: ignore[reportAssignmentType]
    if preset not in sizes:
        raise UserError(f"The study {name} has no preset {preset}; there is {' and '.join(sizes)}.")
    chosen = sizes[preset]
    base = file.parent / chosen.base if chosen.base.endswith(".yaml") else STUDIES / "base" / f"{chosen.base}.yaml"
    cells: list[Cell] = []
    for grid in _grids(study, chosen):
        _check_overrides(overrides, grid, study, name)
        for names in product(*grid.values()):
            levels = dict(zip(grid, names, strict=True))
            own = [text for axis, level in levels.items() for text in grid[axis][level]]
            for seed in range(chosen.seeds if seeds is None else seeds):
                cells.append(_cell(study, base, levels, (*chosen.overrides, *overrides, *own), seed))
    return Plan(name=name, study=study, preset=preset, cells=tuple(cells))


def _grids(study: Study, preset: Preset) -> list[dict[str, dict[str, list[str]]]]:
    """Overrides by axis and level. Raises UserError for a study without axes, and grids with different ones."""
    given = preset.grid if preset.grid is not None else study.grid
    grids = [
        {axis: _levels(axis, levels) for axis, levels in grid.items()}
        for grid in (given if isinstance(given, list) else [given])
    ]
    if not grids or not grids[0] or any(list(grid) != list(grids[0]) for grid in grids):
        raise UserError(f"{study.title}: a study needs a grid, and several of them the same axes.")
    return grids


def _check_overrides(
    overrides: Sequence[str], grid: Mapping[str, Mapping[str, list[str]]], study: Study, name: str
) -> None:
    varied = {key_of(text): axis for axis, levels in grid.items() for texts in levels.values() for text in texts}
    for text in overrides:
        if (key := key_of(text)) in varied or key in ("seed", *study.seed_keys):
            what = f"along {varied[key]}" if key in varied else "itself (--seeds)"
            raise UserError(f"The override {text!r} sets what the study {name} varies {what}.")


def _cell(study: Study, base: Path, levels: dict[str, str], overrides: Sequence[str], seed: int) -> Cell:
    data, origins = _read(base)
    name = "-".join((*levels.values(), f"seed{seed}"))
    seeds = [f"{key}={seed}" for key in ("seed", *study.seed_keys)]
    for text in (*overrides, *seeds):
        apply_override(data, origins, text)
    data["name"] = name
    recipe = parse(RunRecipe, data, f"{base.stem} ({name})", origins)
    if not language_stages(recipe):
        raise UserError(f"{base}: a study needs a stage that trains the language model.")
    if isinstance(recipe.model, NewModel) and recipe.model.architecture.num_loops == 1:
        # After a single loop nothing is decided: a dense cell has no stage that trains the gate.
        recipe = recipe.model_copy(update={"stages": tuple(language_stages(recipe))})
    return Cell(name=name, levels=levels, seed=seed, recipe=recipe, arguments=task_arguments(study, recipe))


def task_arguments(study: Study, recipe: RunRecipe) -> dict[str, Any]:
    """The arguments of the generator that a task study's first stage reads. Raises UserError where it reads none."""
    if study.tokenizer is None:
        return {}
    data = recipe.stages[0].data
    source = data.sources[0] if data is not None else None
    if not isinstance(source, GeneratorSource):
        raise UserError(f"{recipe.name}: the study's task needs a generator as the first source of its first stage.")
    return dict(source.arguments)


def _levels(axis: str, levels: Axis) -> dict[str, list[str]]:
    """Overrides by level."""
    if isinstance(levels, Values):
        found = {_value_text(value): [f"{levels.key}={_value_text(value)}"] for value in levels.values}
    elif isinstance(levels, list):
        if axis != SHAPE:
            raise UserError(f"The axis {axis} lists levels without saying what they set; only {SHAPE} may (2x6).")
        found = {text: _shape_overrides(text) for text in levels}
    else:
        found = {name: [texts] if isinstance(texts, str) else list(texts) for name, texts in levels.items()}
    for name in found:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):  # they name directories
            raise UserError(f"A level of {axis} is called {name!r}; use letters, digits, dots and dashes.")
    return found


def shape_of(level: str) -> tuple[int, int]:
    """(K, R) of a level "KxR". Raises UserError for anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", level)
    if found is None:
        raise UserError(f"{level!r} is no shape; write 2x6 for two layers looped six times.")
    return int(found[1]), int(found[2])


def _shape_overrides(level: str) -> list[str]:
    layers, loops = shape_of(level)
    return [f"model.architecture.num_hidden_layers={layers}", f"model.architecture.num_loops={loops}"]


def _value_text(value: str | int | float) -> str:
    return f"{value:g}".replace("e+", "e") if isinstance(value, float) else str(value)


def key_of(override: str) -> str:
    """The key that key=value sets."""
    return override.partition("=")[0]


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    data, origins = read_yaml(read_text(path), str(path))
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values.")
    return data, origins


def import_named(function: str) -> Callable[..., Any]:
    """What "module:function" names. Raises UserError where it cannot be imported."""
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{function} cannot be imported: {error}.") from error
