"""What differs between the recipe a run was started with and the one it is to be resumed with."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from looplm.errors import UserError
from looplm.training.recipe import RunRecipe

_MAY_CHANGE = re.compile(
    r"name|data_workers|data_cache|baseline|compare_loops|(telemetry|checkpoints|evaluation)(\..*)?"
    r"|stages\.\d+\.(log_every|micro_batch_rows|compile|activation_checkpointing|divergence\..*)"
)
"""Paths that change what is told, kept, or how fast a step is, but not what it computes (to rounding)."""

_ALLOWED = (
    "name, telemetry, evaluation, checkpoints, baseline, compare_loops, data_workers, data_cache; of a stage "
    "log_every, micro_batch_rows, compile, activation_checkpointing and divergence; and everything of stages that "
    "have not begun"
)


@dataclass(frozen=True)
class Change:
    """One value that differs."""

    path: str
    before: Any
    after: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"


_ABSENT = object()


def recipe_changes(before: RunRecipe, after: RunRecipe, stage_index: int) -> list[Change]:
    """Every difference, in the order of the recipe; `stage_index` is the stage that has begun last."""
    old, new = dict(_leaves(before.model_dump(mode="json"))), dict(_leaves(after.model_dump(mode="json")))
    changes = []
    for path in dict.fromkeys([*old, *new]):
        a, b = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if a != b:
            changes.append(Change(path, a, b, _may_change(path, stage_index)))
    return changes


def check_changes(changes: list[Change], run_dir: str) -> None:
    """Raises UserError naming the changes that would make a resumed run another one, if there are any."""
    refused = [change for change in changes if not change.allowed]
    if refused:
        lines = "".join(f"\n  {change}" for change in refused)
        raise UserError(
            f"The run in {run_dir} was started with another recipe and cannot go on with this one. What differs and "
            f"may not:{lines}\nMay change: {_ALLOWED}. Resume with the recipe in {run_dir}/recipe.yaml, or start a "
            "new run with --out."
        )


def _may_change(path: str, stage_index: int) -> bool:
    stage = re.match(r"stages\.(\d+)\.", path)
    later = stage is not None and int(stage[1]) > stage_index
    return later or _MAY_CHANGE.fullmatch(path) is not None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not children or not value:
        yield path, value
        return
    for key, inner in children:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
