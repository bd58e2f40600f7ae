"""Resume is bitwise: N steps are k steps, a stop, and N - k steps. Nothing tells the two runs apart but the clock."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.data.packing import PackedDataset
from looplm.errors import UserError
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

OBJECTIVES = [{"kind": "expected_loss", "beta": 0.05, "smoothing": 0.05}, {"kind": "gate_loss"}]
TIMINGS = ("seconds", "tokens_per_second")


class Stops:
    """A dataset in whose process Ctrl-C is pressed when batch number `at` is drawn."""

    def __init__(self, dataset: PackedDataset, at: int) -> None:
        self.dataset, self.left = dataset, at

    def __iter__(self) -> "Stops":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return next(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


def told(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "telemetry.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts and lists, by its path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}/{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{path}/{i}").items()}
    return {path: tree}


def assert_same_state(mine: Trainer, theirs: Trainer) -> None:
    """Bit for bit: parameters, moments, data position, random state, counts; not the seconds."""
    ours, expected = flat(mine._state()), flat(theirs._state())
    assert ours.keys() == expected.keys()
    for path, value in expected.items():
        if path != "/progress/seconds":
            equal = torch.equal(ours[path], value) if isinstance(value, torch.Tensor) else ours[path] == value
            assert equal, path


@pytest.fixture
def new_trainer(make_model, make_stage, make_batches):
    """A trainer as a new process would make it: fresh model, optimizer, data and telemetry."""

    def make(run_dir: Path, stop_at: int | None = None, seed: int = 5, **stage: Any) -> Trainer:
        model = make_model()
        torch.manual_seed(seed)
        batches = make_batches() if stop_at is None else Stops(make_batches(), stop_at)
        return Trainer(model, make_stage(micro_batches=2, **stage), batches, Telemetry(run_dir), run_dir)

    return make


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["expected_loss", "gate_loss"])
@pytest.mark.parametrize("stopped_after", [4, 5])
def test_a_resumed_run_is_the_run_that_was_never_stopped(new_trainer, tmp_path, objective, stopped_after):
    """Stopped right after its checkpoint at step 4, and a step later, which then is done and told again."""
    options = {"objective": objective, "num_steps": 7, "log_every": 2, "checkpoint_every": 4}
    straight = new_trainer(tmp_path / "straight", **options)
    straight.run()

    stopped = new_trainer(tmp_path / "stopped", stop_at=2 * stopped_after, **options)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert stopped.step == stopped_after
    resumed = new_trainer(tmp_path / "stopped", seed=99, **options)
    resumed.resume()
    assert resumed.step == 4
    resumed.run()

    assert_same_state(resumed, straight)
    assert told(tmp_path / "stopped") == told(tmp_path / "straight")
    assert [r.step for r in resumed.telemetry.records] == [1, 2, 4, 6, 7]
    assert torch.equal(next(resumed.batches)["input_ids"], next(straight.batches)["input_ids"])
    assert not resumed.model.training


def test_a_step_that_was_told_and_lost_is_not_told_twice(new_trainer, tmp_path):
    """log_every 1: step 5 is in the file when the process dies, and the resumed run does it again."""
    options = {"num_steps": 6, "checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        new_trainer(tmp_path, stop_at=10, **options).run()
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4, 5]
    resumed = new_trainer(tmp_path, **options)
    resumed.resume()
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4]
    resumed.run()
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_random_numbers_go_on_where_they_were(new_trainer, tmp_path):
    trainer = new_trainer(tmp_path)
    torch.rand(3)
    trainer.save()
    expected = torch.rand(5)
    new_trainer(tmp_path, seed=99).resume()
    assert torch.equal(torch.rand(5), expected)


def test_time_is_counted_on(new_trainer, tmp_path):
    """So that the pace, and the time left, are those of the whole stage."""
    trainer = new_trainer(tmp_path)
    trainer.train_step()
    trainer.seconds = 1000.0
    trainer.save()
    resumed = new_trainer(tmp_path)
    resumed.resume()
    resumed.run()
    assert all(record.seconds > 1000 for record in resumed.telemetry.records)
    assert resumed.telemetry.records[0].tokens_per_second > 0.1


def test_an_alarm_is_not_raised_again(new_trainer, tmp_path):
    def collapsed(**options: Any) -> Trainer:
        trainer = new_trainer(tmp_path, **options)
        with torch.no_grad():
            trainer.model.model.early_exit_gate.bias.fill_(30.0)
        return trainer

    with pytest.raises(KeyboardInterrupt):
        collapsed(stop_at=8, checkpoint_every=3).run()
    resumed = collapsed()
    resumed.resume()
    resumed.run()
    assert [line["step"] for line in told(tmp_path) if "warning" in line] == [1]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["expected_loss", "gate_loss"])
def test_saving_changes_nothing_even_before_the_first_step(new_trainer, tmp_path, objective):
    """Adam's state is made for the save; its count of steps must stay at 0."""
    saving = new_trainer(tmp_path / "saving", objective=objective)
    before = flat(saving.model.state_dict())
    saving.save()
    assert all(torch.equal(value, before[path]) for path, value in flat(saving.model.state_dict()).items())
    resumed = new_trainer(tmp_path / "saving", objective=objective)
    resumed.resume()
    plain = new_trainer(tmp_path / "plain", objective=objective)
    for trainer in (saving, resumed, plain):
        trainer.run()
    assert_same_state(saving, plain)
    assert_same_state(resumed, plain)


