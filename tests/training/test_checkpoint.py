"""Checkpoints on disk: what is complete, what is kept, and what is said of one that cannot be read."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from looplm.errors import UserError
from looplm.training.checkpoint import (
    ASIDE,
    FRESH,
    Checkpoint,
    best_checkpoint,
    checkpoint_name,
    clear_leftovers,
    latest_checkpoint,
    list_checkpoints,
    publish,
    read_name,
    reason_of,
    remove_older,
    remove_stages_before,
)
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer


class Killed(BaseException):
    """Stands for the end of the process: nothing in the code under test may run after it."""


def write(root: Path, step: int, *, stage_index: int = 0, loss: float | None = None, mark: str = "") -> Path:
    """A complete checkpoint of little content, put there as a saver does."""
    fresh = root / (FRESH + checkpoint_name(stage_index, "first", step))
    fresh.mkdir(parents=True)
    (fresh / "tensors").write_text(mark)
    return publish(fresh, {"held_out_loss": loss})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_name_tells_stage_and_step_and_sorts_by_training(tmp_path: Path):
    for stage_index, step in ((1, 2), (0, 12), (0, 3), (10, 1)):
        write(tmp_path, step, stage_index=stage_index)
    (tmp_path / "notes").mkdir()
    (tmp_path / "0-first-00000099").touch()  # a file
    found = [(checkpoint.stage_index, checkpoint.stage, checkpoint.step) for checkpoint in list_checkpoints(tmp_path)]
    assert found == [(0, "first", 3), (0, "first", 12), (1, "first", 2), (10, "first", 1)]
    assert checkpoint_name(3, "1a-warm up", 7) == "3-1a-warm up-00000007"
    read = read_name(tmp_path / "3-1a-warm up-00000007")
    assert read == Checkpoint(3, 7, "1a-warm up", tmp_path / "3-1a-warm up-00000007")
    assert read_name(tmp_path / "123456789-00000001") is None


def test_the_latest_of_a_run(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None and list_checkpoints(tmp_path / "none") == []
    write(tmp_path / "checkpoints", 7)
    write(tmp_path / "checkpoints", 2, stage_index=1)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and latest.directory.name == "1-first-00000002"


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([3.0, 1.0, 2.0, 2.0, 2.0], [1, 3, 4]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], [3, 4]),
        ([1.0, 1.0, None, None, None], [1, 3, 4]),
        ([None] * 5, [3, 4]),
        ([0.0, None, 9.0, None, None], [0, 3, 4]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path: Path, losses: list[float | None], kept: list[int]):
    for step, loss in enumerate(losses):
        write(tmp_path, step, loss=loss)
    remove_older(tmp_path, 0, CheckpointsRecipe(keep_last=2))
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == kept
    assert len(names(tmp_path)) == len(kept)


def test_the_best_may_go_and_other_stages_stay(tmp_path: Path):
    for step, loss in enumerate([1.0, 2.0, 3.0]):
        write(tmp_path, step, loss=loss)
        write(tmp_path, step, loss=loss, stage_index=1)
    remove_older(tmp_path, 1, CheckpointsRecipe(keep_last=1, keep_best=False))
    assert [(c.stage_index, c.step) for c in list_checkpoints(tmp_path)] == [(0, 0), (0, 1), (0, 2), (1, 2)]
    best = best_checkpoint(list_checkpoints(tmp_path)[:3])
    assert best is not None and best.step == 0


def test_a_damaged_one_is_not_the_best_and_does_not_stop_the_others(tmp_path: Path):
    homes = [write(tmp_path, step, loss=loss) for step, loss in enumerate([1.0, 2.0, 3.0, 4.0])]
    (homes[0] / "progress.json").write_text("{")
    remove_older(tmp_path, 0, CheckpointsRecipe(keep_last=1))
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1, 3]


def test_stages_that_are_saved_elsewhere_can_be_removed(tmp_path: Path):
    for stage_index in range(3):
        write(tmp_path / "checkpoints", 1, stage_index=stage_index)
    remove_stages_before(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["2-first-00000001"]


def test_a_checkpoint_replaces_one_of_the_same_step(tmp_path: Path):
    for mark in ("old", "new"):
        home = write(tmp_path, 4, mark=mark)
    assert names(tmp_path) == ["0-first-00000004"] and (home / "tensors").read_text() == "new"


@pytest.mark.parametrize("moment", ["set aside", "named", "removed"])
def test_a_kill_between_the_renames_of_a_replacement_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    write(tmp_path, 4, mark="old")
    rename, remove = Path.rename, shutil.rmtree

    def renamed(source: Path, target: Path) -> Path:
        result = rename(source, target)
        if target.name.startswith(ASIDE if moment == "set aside" else "0-"):
            raise Killed
        return result

    def removed(path: Path, **_: Any) -> None:
        remove(path / "tensors")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises((Killed, OSError)):
        if moment == "removed":
            patch.setattr(shutil, "rmtree", removed)
        else:
            patch.setattr(Path, "rename", renamed)
        write(tmp_path, 4, mark="new")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["0-first-00000004"]
    assert (tmp_path / "0-first-00000004" / "tensors").read_text() == ("old" if moment == "set aside" else "new")


def test_half_written_and_half_removed_ones_do_not_count_and_are_cleared(tmp_path: Path):
    write(tmp_path, 1)
    for prefix in (FRESH, ASIDE):
        (tmp_path / f"{prefix}0-first-00000001").mkdir()
    (tmp_path / f"{FRESH}0-first-00000002").mkdir()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["0-first-00000001"]
    clear_leftovers(tmp_path / "none")


def test_progress_is_json_to_be_read(make_model, make_stage, make_rows, tmp_path: Path):
    trainer = Trainer(make_model(), make_stage(), make_rows(), Telemetry(), tmp_path)
    trainer.train_step()
    saved = trainer.save()
    assert saved == tmp_path / "checkpoints" / "0-first-00000001"
    progress = json.loads((saved / "progress.json").read_text())
    assert (progress["stage"], progress["step"], progress["tokens"]) == ("first", 1, 24)
    assert progress["data"] == trainer.rows.state_dict()


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("victim", ["*.distcp", ".metadata", "progress.json"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_checkpoint_is_refused_with_the_names_of_others(
    make_model, make_stage, make_rows, tmp_path: Path, victim: str, gone: bool
):
    def trainer() -> Trainer:
        return Trainer(make_model(), make_stage(), make_rows(), Telemetry(), tmp_path)

    (saving := trainer()).save()
    saving.train_step()
    saved = saving.save()
    for path in saved.glob(victim):
        if gone:
            path.unlink()
        else:
            damage(path)
    with pytest.raises(
        UserError,
        match=r"00000001 cannot be read .*Delete \S+00000001 and resume: the run goes on from 0-first-00000000",
    ):
        trainer().resume(saved)
    shutil.rmtree(tmp_path / "checkpoints" / "0-first-00000000")
    with pytest.raises(UserError, match="no other checkpoint, so the run begins anew"):
        trainer().resume(saved)


def saved_after_a_step(make_model, make_stage, make_rows, run_dir: Path) -> tuple[Trainer, Path]:
    trainer = Trainer(make_model(), make_stage(), make_rows(), Telemetry(), run_dir)
    trainer.train_step()
    return trainer, trainer.save()


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata"])
def test_a_flipped_bit_is_refused(make_model, make_stage, make_rows, tmp_path: Path, victim: str):
    trainer, saved = saved_after_a_step(make_model, make_stage, make_rows, tmp_path)
    whole = (saved / victim).read_bytes()
    middle = len(whole) // 2
    (saved / victim).write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(UserError, match=rf"{victim} is not what was written .*Delete {saved} and resume"):
        trainer.resume(saved)
    (saved / victim).write_bytes(whole)
    trainer.resume(saved)
    for checksums in saved.glob("checksums-*.json"):  # an older version had none
        checksums.unlink()
    trainer.resume(saved)


def test_progress_that_says_something_else_is_refused(make_model, make_stage, make_rows, tmp_path: Path):
    """It reads well and would train on other rows."""
    trainer, saved = saved_after_a_step(make_model, make_stage, make_rows, tmp_path)
    path = saved / "progress.json"
    path.write_text(path.read_text().replace('"tokens": ', '"tokens": 1'))
    with pytest.raises(UserError, match="progress.json is not what was written"):
        trainer.resume(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "progress.json has no stage that"),
        ("[]", "progress.json is no JSON object"),
        ("\xff", "Expecting value"),
        ({"watch": {}}, "in progress.json, KeyError: 'losses'"),
        ({"data": {}}, "in progress.json, KeyError"),
        ({"step": "9"}, "progress.json has no step that"),
    ],
)
def test_incomplete_progress_is_damage(make_model, make_stage, make_rows, tmp_path: Path, content, said: str):
    trainer, saved = saved_after_a_step(make_model, make_stage, make_rows, tmp_path)
    path = saved / "progress.json"
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(UserError, match=re.escape(said)) as error:
        trainer.resume(saved)
    assert f"Delete {saved} and resume: there is no other checkpoint" in str(error.value)


def test_an_empty_directory_is_damage_and_a_silent_error_gets_words(make_model, make_stage, make_rows, tmp_path):
    trainer, saved = saved_after_a_step(make_model, make_stage, make_rows, tmp_path)
    shutil.rmtree(saved)
    saved.mkdir()
    with pytest.raises(UserError, match=f"cannot be read into this run: .*No such file.* Delete {saved} and resume"):
        trainer.resume(saved)
    assert reason_of(EOFError()) == "a file is cut short or overwritten (EOFError)"
