"""The directory of a run: whether one was begun there, whether it may be used, and the mark that makes it ours."""

import shutil
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from looplm.errors import UserError
from looplm.training.checkpoint import Checkpoint, latest_checkpoint
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import dump_recipe

RECIPE = "recipe.yaml"

MARKER = ".looplm-run"
"""Written before anything else. Only a directory that has it is taken for a start of ours that failed."""

LOCK = ".looplm-lock"
"""Held by the process that writes here, and by none once that has ended, however it did."""

_BEFORE_THE_FIRST_STEP = {MARKER, LOCK, RECIPE, ".recipe.new", "tokenizer", ".tokenizer.new", "tokens"}
_AFTER_THE_FIRST_STEP = {"checkpoints", "telemetry.jsonl"}


class Begun(NamedTuple):
    """What a run directory holds before this process writes to it."""

    trained: bool
    """False where there is nothing yet, or only what a start that failed on its data has left."""
    latest: Checkpoint | None
    """Where to go on."""


def look_into(run_dir: Path, resume: bool) -> Begun:
    """Finds what an earlier process has left in `run_dir`; changes nothing.

    An attempt in which nothing was trained may be made again, with another recipe too.

    Raises UserError for a directory that cannot be read, for one that holds a run when `resume` is not asked for, and
    for one that holds anything else.
    """
    holds = _names_in(run_dir)
    if holds <= _BEFORE_THE_FIRST_STEP and (MARKER in holds or not holds - {LOCK}):
        return Begun(False, None)
    is_ours = RECIPE in holds and bool(holds & {MARKER, *_AFTER_THE_FIRST_STEP})
    if not resume:
        trained = is_ours and holds & _AFTER_THE_FIRST_STEP
        begun = "a run that --resume continues" if trained else ", ".join(sorted(holds - {MARKER, LOCK})[:5])
        raise UserError(f"{run_dir} is not empty: it holds {begun}. Choose another directory with --out.")
    if not is_ours:
        lacks = f"looplm has not written the {RECIPE} in it" if RECIPE in holds else f"there is no {RECIPE} in it"
        raise UserError(f"{run_dir} holds no run to resume: {lacks}. Choose another directory with --out.")
    return Begun(True, latest_checkpoint(run_dir))


def claim(run_dir: Path, recipe: RunRecipe, begun: Begun) -> FileLock:
    """Makes the directory, marks it as ours, and writes the recipe; what a failed start has left goes.

    Returns the lock that keeps other processes out; to be released at the end.

    Raises UserError where it cannot be made, and where another process trains in it.
    """
    lock = FileLock(run_dir / LOCK)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        (run_dir / MARKER).write_text("looplm train has begun a run in this directory.\n", encoding="utf-8")
    except Timeout:
        raise UserError(
            f"Another process is training in {run_dir}. Wait for it or stop it, then --resume; or choose another "
            "directory with --out."
        ) from None
    except OSError as error:
        raise _unusable(run_dir, error) from error
    if not begun.trained:
        shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
    fresh = run_dir / ".recipe.new"
    fresh.write_text(dump_recipe(recipe), encoding="utf-8")
    fresh.replace(run_dir / RECIPE)
    return lock


def _names_in(run_dir: Path) -> set[str]:
    """Of what lies in the directory; none where it is not there yet."""
    try:
        if not run_dir.exists():
            return set()
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} is a file; a run needs a directory of its own (--out).")
        return {path.name for path in run_dir.iterdir()}
    except OSError as error:
        raise _unusable(run_dir, error) from error


def _unusable(run_dir: Path, error: OSError) -> UserError:
    shown = str(run_dir)
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return UserError(f"{shown} cannot be a run directory: {error.strerror}. Choose another one with --out.")
