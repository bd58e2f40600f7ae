"""The grid of a study: axes, their levels, and what a level sets in the recipe.

A cell's recipe is made in layers, the base first. What one layer has set, no later one may take back: a setting that
would not be in force is refused rather than ignored.
"""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from looplm.errors import UserError
from looplm.strict import Strict
from looplm.training.recipe_file import Origins, apply_override

SHAPE = "shape"
"""The axis whose levels are "KxR", K layers looped R times: "2x6" beside "2x1" (as many parameters, dense) and "12x1"
(as much work, dense)."""

Override = str | list[str]
"""key=value, as on the command line of `looplm train`; or several."""

Value = bool | int | float | str


class Values(Strict):
    """An axis that sets one key of the recipe to each of some values, which also name its levels."""

    key: str
    values: list[Value]


Axis = Annotated[list[str] | Values | dict[str, Override], Field(union_mode="left_to_right")]
"""Levels of the axis `shape`; the values of a key; or overrides by the name of the level."""

Grid = dict[str, Axis]
"""Axes by their names; cells are all their combinations."""


def levels_of(axis: str, levels: Axis) -> dict[str, list[str]]:
    """Overrides by level. Raises UserError for an axis without levels, and for levels that cannot be told apart."""
    if isinstance(levels, list) and axis != SHAPE:
        raise UserError(f"The axis {axis} lists levels without saying what they set; only {SHAPE} may (2x6).")
    if not isinstance(levels, list) and axis == SHAPE:
        raise UserError(f"The axis {SHAPE} is a list of shapes, as in [1x4, 4x1]; give an axis that sets else a name.")
    if isinstance(levels, Values):
        found = [
            (name, [f"{levels.key}={_exact(value)}"])
            for name, value in zip(_value_names(levels.values), levels.values, strict=True)
        ]
    elif isinstance(levels, list):
        found = [(text, _shape_overrides(text)) for text in levels]
    else:
        found = [(name, [texts] if isinstance(texts, str) else list(texts)) for name, texts in levels.items()]
    if not found:
        raise UserError(f"The axis {axis} has no levels.")
    names = [name for name, _ in found]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):  # they name directories
            raise UserError(f"A level of {axis} is called {name!r}; use letters, digits, dots and dashes.")
        if names.count(name) > 1:
            raise UserError(f"The axis {axis} has the level {name} {names.count(name)} times.")
    return dict(found)


def shape_of(level: str) -> tuple[int, int]:
    """(K, R) of a level "KxR". Raises UserError for anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", level)
    if found is None:
        raise UserError(f"{level!r} is no shape; write 2x6 for two layers looped six times.")
    return int(found[1]), int(found[2])


def _shape_overrides(level: str) -> list[str]:
    layers, loops = shape_of(level)
    return [f"model.architecture.num_hidden_layers={layers}", f"model.architecture.num_loops={loops}"]


def _exact(value: Value) -> str:
    """As YAML that is read as the same value of the same type."""
    return json.dumps(value, ensure_ascii=False)


def _value_names(values: Sequence[Value]) -> list[str]:
    """Six digits of each number; all of them where these are the same twice."""
    exact = [value if isinstance(value, str) else _exact(value) for value in values]
    short = [f"{value:g}" if isinstance(value, float) else text for value, text in zip(values, exact, strict=True)]
    return [name.replace("e+", "e") for name in (short if len(set(short)) == len(short) else exact)]


# --- Layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Overrides from one place."""

    overrides: Sequence[str]
    whose: str
    """Continues "the override x=1": " of the axis lr"."""
    varies: str
    """Continues "what the study varies": "along lr"."""


def apply_layers(data: dict[str, Any], origins: Origins, layers: Sequence[Layer]) -> None:
    """Sets in place what the layers set. Raises UserError where a later one takes back what an earlier one has set,
    whether with the same key, with one above or below it, or by another name of the same place."""
    for number, layer in enumerate(layers):
        for text in layer.overrides:
            apply_override(data, origins, text)
        for earlier in layers[:number]:
            if not _in_force(data, earlier.overrides):
                lost = next((text for text in earlier.overrides if not _in_force(data, [text])), earlier.overrides[-1])
                raise UserError(f"The override {lost!r}{earlier.whose} sets what the study varies {layer.varies}.")


def _in_force(data: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether all that these set is there; a mapping may hold more by now."""
    again = deepcopy(data)
    try:
        for text in overrides:
            apply_override(again, {}, text)
    except UserError:  # its place is gone
        return False
    return _within(again, data)


def _within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(_within, part, whole))
    return repr(part) == repr(whole)  # 1, 1.0 and true are three values
