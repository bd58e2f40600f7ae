"""Resume is bitwise: N steps are k steps, a stop, and N - k steps. Nothing tells the two runs apart but the clock."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.errors import UserError
from looplm.training.checkpoint import latest_checkpoint
from looplm.training.optimizer import optimizer_state
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .runs import SEQ_LEN, after_calls, whole_state

OBJECTIVES = [
    {"kind": "expected_loss", "beta": 0.05, "smoothing": 0.05},
    {"kind": "gate_loss"},
    {"kind": "routing", "phase_steps": 3},
    {"kind": "last_loop"},
    {"kind": "expected_loss", "beta": 0.05, "gate_only": True},
]
NAMES = ["expected_loss", "gate_loss", "routing", "last_loop", "gate_only"]
UNTOLD = ("seconds", "tokens_per_second", "memory_bytes")


def told(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "telemetry.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNTOLD} for line in lines]


def assert_same_state(mine: Trainer, theirs: Trainer) -> None:
    """Bit for bit: parameters, moments, data position, watches, counts; not the seconds."""
    ours, expected = whole_state(mine), whole_state(theirs)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    assert (mine.step, mine.tokens) == (theirs.step, theirs.tokens)
    for part in ("rows", "watch", "alarm"):
        assert getattr(mine, part).state_dict() == getattr(theirs, part).state_dict(), part


@pytest.fixture
def new_trainer(make_model, make_stage, make_rows):
    """A trainer as a new process would make it: fresh model, optimizer, data, telemetry. Two micro-batches a step."""

    def make(
        run_dir: Path, stop_at: int | None = None, every: int | None = None, num_workers: int = 0, **stage: Any
    ) -> Trainer:
        model = make_model()
        torch.manual_seed(99)
        two_parts = {"batch_tokens": 4 * SEQ_LEN, "micro_batch_rows": 2}
        trainer = Trainer(
            model, make_stage(**(two_parts | stage)), make_rows(num_workers=num_workers), Telemetry(run_dir), run_dir,
            checkpoints=CheckpointsRecipe(every=every), state_gradients_every=3,
        )  # fmt: skip
        if stop_at is not None:
            after_calls(trainer, stop_at + 1, _die)
        return trainer

    return make


class Killed(BaseException):
    """Stands for the end of the process."""


def _die() -> None:
    raise Killed


def run_and_die(trainer: Trainer) -> Trainer:
    """Runs into the end of the process. The thread that was writing lives on, as it would not: it is waited for.

    What a real kill leaves half-written, tests/training/test_kill.py looks at.
    """
    with pytest.raises(Killed):
        trainer.run()
    assert trainer.saver is not None
    trainer.saver._join()
    return trainer


def resume(trainer: Trainer, run_dir: Path) -> Trainer:
    latest = latest_checkpoint(run_dir)
    assert latest is not None
    trainer.resume(latest.directory)
    return trainer


@pytest.mark.parametrize("objective", OBJECTIVES, ids=NAMES)
@pytest.mark.parametrize("stopped_after", [4, 5])
def test_a_resumed_run_is_the_run_that_was_never_stopped(new_trainer, tmp_path, objective, stopped_after):
    """Stopped right after its checkpoint at step 4, and a step later, which then is done and told again."""
    options = {"objective": objective, "num_steps": 7, "log_every": 2, "every": 4}
    straight = new_trainer(tmp_path / "straight", **options)
    straight.run()

    stopped = run_and_die(new_trainer(tmp_path / "stopped", stop_at=stopped_after, **options))
    assert stopped.step == stopped_after
    resumed = resume(new_trainer(tmp_path / "stopped", **options), tmp_path / "stopped")
    assert resumed.step == 4
    resumed.run()

    assert_same_state(resumed, straight)
    assert told(tmp_path / "stopped") == told(tmp_path / "straight")
    assert [r.step for r in resumed.telemetry.records] == [1, 2, 3, 4, 6, 7]
    assert torch.equal(resumed.rows.take(3)["input_ids"], straight.rows.take(3)["input_ids"])
    assert not resumed.model.training


def test_a_worker_that_reads_ahead_changes_nothing(new_trainer, tmp_path):
    straight = new_trainer(tmp_path / "straight")
    straight.run()
    run_and_die(new_trainer(tmp_path / "stopped", stop_at=3, every=2, num_workers=1))
    resumed = resume(new_trainer(tmp_path / "stopped", num_workers=1), tmp_path / "stopped")
    resumed.run()
    assert_same_state(resumed, straight)


def test_a_drawn_depth_is_drawn_alike(new_trainer, tmp_path):
    depth = {"num_loops": {"kind": "uniform", "min": 1, "max": 4}, "num_steps": 9}
    straight = new_trainer(tmp_path / "straight", **depth)
    straight.run()
    run_and_die(new_trainer(tmp_path / "stopped", stop_at=6, every=5, **depth))
    resumed = resume(new_trainer(tmp_path / "stopped", **depth), tmp_path / "stopped")
    resumed.run()
    assert_same_state(resumed, straight)
    assert len({record.num_loops for record in resumed.telemetry.records}) > 2


def test_a_step_that_was_told_and_lost_is_not_told_twice(new_trainer, tmp_path):
    """log_every 1: step 5 is in the file when the process dies, and the resumed run does it again."""
    run_and_die(new_trainer(tmp_path, stop_at=5, every=4))
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4, 5]
    resumed = resume(new_trainer(tmp_path), tmp_path)
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4]
    resumed.run()
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_time_is_counted_on_and_the_pace_is_that_of_the_resumed_steps(new_trainer, tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.train_step()
    trainer.seconds = 1000.0
    trainer.save()
    resumed = resume(new_trainer(tmp_path), tmp_path)
    resumed.run()
    assert all(record.seconds > 1000 for record in resumed.telemetry.records)
    assert resumed.telemetry.records[0].tokens_per_second > 1


def test_an_alarm_is_not_raised_again(new_trainer, tmp_path):
    def collapsed(**options: Any) -> Trainer:
        trainer = new_trainer(tmp_path, **options)
        with torch.no_grad():
            trainer.model.model.early_exit_gate.bias.fill_(30.0)
        return trainer

    run_and_die(collapsed(stop_at=4, every=3))
    resume(collapsed(), tmp_path).run()
    assert [line["step"] for line in told(tmp_path) if "warning" in line] == [1]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=NAMES)
def test_saving_changes_nothing_even_before_the_first_step(new_trainer, tmp_path, objective):
    """Adam's state is there for the save; its count of steps must stay at 0."""
    saving = new_trainer(tmp_path / "saving", objective=objective)
    before = whole_state(saving)
    saving.save()
    assert all(torch.equal(value, before[name]) for name, value in whole_state(saving).items())
    resumed = resume(new_trainer(tmp_path / "saving", objective=objective), tmp_path / "saving")
    plain = new_trainer(tmp_path / "plain", objective=objective)
    for trainer in (resumed, saving, plain):
        for _ in range(4):
            trainer.train_step()
    assert_same_state(saving, plain)
    assert_same_state(resumed, plain)


