"""Studies: one question, a grid of training runs that differ in what is asked about, and a figure with error bars.

A study is a small file in `studies/`. Each of its cells is an ordinary recipe (:mod:`looplm.training.recipe`): a base
from `studies/base/`, the preset's values, those of the cell's place in the grid, and a seed.

Reading order: here (which cells there are; in `study_grid`, what each sets) -> `study_run` (processes) -> `study_cell`
(one of them, and what is measured) -> `study_results` (table, plot, results.json).
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from looplm.data.recipe import GeneratorSource
from looplm.errors import UserError
from looplm.lab.study_figures import GENERAL, IN_A_TABLE, Kind
from looplm.lab.study_grid import SHAPE, Grid, Layer, apply_layers, levels_of, shape_of
from looplm.strict import Strict, nearest, parse
from looplm.training.baseline import language_stages
from looplm.training.recipe import NewModel, RunRecipe
from looplm.training.recipe_file import Origins, apply_override, read_text, read_yaml

STUDIES = Path(__file__).parent / "studies"
"""The studies that come with the package, known by name; their bases lie in `base/`."""

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


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

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What may be drawn."""
        return ("number",) if self.against is not None else ("number", "list", "curve")


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
    grids = _grids(study, chosen)
    _check_shown(study, list(grids[0]))
    for function in (study.tokenizer, study.measure):
        if function is not None:
            import_named(function)
    base = file.parent / chosen.base if chosen.base.endswith(".yaml") else STUDIES / "base" / f"{chosen.base}.yaml"
    cells: list[Cell] = []
    for grid in grids:
        for names in product(*grid.values()):
            levels = dict(zip(grid, names, strict=True))
            layers = [
                Layer(overrides, "", ""),
                *(Layer(grid[axis][level], f" of the axis {axis}", f"along {axis}") for axis, level in levels.items()),
            ]
            for seed in range(chosen.seeds if seeds is None else seeds):
                cells.append(_cell(study, base, levels, chosen.overrides, layers, seed))
    _check_cells(cells)
    return Plan(name=name, study=study, preset=preset, cells=tuple(cells))


def _grids(study: Study, preset: Preset) -> list[dict[str, dict[str, list[str]]]]:
    """Overrides by axis and level. Raises UserError for a study without axes, and grids with different ones."""
    given = preset.grid if preset.grid is not None else study.grid
    grids = [
        {axis: levels_of(axis, levels) for axis, levels in grid.items()}
        for grid in (given if isinstance(given, list) else [given])
    ]
    if not grids or not grids[0] or any(list(grid) != list(grids[0]) for grid in grids):
        raise UserError(f"{study.title}: a study needs a grid, and several of them the same axes.")
    return grids


def _cell(
    study: Study, base: Path, levels: dict[str, str], preset: Sequence[str], layers: Sequence[Layer], seed: int
) -> Cell:
    """preset: overrides that every other layer may change."""
    data, origins = _read(base)
    name = "-".join((*levels.values(), f"seed{seed}"))
    own = ("name", "seed", *study.seed_keys)
    for layer in layers:
        for text in layer.overrides:
            if key_of(text) in own:
                raise UserError(f"The override {text!r}{layer.whose} sets what the study varies itself (--seeds).")
            if key_of(text) == "data_cache" or (study.tokenizer and key_of(text).startswith("tokenizer")):
                raise UserError(f"The override {text!r}{layer.whose} sets what the study makes itself.")
    for text in preset:
        apply_override(data, origins, text)
    seeds = [f"{key}={seed}" for key in own[1:]]
    # A mapping may bring the seed 0 of an example along, so seeds are compared where they are 0.
    apply_layers(data, origins, [*layers, Layer(seeds, "", "itself (--seeds)")] if seed == 0 else layers)
    for text in seeds:
        apply_override(data, origins, text)
    data["name"] = name
    recipe = parse(RunRecipe, data, f"{base.stem} ({name})", origins)
    if not language_stages(recipe):
        raise UserError(f"{base}: a study needs a stage that trains the language model.")
    if SHAPE in levels and any(stage.num_loops not in (None, shape_of(levels[SHAPE])[1]) for stage in recipe.stages):
        raise UserError(
            f"Stages of {name} run another number of loops than the axis {SHAPE} says ({levels[SHAPE]}); leave their "
            "num_loops out."
        )
    if isinstance(recipe.model, NewModel) and recipe.model.architecture.num_loops == 1:
        # After a single loop nothing is decided: a dense cell has no stage that trains the gate.
        recipe = recipe.model_copy(update={"stages": tuple(language_stages(recipe))})
    return Cell(name=name, levels=levels, seed=seed, recipe=recipe, arguments=task_arguments(study, recipe))


