"""What a model has learnt of a task: accuracy by level and loop, the gate's depth by level, both under early exit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.data.packing import IGNORE_INDEX
from looplm.evaluation.exit_curve import GateStatistics, gate_statistics, loops_at
from looplm.evaluation.groups import GroupPoint, accuracy_by_group
from looplm.evaluation.record import DepthRecord, record
from looplm.lab.task import Task, at_least_one
from looplm.model.gate import expected_loops
from looplm.model.language_model import LoopLM

EXTRA_LOOPS = 2
"""Loops beyond the trained depth that are measured by default."""

_ROWS_A_BATCH = 1000


@dataclass(kw_only=True, frozen=True)
class TaskExit:
    """Every answer read out at the first loop whose exit cdf reaches `threshold`. Tuples go by level."""

    threshold: float
    accuracy: tuple[float, ...]
    mean_loops: tuple[float, ...]


@dataclass(kw_only=True, frozen=True)
class TaskResult:
    """Figures over equally many held-out questions of each level."""

    trained_loops: int
    groups: tuple[GroupPoint, ...]
    """By level, ascending: accuracy at each measured loop, expected depth and its spread."""
    gate: GateStatistics
    """Over all questions."""
    depth_correlation: float
    """Pearson's, over questions, between level and expected exit loop; 0 where either does not vary."""
    exits: tuple[TaskExit, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        """The level of each group."""
        return tuple(group.group for group in self.groups)

    @property
    def accuracy(self) -> Float[Tensor, "K R"]:
        """Share answered right, by level and loop."""
        return torch.tensor([group.accuracy_by_loop for group in self.groups])

    @property
    def expected_loops(self) -> Float[Tensor, " K"]:
        """Mean expected exit loop, by level."""
        return torch.tensor([group.expected_loops for group in self.groups])


def evaluate_task(
    model: LoopLM,
    task: Task,
    num_loops: int | None = None,
    *,
    levels: Sequence[int] | None = None,
    count: int = 1000,
    seed: int = 0,
    thresholds: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
) -> TaskResult:
    """Measures `model` on `count` held-out questions of each level.

    Args:
        model: is run as it stands; put it in eval mode.
        num_loops: deepest loop to read, two beyond the trained depth when None. The gate decides among the trained
            ones, or as many as are read.
        levels: those of the task when None; it may have others (longer expressions than were trained, say).
        thresholds: of :class:`~looplm.inference.exit_policy.QuantileExit`.

    Raises UserError for a level, count or threshold out of range.
    """
    depth = model.model.config.num_loops + EXTRA_LOOPS if num_loops is None else num_loops
    wanted = sorted(set(levels)) if levels is not None else list(task.levels)
    at_least_one("count", count)
    batches = [_batch(rows) for level in wanted for rows in task.questions(level, count, seed).split(_ROWS_A_BATCH)]
    of_each = torch.tensor(wanted).repeat_interleave(count)  # (N,), the level of each question
    # Every row counts as the same document: questions are independent, and nothing here is per byte.
    found = record(model, batches, torch.ones(1, dtype=torch.long), depth)
    return TaskResult(
        trained_loops=found.trained_loops,
        groups=accuracy_by_group(found, of_each),
        gate=gate_statistics(found),
        depth_correlation=_correlation(of_each, expected_loops(found.gate_logits[: found.gated_loops()])),
        exits=tuple(_exit(found, threshold, len(wanted)) for threshold in thresholds),
    )


def task_figures(model: LoopLM, task: Task, count: int = 4000) -> dict[str, Any]:
    """:func:`evaluate_task` as figures for a study: lists go by level, or by loop from 1 on.

    `accuracy` is that of the hardest level at the trained depth.
    """
    found = evaluate_task(model, task, count=count)
    trained = found.trained_loops - 1
    return {
        "accuracy": found.groups[-1].accuracy_by_loop[trained],
        "levels": list(found.levels),
        "accuracy_by_level": [group.accuracy_by_loop[trained] for group in found.groups],
        "accuracy_by_loop": list(found.groups[-1].accuracy_by_loop),
        "accuracy_by_level_and_loop": [list(group.accuracy_by_loop) for group in found.groups],
        "expected_loops_by_level": [group.expected_loops for group in found.groups],
        "depth_correlation": found.depth_correlation,
    }


def _batch(rows: Int[Tensor, "N S"]) -> dict[str, Tensor]:
    """Questions of one length as :func:`looplm.evaluation.record.record` reads them; only the answer is predicted."""
    labels = torch.full_like(rows, IGNORE_INDEX)
    labels[:, -1] = rows[:, -1]
    return {
        "input_ids": rows,
        "labels": labels,
        "attention_mask": torch.ones_like(rows),
        "document_index": torch.zeros(len(rows), dtype=torch.long),
    }


def _correlation(levels: Tensor, depths: Tensor) -> float:
    if levels.unique().numel() < 2 or depths.unique().numel() < 2:
        return 0.0
    return torch.corrcoef(torch.stack([levels.double(), depths.double()]))[0, 1].item()


def _exit(found: DepthRecord, threshold: float, num_levels: int) -> TaskExit:
    loops = loops_at(found, threshold, found.gated_loops())  # (N,)
    right = found.predictions.gather(0, loops[None] - 1)[0] == found.targets
    return TaskExit(
        threshold=threshold,
        accuracy=tuple(right.double().view(num_levels, -1).mean(1).tolist()),
        mean_loops=tuple(loops.double().view(num_levels, -1).mean(1).tolist()),
    )
