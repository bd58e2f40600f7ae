"""Writing beside the training: what is written is what was, one at a time, and a failure costs a checkpoint only."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from looplm.errors import UserError
from looplm.training.checkpoint import list_checkpoints, quiet_alone
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .runs import tiny_model, tiny_rows, tiny_stage, whole_state


def trainer_in(run_dir: Path, **checkpoints: Any) -> Trainer:
    recipe = CheckpointsRecipe(**checkpoints)
    telemetry = Telemetry(run_dir, tensorboard=False)
    return Trainer(tiny_model(), tiny_stage(), tiny_rows(), telemetry, run_dir, checkpoints=recipe)


def steps_in(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run_dir / "checkpoints")]


def warnings_in(run_dir: Path) -> list[str]:
    return [line for line in (run_dir / "telemetry.jsonl").read_text().splitlines() if '"warning"' in line]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_reach_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is held back until two more steps are done."""
    reached, save = threading.Event(), dcp.save

    def slow(*arguments: Any, **options: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert reached.wait(60)
        return save(*arguments, **options)

    monkeypatch.setattr(dcp, "save", slow)
    trainer = trainer_in(tmp_path)
    trainer.train_step()
    expected = whole_state(trainer)
    with quiet_alone():
        trainer._begin_save(trainer.saver)
        trainer.train_step()
        trainer.train_step()
        assert steps_in(tmp_path) == []
        reached.set()
        trainer.saver.finish()
    assert steps_in(tmp_path) == [1]
    resumed = trainer_in(tmp_path)
    resumed.resume(tmp_path / "checkpoints" / "0-first-00000001")
    assert resumed.step == 1
    assert all(torch.equal(value, expected[name]) for name, value in whole_state(resumed).items())


def test_one_write_is_in_flight_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most, save = [0], [0], dcp.save

    def counted(*arguments: Any, **options: Any) -> Any:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return save(*arguments, **options)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(dcp, "save", counted)
    trainer_in(tmp_path, every=1, keep_last=9).run()
    assert most == [1] and steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_waiting_for_each_write_is_an_option(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, asynchronous=False)
    with quiet_alone():
        trainer._begin_save(trainer.saver)
    assert steps_in(tmp_path) == [0]


def full_disk(monkeypatch: pytest.MonkeyPatch, *, at: set[int]) -> None:
    """The writes of these numbers, from 1, find no room half-way."""
    write, calls = dcp.FileSystemWriter.write_data, [0]

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] in at:
            Path(self.path, "__0_0.distcp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments, **options)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", failing)


def test_a_full_disk_on_the_way_is_told_and_costs_no_more_than_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, at={2})
    trainer = trainer_in(tmp_path, every=2)
    trainer.run()
    assert trainer.step == 6 and steps_in(tmp_path) == [2, 6]
    (warning,) = warnings_in(tmp_path)
    assert "0-first-00000004 could not be written: [Errno 28] No space left on device" in warning
    assert "Training goes on without it." in warning
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_a_full_disk_at_the_end_is_a_user_error_and_the_state_can_still_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, at={3})
    trainer = trainer_in(tmp_path, every=2)
    with pytest.raises(UserError, match=r"0-first-00000006 could not be written: .*No space.* before it are kept"):
        trainer.run()
    assert steps_in(tmp_path) == [2, 4] and trainer.step == 6
    trainer.save()
    assert steps_in(tmp_path) == [4, 6]


def test_three_failed_saves_in_a_row_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third are waited for; one that succeeds in between starts the count again."""
    full_disk(monkeypatch, at={1, 2, 4, 5, 6})
    trainer = trainer_in(tmp_path, every=1, keep_last=9)
    with pytest.raises(UserError, match=r"No space.* 3 saves in a row have failed, .*\(0-first-00000003\) is lost"):
        trainer.run()
    assert trainer.step == 6 and steps_in(tmp_path) == [3]


def test_a_write_that_really_fails_is_one_too(tmp_path: Path) -> None:
    """DCP wraps what went wrong in an exception that `except Exception` does not catch."""
    resource = pytest.importorskip("resource")
    trainer = trainer_in(tmp_path)
    trainer.save()
    trainer.train_step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
        with pytest.raises(UserError, match=r"could not be written: .*File too large"):
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0-first-00000000"]


def test_a_directory_that_cannot_be_made_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="could not be written"):
        trainer_in(tmp_path).save()


def test_telemetry_on_a_full_disk_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, every=2)
    append, calls = trainer.telemetry._append, [0]

    def failing(entry: dict[str, Any]) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(entry)

    monkeypatch.setattr(trainer.telemetry, "_append", failing)
    with pytest.raises(UserError, match="step 4: telemetry could not be written: .*No space left on device"):
        trainer.run()
    assert steps_in(tmp_path) == [2]


def test_an_error_of_the_run_does_not_cut_the_write_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, every=2)
    step = trainer.train_step

    def failing() -> Any:
        if trainer.step == 2:
            raise ValueError("unforeseen")
        return step()

    monkeypatch.setattr(trainer, "train_step", failing)
    with pytest.raises(ValueError, match="unforeseen"):
        trainer.run()
    assert steps_in(tmp_path) == [2]