def _check_cells(cells: Sequence[Cell]) -> None:
    """Raises UserError for two cells of one name, and for two that would train the same."""
    by_name: dict[str, Cell] = {}
    by_recipe: dict[str, Cell] = {}
    for cell in cells:
        twin = by_name.setdefault(cell.name, cell)
        if twin is not cell and twin.levels == cell.levels:
            raise UserError(f"The place {_place(cell)} stands in two grids; take it out of one of them.")
        if twin is not cell:
            raise UserError(
                f"The places {_place(twin)} and {_place(cell)} would share the directory {cell.name}; rename a level."
            )
        twin = by_recipe.setdefault(cell.recipe.model_dump_json(exclude={"name"}), cell)
        if twin is not cell:
            raise UserError(
                f"The places {_place(twin)} and {_place(cell)} have the same recipe; leave one of them out, in "
                "a grid of its own if need be (docs/lab.md)."
            )


def _place(cell: Cell) -> str:
    return "(" + ", ".join(f"{axis} {level}" for axis, level in cell.levels.items()) + ")"


def _check_shown(study: Study, axes: Sequence[str]) -> None:
    """Raises UserError for what table and plot can never show."""
    for figure in study.table:
        _check_figure(study, figure, IN_A_TABLE, "table")
    for panel in study.plot:
        _check_figure(study, panel.figure, panel.kinds, "plot" if panel.against is None else "plot, over an axis,")
        if panel.against is not None and panel.per is not None:
            raise UserError(f"{study.title}: the panel of {panel.figure} has `against` and `per`; it can have one.")
        for axis in (*([panel.against] if panel.against is not None else []), *(panel.per or ())):
            if axis not in axes:
                hint = _meant(axis, axes) or f"there is {', '.join(axes)}."
                raise UserError(f"{study.title}: the panel of {panel.figure} names the axis {axis}; {hint}")


def _check_figure(study: Study, figure: str, kinds: Sequence[Kind], where: str) -> None:
    kind = GENERAL.get(figure)
    if study.measure is None and kind is None:
        hint = _meant(figure, GENERAL) or "docs/lab.md lists what there is."
        raise UserError(f"{study.title}: the {where} shows {figure}, which no cell has; {hint}")
    if kind is not None and kind not in kinds:
        raise UserError(f"{study.title}: the {where} shows {figure}, a {kind}; it can show a {' or a '.join(kinds)}.")


def _meant(name: str, known: Iterable[str]) -> str | None:
    close = nearest(name, known)
    return None if close is None else f"did you mean {close}?"


def task_arguments(study: Study, recipe: RunRecipe) -> dict[str, Any]:
    """The arguments of the generator that a task study's first stage reads. Raises UserError where it reads none."""
    if study.tokenizer is None:
        return {}
    data = recipe.stages[0].data
    source = data.sources[0] if data is not None else None
    if not isinstance(source, GeneratorSource):
        raise UserError(f"{recipe.name}: the study's task needs a generator as the first source of its first stage.")
    return dict(source.arguments)


def key_of(override: str) -> str:
    """The key that key=value sets."""
    return override.partition("=")[0]


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    data, origins = read_yaml(read_text(path), str(path))
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values.")
    return data, origins


def import_named(function: str) -> Callable[..., Any]:
    """The function that "module:function" names. Raises UserError where it cannot be imported."""
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when imported
        raise UserError(
            f"{function} cannot be imported ({type(error).__name__}: {error}); is its folder on PYTHONPATH?"
        ) from error
    if not callable(found):
        raise UserError(f"{function} is no function.")
    return found