def test_parameters_without_a_gradient_are_saved_and_loaded_too(new_trainer, tmp_path):
    """At a depth of 1 the gate gets none, now and then."""
    for num_loops in (1, {"kind": "uniform", "min": 1, "max": 2}):
        run_dir = tmp_path / str(num_loops)[:1]
        new_trainer(run_dir, num_loops=num_loops, every=2, num_steps=4).run()
        resumed = resume(new_trainer(run_dir, num_loops=num_loops, num_steps=6), run_dir)
        resumed.run()
        assert resumed.step == 6


def test_a_finished_stage_resumes_to_its_end(new_trainer, tmp_path):
    finished = new_trainer(tmp_path, every=6)
    finished.run()
    resumed = resume(new_trainer(tmp_path, every=6), tmp_path)
    resumed.run()
    assert_same_state(resumed, finished)
    assert resumed.telemetry.records == finished.telemetry.records


def test_moments_of_the_stage_before_give_way_to_those_of_the_checkpoint(new_trainer, make_rows, tmp_path):
    """The next stage of a run, resumed: what it was begun with is made anew, and must not count."""
    before = new_trainer(tmp_path / "before")
    before.run()
    state = optimizer_state(before.model, before.optimizer)

    def second(run_dir: Path) -> Trainer:
        return Trainer(
            before.model, before.stage, make_rows(), Telemetry(), run_dir, optimizer_state=state, stage_index=1
        )

    first = second(tmp_path)
    first.train_step()
    first.save()
    expected = whole_state(first)
    resumed = resume(second(tmp_path), tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in whole_state(resumed).items())