def test_a_finished_stage_resumes_to_its_end(new_trainer, tmp_path):
    finished = new_trainer(tmp_path, checkpoint_every=6)
    finished.run()
    resumed = new_trainer(tmp_path, checkpoint_every=6)
    resumed.resume()
    resumed.run()
    assert_same_state(resumed, finished)
    assert resumed.telemetry.records == finished.telemetry.records


def test_stages_keep_their_states_apart(new_trainer, tmp_path):
    for name, steps in (("one", 1), ("two", 2)):
        trainer = new_trainer(tmp_path, name=name)
        for _ in range(steps):
            trainer.train_step()
        trainer.save()
    for name, steps in (("one", 1), ("two", 2)):
        trainer = new_trainer(tmp_path, name=name)
        trainer.resume()
        assert trainer.step == steps


def test_what_cannot_be_resumed_or_saved_is_a_user_error(new_trainer, make_model, make_stage, make_batches, tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint to resume at .*first\.state"):
        new_trainer(tmp_path).resume()
    nowhere = Trainer(make_model(), make_stage(), make_batches(), Telemetry())
    with pytest.raises(UserError, match="no run directory to save to"):
        nowhere.save()
    with pytest.raises(UserError, match="no run directory to resume from"):
        nowhere.resume()


def test_another_model_s_state_is_refused_and_leaves_the_model_alone(
    new_trainer, make_model, make_stage, make_batches, tmp_path
):
    new_trainer(tmp_path).save()
    wider = make_model(intermediate_size=32)
    before = flat(wider.state_dict())
    trainer = Trainer(wider, make_stage(), make_batches(), Telemetry(), tmp_path)
    before = {path: value.clone() for path, value in before.items()}
    with pytest.raises(UserError, match=r"Size mismatch .*mlp\."):
        trainer.resume()
    assert all(torch.equal(value, before[path]) for path, value in flat(wider.state_dict()).items())


def test_other_data_is_refused(new_trainer, make_model, make_stage, make_batches, tmp_path):
    new_trainer(tmp_path).save()
    batches = make_batches()
    other = PackedDataset(batches.stream, seq_len=8, batch_size=2, seed=3)
    with pytest.raises(UserError, match="seq_len was 12 and is 8"):
        Trainer(make_model(), make_stage(), other, Telemetry(), tmp_path).resume()
