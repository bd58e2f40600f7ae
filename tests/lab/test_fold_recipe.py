"""The fold recipe in miniature: it trains, resumes where it stood, and leaves the language model alone in Stage II."""

import pytest
import torch

from looplm.lab.fold import FoldTask
from looplm.lab.fold_recipe import BATCH_SIZE, fold_config, fold_stages, train_fold
from looplm.lab.task import TaskStream
from looplm.lab.task_evaluation import evaluate_task
from looplm.training.stage_recipe import GateLossRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer


def test_a_short_training_learns_single_lookups():
    task = FoldTask(max_k=1)
    telemetry = Telemetry()
    model = train_fold(task, fold_config(task, num_loops=2), fold_stages(2, 60, 10, max_k=1), telemetry)
    assert evaluate_task(model, task, count=200).accuracy[0, :2].max() > 0.9
    assert {record.stage for record in telemetry.records} == {"fold", "fold-gate"}
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())


def test_the_seed_alone_decides_and_the_global_random_state_is_left_alone():
    task = FoldTask(max_k=2)
    config, stages = fold_config(task, num_loops=2), fold_stages(2, 2, 2, max_k=2)
    before = torch.get_rng_state()
    first = train_fold(task, config, stages, Telemetry(), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    second = train_fold(task, config, stages, Telemetry(), seed=1)
    other = train_fold(task, config, stages, Telemetry(), seed=2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_gate_stage_changes_the_gate_alone():
    task = FoldTask(max_k=2)
    config, (learn, gate) = fold_config(task, num_loops=3), fold_stages(3, 2, 5, max_k=2)
    after_learning = train_fold(task, config, (learn,), Telemetry()).state_dict()
    after_gate = train_fold(task, config, (learn, gate), Telemetry()).state_dict()
    changed = {name for name in after_gate if not torch.equal(after_gate[name], after_learning[name])}
    assert changed == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


def test_training_resumes_bit_for_bit(tmp_path):
    task = FoldTask(max_k=2)
    config, (learn,) = fold_config(task, num_loops=1), fold_stages(1, 6, max_k=2)
    straight = train_fold(task, config, (learn,), Telemetry())

    def trainer(seed: int) -> Trainer:
        model = train_fold(task, config, (), Telemetry(), seed=seed)
        return Trainer(model, learn, TaskStream(task, BATCH_SIZE, 0), Telemetry(), tmp_path)

    halted = trainer(seed=0)  # killed at step 4, after the checkpoint of step 3
    for _ in range(3):
        halted.train_step()
    saved = halted.save()
    halted.train_step()
    again = trainer(seed=9)
    again.resume(saved)
    again.run()
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_one_loop_has_no_gate_to_train():
    assert [stage.name for stage in fold_stages(1)] == ["fold one-loop twin"]
    _, gate = fold_stages(4)
    assert isinstance(gate.objective, GateLossRecipe)


@pytest.mark.parametrize("num_steps", [1, 5, 60, 5000])
def test_any_number_of_steps_makes_valid_stages(num_steps):
    assert [stage.num_steps for stage in fold_stages(4, num_steps, num_steps)] == [num_steps, num_steps]