def test_the_recipe_s_optimizer_counts_not_the_checkpoint_s(new_trainer, tmp_path):
    """Betas and weight decay may be changed on resuming, and are then really changed."""
    new_trainer(tmp_path, every=2, num_steps=2).run()
    changed = new_trainer(tmp_path, optimizer={"lr": 1e-3, "weight_decay": 0.3, "betas": (0.5, 0.6)})
    resume(changed, tmp_path)
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.3, 0.0]
    assert all(group["betas"] == (0.5, 0.6) for group in changed.optimizer.param_groups)


def test_a_checkpoint_of_another_stage_is_refused(new_trainer, tmp_path):
    new_trainer(tmp_path, name="one").save()
    with pytest.raises(UserError, match=r"is of stage 0 \(one\); this is stage 0 \(two\)"):
        resume(new_trainer(tmp_path, name="two"), tmp_path)


def test_what_cannot_be_resumed_or_saved_is_a_user_error(new_trainer, make_model, make_stage, make_rows, tmp_path):
    for name in ("0-first-00000004", "elsewhere"):
        with pytest.raises(UserError, match=f"no checkpoint to resume at .*{name}"):
            new_trainer(tmp_path).resume(tmp_path / name)
    with pytest.raises(UserError, match="no run directory to save to"):
        Trainer(make_model(), make_stage(), make_rows(), Telemetry()).save()


def test_a_run_does_not_begin_among_checkpoints_of_later_steps(new_trainer, tmp_path):
    """It would prune against them, and resume from them."""
    new_trainer(tmp_path, every=2).run()
    with pytest.raises(UserError, match=r"later steps \(0-first-00000004, 0-first-00000006\).* is at step 0"):
        new_trainer(tmp_path).run()
    older = new_trainer(tmp_path)
    older.resume(tmp_path / "checkpoints" / "0-first-00000004")
    with pytest.raises(UserError, match=r"later steps \(0-first-00000006\).* is at step 4"):
        older.run()


def test_other_data_is_refused_and_nothing_is_loaded(new_trainer, make_model, make_stage, make_rows, tmp_path):
    new_trainer(tmp_path).save()
    trainer = Trainer(
        make_model(), make_stage(seq_len=8, batch_tokens=16), make_rows(seq_len=8), Telemetry(), tmp_path
    )
    with pytest.raises(UserError, match="seq_len was 12 and is 8"):
        resume(trainer, tmp_path)
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"intermediate_size": 32}, r"cannot be read into this run: .*mlp\."),
        ({"num_hidden_layers": 2}, r"it lacks model\.model\.layers\.1\."),
        ({"tie_word_embeddings": False}, r"it lacks optimizer\.state\.lm_head"),
        ({"lora_rank": 2}, r"it lacks .*lora"),
    ],
)
def test_another_model_s_state_is_refused_by_name_and_leaves_the_model_alone(
    new_trainer, make_model, make_stage, make_rows, tmp_path, other, complaint
):
    new_trainer(tmp_path).save()
    trainer = Trainer(make_model(**other), make_stage(), make_rows(), Telemetry(), tmp_path)
    before = whole_state(trainer)
    with pytest.raises(UserError, match=complaint):
        resume(trainer, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in whole_state(trainer).items())


def test_other_trainable_parameters_are_refused(new_trainer, tmp_path):
    new_trainer(tmp_path, freeze=("layers.*",)).save()
    with pytest.raises(UserError, match=r"it lacks optimizer\.state\.model\.layers"):
        resume(new_trainer(tmp_path), tmp_path)
    new_trainer(tmp_path / "all").save()
    with pytest.raises(UserError, match=r"it holds besides optimizer\.state\.model\.layers"):
        resume(new_trainer(tmp_path / "all", freeze=("layers.*",)), tmp_path / "all")
