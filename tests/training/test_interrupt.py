"""Ctrl-C and SIGTERM: the step is finished, saved and left; a second Ctrl-C leaves at once."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from looplm.training.checkpoint import latest_checkpoint, list_checkpoints
from looplm.training.interrupt import Interrupted, StopSignals
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .runs import after_calls, tiny_model, tiny_rows, tiny_stage, whole_state


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background job ignores it, and with it whatever the job starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def trainer_in(run_dir: Path | None, every: int | None = None) -> Trainer:
    checkpoints = CheckpointsRecipe(every=every)
    return Trainer(tiny_model(), tiny_stage(), tiny_rows(), Telemetry(), run_dir, checkpoints=checkpoints)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_step_is_finished_and_saved_and_the_run_goes_on_from_there(
    tmp_path: Path, number: int, status: int
) -> None:
    before = signal.getsignal(number)
    trainer = trainer_in(tmp_path)
    after_calls(trainer, 4, lambda: send(number))
    with pytest.raises(Interrupted, match=f"Stopped by {signal.Signals(number).name} after step 4") as left:
        trainer.run()
    assert (left.value.signal_number, left.value.step, left.value.exit_status) == (number, 4, status)
    assert not isinstance(left.value, Exception), "no handler of errors may swallow it"
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and left.value.checkpoint == latest.directory and latest.step == 4
    assert signal.getsignal(number) is before, "the handler of before is back"

    resumed, straight = trainer_in(tmp_path), trainer_in(tmp_path / "straight")
    resumed.resume(latest.directory)
    for run in (resumed, straight):
        run.run()
    theirs = whole_state(straight)
    assert all(torch.equal(value, theirs[name]) for name, value in whole_state(resumed).items())


def test_a_second_ctrl_c_leaves_at_once_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, every=2)

    def twice() -> None:
        assert trainer.saver is not None
        trainer.saver._join()  # what is in flight would be given up
        send(signal.SIGINT)
        send(signal.SIGINT)

    after_calls(trainer, 4, twice)
    with pytest.raises(KeyboardInterrupt) as left:
        trainer.run()
    assert not isinstance(left.value, Interrupted)
    assert trainer.step == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")] == [2]
    resumed = trainer_in(tmp_path)
    resumed.resume(tmp_path / "checkpoints" / "0-first-00000002")
    resumed.run()


def test_torchrun_s_sigterm_after_ctrl_c_changes_nothing(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)

    def both() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            send(number)

    after_calls(trainer, 2, both)
    with pytest.raises(Interrupted, match="SIGINT after step 2"):
        trainer.run()


def test_without_a_run_directory_ctrl_c_is_ctrl_c() -> None:
    """There is nothing to save: waiting for the step would only annoy."""
    trainer = trainer_in(None)
    after_calls(trainer, 2, lambda: send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as left:
        trainer.run()
    assert not isinstance(left.value, Interrupted) and trainer.step == 1


def test_an_interrupt_in_the_last_step_is_one_too(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    after_calls(trainer, 6, lambda: send(signal.SIGTERM))
    with pytest.raises(Interrupted, match="after step 6"):
        trainer.run()
    resumed = trainer_in(tmp_path)
    resumed.resume(tmp_path / "checkpoints" / "0-first-00000006")
    resumed.run()


def test_in_another_thread_no_handlers_are_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []

    def enter() -> None:
        with StopSignals():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]
