"""How many rows one forward takes: the recipe's, what fits, and on another machine what the run had before."""

from pathlib import Path

import pytest
import torch

from looplm.errors import UserError
from looplm.training.distributed import Ranks
from looplm.training.memory import estimate_memory
from looplm.training.micro_batches import rows_of_forwards
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .runs import SEQ_LEN, tiny_model, tiny_rows, tiny_stage, whole_state

CONFIG = tiny_model().model.config
STAGE = tiny_stage(batch_tokens=8 * SEQ_LEN)
ALONE = Ranks(0, 1, torch.device("cpu"), grouped=False)


def room_for(rows: int, *, dense_mask: bool = True) -> int:
    """Bytes of a device that fits so many rows a forward and not more."""
    return int(estimate_memory(CONFIG, STAGE, rows, accumulates=True, dense_mask=dense_mask).total / 0.9) + 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    """Sets what the device is said to hold."""

    def set_to(size: int | None) -> None:
        monkeypatch.setattr(Ranks, "memory_bytes", lambda ranks: size)

    return set_to


def test_the_recipe_s_or_what_fits_or_all(memory) -> None:
    memory(room_for(2))
    assert rows_of_forwards(CONFIG, STAGE, [8, 6, 1], ALONE) == {8: 2, 6: 2, 1: 1}
    assert rows_of_forwards(CONFIG, tiny_stage(micro_batch_rows=3), [8, 6], ALONE) == {8: 3, 6: 3}
    memory(None)
    assert rows_of_forwards(CONFIG, STAGE, [8, 6], ALONE) == {8: 8, 6: 6}
    memory(1000)
    with pytest.raises(UserError, match="one row of 12 tokens needs"):
        rows_of_forwards(CONFIG, STAGE, [8], ALONE)


def test_a_gpu_holds_no_dense_mask(memory) -> None:
    memory(room_for(4, dense_mask=False))
    gpu = Ranks(0, 1, torch.device("cuda", 0), grouped=False)
    assert rows_of_forwards(CONFIG, STAGE, [8], gpu) == {8: 4}
    assert rows_of_forwards(CONFIG, STAGE, [8], ALONE)[8] < 4


def test_what_was_found_before_stays_where_it_fits(memory) -> None:
    memory(room_for(4))
    assert rows_of_forwards(CONFIG, STAGE, [8], ALONE, before={8: 2, 4: 1}) == {8: 2}
    assert rows_of_forwards(CONFIG, STAGE, [8, 6], ALONE, before={8: 4}) == {8: 4, 6: 3}
    memory(room_for(1))
    assert rows_of_forwards(CONFIG, STAGE, [8], ALONE, before={8: 4}) == {8: 1}
    memory(None)
    assert rows_of_forwards(CONFIG, STAGE, [8], ALONE, before={8: 4}) == {8: 4}


def test_a_run_goes_on_bit_for_bit_on_a_machine_with_more_memory(tmp_path: Path, memory) -> None:
    """In the same parts, those of batch sizes yet to come too: a whole batch would add up in another order."""

    def new(run_dir: Path | None = None) -> Trainer:
        ramp = {"start": 4 * SEQ_LEN, "end": 8 * SEQ_LEN, "over_tokens": 16 * SEQ_LEN, "increments": 1}
        stage = tiny_stage(batch_tokens=ramp, num_steps=6)
        return Trainer(tiny_model(), stage, tiny_rows(), Telemetry(), run_dir)

    memory(room_for(2))
    straight = new()
    straight.run()
    first = new(tmp_path)
    for _ in range(3):
        first.train_step()
    saved = first.save()
    memory(room_for(100))
    resumed = new(tmp_path)
    assert resumed._forward_rows == {4: 4, 8: 8}
    resumed.resume(saved)
    assert resumed._forward_rows == {4: 2, 8: 2}
    resumed.run()
    assert resumed.step == 6
    for name, expected in whole_state(straight).items():
        assert torch.equal(whole_state(resumed)[name], expected), name
    otherwise = new()
    otherwise.run()
    assert any(not torch.equal(whole_state(otherwise)[name], value) for name, value in whole_state(straight).items())
