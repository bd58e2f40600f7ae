"""A study's files: damaged ones are named, places that cannot be written are one paragraph, one process at a time."""

import errno
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from looplm.errors import UserError
from looplm.lab import study_run
from looplm.lab.study import Plan, plan_study
from looplm.lab.study_cell import CELL, FAILED
from looplm.lab.study_files import FOUND, locked, write_whole
from looplm.lab.study_results import write_results
from looplm.lab.study_run import STUDY, run_study

QUIET = Console(quiet=True)

FINISHED = json.dumps(dict(num_layers=1, num_loops=1, num_parameters=1, core_parameters=1, scaling=[], train_loss=2.0))
"""Of a cell that trained nothing."""


def one_finished(study: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, list[str]]:
    """A study whose cells finish at once when started; those that were are listed."""
    started: list[str] = []

    def start(directory: Path, slot: study_run.Slot) -> "subprocess.Popen[bytes]":
        started.append(directory.name)
        write_whole(directory / FOUND, FINISHED)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(study_run, "_start", start)
    plan = plan_study(study, "small", seeds=1)
    assert run_study(plan, out, console=QUIET) == {}
    started.clear()
    return plan, started


@pytest.mark.parametrize("content", [b"", FINISHED[:40].encode(), b"[]", b"{}", b"\xff\x00"])
def test_a_cell_whose_figures_are_damaged_is_measured_again(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    out, told = tmp_path / "out", io.StringIO()
    plan, started = one_finished(study, out, monkeypatch)
    file = out / "cells" / "0.01-deep-seed0" / FOUND
    file.write_bytes(content)
    write_results(plan, out, {}, QUIET)  # what is damaged has not finished
    assert len(json.loads((out / "results.json").read_text())["cells"]) == 1
    assert run_study(plan, out, console=Console(file=told, width=400)) == {} and started == ["0.01-deep-seed0"]
    assert f"{file} is damaged; the cell is measured again" in told.getvalue()
    assert file.read_text() == FINISHED


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"study": "own"', None])
def test_a_damaged_file_is_named_and_the_study_goes_on_without_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    out = tmp_path / "out"
    plan, started = one_finished(study, out, monkeypatch)
    file = out / STUDY
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with pytest.raises(UserError, match=f"{file} is damaged. Delete it; the same command then goes on"):
        run_study(plan, out, console=QUIET)
    if content is None:
        file.rmdir()
    else:
        file.unlink()
    assert run_study(plan, out, console=QUIET) == {} and started == []


@pytest.mark.parametrize("content", ["", "{}", '{"recipe": 3}', None])
def test_figures_without_their_recipe_are_nobodys(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """Deleted alone, cell.json would be written anew, with whatever values the next command has."""
    out = tmp_path / "out"
    plan, _ = one_finished(study, out, monkeypatch)
    file = out / f"cells/0.01-deep-seed0/{CELL}"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(UserError, match=f"Delete {file.parent}; the same command then trains that cell again"):
        run_study(plan, out, console=QUIET)


def test_places_that_cannot_be_written_are_one_paragraph(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = one_finished(study, tmp_path / "out", monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file.* cannot be read or written: Not a directory"):
        run_study(plan, tmp_path / "file" / "out", console=QUIET)
    shutil.rmtree(tmp_path / "out" / "cells")
    (tmp_path / "out" / "cells").touch()
    with pytest.raises(UserError, match="cells.* cannot be read or written"):
        run_study(plan, tmp_path / "out", console=QUIET)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"new.study\.json cannot be read or written: No space left on device"):
        run_study(plan, tmp_path / "new", console=QUIET)
    assert not (tmp_path / "new" / STUDY).exists()
    monkeypatch.undo()
    plan, _ = one_finished(study, tmp_path / "new", monkeypatch)  # nothing was left in the way


def test_a_process_that_leaves_no_reason_has_one_all_the_same(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(directory: Path, slot: study_run.Slot) -> "subprocess.Popen[bytes]":
        (directory / FAILED).touch()  # all that a full disk takes
        return subprocess.Popen(["false"])

    monkeypatch.setattr(study_run, "_start", start)
    failed = run_study(plan_study(study, "small", seeds=1), tmp_path / "out", console=QUIET)
    assert len(failed) == 2
    assert all("ended with status 1 and left no reason; see its log.txt" in reason for reason in failed.values())


def test_a_second_runner_is_told_of_the_first(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = one_finished(study, tmp_path / "out", monkeypatch)
    with locked(tmp_path / "out", "busy"), pytest.raises(UserError, match="Another process is running the study in"):
        run_study(plan, tmp_path / "out", console=QUIET)
    assert run_study(plan, tmp_path / "out", console=QUIET) == {}
