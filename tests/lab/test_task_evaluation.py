"""A task's measures on a model whose answers and gate are known, computed another way on a random one."""

import numpy as np
import pytest
import torch
from torch import nn

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.lab.fold import VOCAB_SIZE, FoldTask
from looplm.lab.fold_recipe import fold_config
from looplm.lab.task_evaluation import evaluate_task
from looplm.model.looped import LoopedOutput


class Solver(nn.Module):
    """Knows the table. Loop r has folded r lookups; the gate opens for good at the loop that has folded all."""

    def __init__(self, task: FoldTask, num_loops: int) -> None:
        super().__init__()
        self.task, self.config = task, fold_config(task, num_loops).to_model_config()
        self.embed_tokens = nn.Embedding(1, 1)  # where `record` reads the device

    def forward(self, input_ids: torch.Tensor, attention_mask: None, num_loops: int) -> LoopedOutput:
        states = torch.zeros(num_loops, *input_ids.shape, VOCAB_SIZE)
        gate_logits = torch.zeros(num_loops, *input_ids.shape)
        for position in range(input_ids.shape[1]):
            for loop in range(1, num_loops + 1):
                folded = self.task.fold(input_ids[:, : min(loop, position) + 1])
                states[loop - 1, :, position] = nn.functional.one_hot(folded, VOCAB_SIZE).float()
                gate_logits[loop - 1, :, position] = 50.0 if loop >= position else -50.0
        return LoopedOutput(tuple(states), gate_logits)


class SolverLM(nn.Module):
    """The solver under an LM head that reads its states as they are."""

    def __init__(self, task: FoldTask, num_loops: int = 4) -> None:
        super().__init__()
        self.model = Solver(task, num_loops)
        self.lm_head = nn.Linear(VOCAB_SIZE, VOCAB_SIZE, bias=False)
        nn.init.eye_(self.lm_head.weight)


def test_a_solver_of_one_lookup_a_loop_is_seen_as_one():
    task = FoldTask(max_k=3)
    result = evaluate_task(SolverLM(task), task, count=300, thresholds=(0.0, 0.5, 1.0))
    assert (result.levels, result.trained_loops) == ((1, 2, 3), 4)
    assert result.accuracy.shape == (3, 6)  # two loops beyond the trained four
    for k in (1, 2, 3):
        assert (result.accuracy[k - 1, k - 1 :] == 1).all()
        assert (result.accuracy[k - 1, : k - 1] < 0.4).all()
    torch.testing.assert_close(result.expected_loops, torch.tensor([1.0, 2.0, 3.0]))
    assert result.gate.mean_expected_loops == pytest.approx(2)
    assert result.depth_correlation == pytest.approx(1)
    first, half, full = result.exits
    assert first.mean_loops == (1, 1, 1) and first.accuracy[0] == 1 and max(first.accuracy[1:]) < 0.4
    assert half.mean_loops == (1, 2, 3) and half.accuracy == (1, 1, 1)
    assert full.mean_loops == (4, 4, 4) and full.accuracy == (1, 1, 1)


def test_longer_expressions_than_the_trained_ones_and_a_shallow_reading():
    task = FoldTask(max_k=2)
    result = evaluate_task(SolverLM(task, 2), task, 3, levels=(3, 1, 3), count=200, thresholds=(0.5,))
    assert result.levels == (1, 3)
    assert result.exits[0].mean_loops == (1, 2)
    assert result.accuracy.shape == (2, 3) and result.accuracy[1, 2] == 1
    # The gate decides among the two trained loops, so the third lookup is cut off.
    assert result.expected_loops.tolist() == pytest.approx([1, 2])
    assert evaluate_task(SolverLM(task, 2), task, 1, count=50).exits[0].mean_loops == (1, 1)


def test_a_random_model_by_hand():
    task = FoldTask(max_k=2)
    torch.manual_seed(0)
    model = LoopLMForCausalLM(fold_config(task, num_loops=3)).eval()
    nn.init.normal_(model.model.early_exit_gate.weight)
    result = evaluate_task(model, task, count=64, seed=5, thresholds=(0.6,))
    for i, k in enumerate((1, 2)):
        rows = task.questions(k, 64, 5)
        with torch.no_grad():
            output = model(rows[:, :-1], num_loops=5)
        hits = [
            (model.lm_head(hidden[:, -1]).argmax(-1) == rows[:, -1]) for hidden in output.loop_hidden_states
        ]  # 5 x (N,)
        torch.testing.assert_close(result.accuracy[i], torch.stack(hits).float().mean(1))
        first, second = torch.sigmoid(output.gate_logits[:2, :, -1])
        depth = first + 2 * (1 - first) * second + 3 * (1 - first) * (1 - second)
        assert result.expected_loops[i].item() == pytest.approx(depth.mean().item(), abs=1e-5)
        loops = torch.where(first >= 0.6, 1, torch.where(1 - (1 - first) * (1 - second) >= 0.6, 2, 3))
        assert result.exits[0].mean_loops[i] == pytest.approx(loops.double().mean().item())
        right = torch.stack(hits)[loops - 1, torch.arange(64)]
        assert result.exits[0].accuracy[i] == pytest.approx(right.double().mean().item())
        assert 1 < loops.double().mean() < 3


def test_values_out_of_range_are_refused():
    task = FoldTask(max_k=2)
    model = SolverLM(task)
    with pytest.raises(UserError):
        evaluate_task(model, task, count=0)
    with pytest.raises(UserError):
        evaluate_task(model, task, levels=(0,))
    with pytest.raises(UserError):
        evaluate_task(model, task, count=5, thresholds=(-1.0,))


def test_depth_correlation_is_that_of_the_single_questions():
    task = FoldTask(max_k=3)
    torch.manual_seed(0)
    model = LoopLMForCausalLM(fold_config(task, num_loops=3)).eval()
    nn.init.normal_(model.model.early_exit_gate.weight)
    found = evaluate_task(model, task, count=50)
    levels, depths = [], []
    for k in task.levels:
        rows = task.questions(k, 50, 0)
        with torch.no_grad():
            gate = torch.sigmoid(model(rows[:, :-1]).gate_logits[:, :, -1]).double()
        levels += [k] * 50
        depths += (gate[0] + 2 * (1 - gate[0]) * gate[1] + 3 * (1 - gate[0]) * (1 - gate[1])).tolist()
    assert found.depth_correlation == pytest.approx(np.corrcoef(levels, depths)[0, 1], abs=1e-5)
    # One level, or a gate that gives everything one depth: no correlation, rather than a division by zero.
    assert evaluate_task(model, task, levels=(2,), count=5).depth_correlation == 0
    nn.init.zeros_(model.model.early_exit_gate.weight)
    assert evaluate_task(model, task, count=5).depth_correlation == 0
