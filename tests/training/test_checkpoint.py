"""Saving survives a kill at any moment and a full disk; loading says what does not fit."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from looplm.errors import UserError
from looplm.training.checkpoint import load_state, save_state


class Killed(BaseException):
    """Stands for the end of the process: nothing in the code under test may run after it."""


def state(value: float, size: int = 3) -> dict[str, Any]:
    return {"weights": {"a": torch.full((size,), value)}, "step": int(value)}


def loaded(directory: Path) -> float:
    """The value of what lies in `directory`, checked to be all of one save."""
    found = state(-1.0)
    load_state(directory, found)
    assert found["weights"]["a"].tolist() == [found["step"]] * 3
    return found["step"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


MOMENTS = ("while writing", "before setting the old aside", "between the renames", "before removing the old")


def kill(patch: pytest.MonkeyPatch, moment: str) -> None:
    """Ends the process at a moment of the next save."""
    rename, remove = Path.rename, shutil.rmtree

    def killed_write(_state: Any, checkpoint_id: Path) -> None:
        checkpoint_id.mkdir(parents=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise Killed

    def killed_rename(source: Path, target: Path) -> Path:
        if (moment == MOMENTS[1] and target.suffix == ".old") or (moment == MOMENTS[2] and source.suffix == ".new"):
            raise Killed
        return rename(source, target)

    def killed_removal(path: Path, **kwargs: Any) -> None:
        if path.suffix == ".old" and path.exists():
            raise Killed
        remove(path, **kwargs)

    if moment == MOMENTS[0]:
        patch.setattr(dcp, "save", killed_write)
    elif moment == MOMENTS[3]:
        patch.setattr(shutil, "rmtree", killed_removal)
    else:
        patch.setattr(Path, "rename", killed_rename)


def save_and_be_killed(directory: Path, value: float, moment: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill(patch, moment)
        save_state(directory, state(value))


def test_it_reads_what_it_wrote(tmp_path: Path):
    directory = tmp_path / "run" / "first.state"
    for value in (1.0, 2.0):
        save_state(directory, state(value))
        assert loaded(directory) == value
        assert names(directory.parent) == ["first.state"]


@pytest.mark.parametrize("next_moment", MOMENTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(tmp_path: Path, moment: str, next_moment: str):
    """Also when the save after it is killed too: what the first kill left aside is then the only state there is."""
    directory = tmp_path / "first.state"
    save_state(directory, state(1.0))
    save_and_be_killed(directory, 2.0, moment)
    assert loaded(directory) == (2.0 if moment == "before removing the old" else 1.0)
    save_and_be_killed(directory, 3.0, next_moment)
    assert loaded(directory) in (1.0, 2.0, 3.0)
    save_state(directory, state(4.0))
    assert loaded(directory) == 4.0
    assert names(tmp_path) == ["first.state"]


def full_disk(*_args: Any, checkpoint_id: Path, **_kwargs: Any) -> None:
    checkpoint_id.mkdir(parents=True)
    (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_full_disk_is_a_user_error_that_leaves_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before: bool
):
    directory = tmp_path / "first.state"
    if saved_before:
        save_state(directory, state(1.0))
    monkeypatch.setattr(dcp, "save", full_disk)
    with pytest.raises(UserError, match=r"first\.state could not be written: .*No space left on device"):
        save_state(directory, state(2.0))
    assert names(tmp_path) == (["first.state"] if saved_before else [])
    assert not saved_before or loaded(directory) == 1.0


def test_a_write_that_really_fails_is_one_too(tmp_path: Path):
    """DCP wraps what went wrong in an exception that `except Exception` does not catch."""
    resource = pytest.importorskip("resource")
    directory = tmp_path / "first.state"
    save_state(directory, state(1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match=r"could not be written: .*File too large"):
            save_state(directory, state(2.0, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["first.state"]
    assert loaded(directory) == 1.0


def test_a_directory_that_cannot_be_made_is_one_too(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        save_state(tmp_path / "file" / "first.state", state(1.0))


def test_ctrl_c_while_writing_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Raised inside DCP, which wraps it like any failure."""

    def interrupt(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    directory = tmp_path / "first.state"
    save_state(directory, state(1.0))
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_state(directory, state(2.0))
    assert loaded(directory) == 1.0


def test_no_checkpoint(tmp_path: Path):
    with pytest.raises(UserError, match=r"no checkpoint to resume at .*first\.state"):
        load_state(tmp_path / "first.state", state(0.0))


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (state(0.0, size=4), r"Size mismatch .*for weights\.a"),
        ({**state(0.0), "more": torch.zeros(1)}, "Missing key .*more"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, other: dict[str, Any], complaint: str):
    directory = tmp_path / "first.state"
    save_state(directory, state(1.0))
    with pytest.raises(UserError, match=f"does not fit this run: {complaint}"):
        load_state(directory, other)
    assert not other["weights"]["a"].any(), "nothing was loaded"


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    directory = tmp_path / "first.state"
    save_state(directory, state(1.0))
    for part in directory.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match="does not fit this run"):
        load_state(directory, state(0.0))
