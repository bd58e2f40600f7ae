"""What a model has learnt of fold: accuracy by k and loop, the gate's depth by k, and both under early exit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.data.packing import IGNORE_INDEX
from looplm.evaluation.exit_curve import GateStatistics, gate_statistics, loops_at
from looplm.evaluation.groups import GroupPoint, accuracy_by_group
from looplm.evaluation.record import DepthRecord, LoopLM, record
from looplm.lab.fold import FoldTask

EXTRA_LOOPS = 2
"""Loops beyond the trained depth that are measured by default."""


@dataclass(kw_only=True, frozen=True)
class FoldExit:
    """Every answer read out at the first loop whose exit cdf reaches `threshold`. Tuples go by k."""

    threshold: float
    accuracy: tuple[float, ...]
    mean_loops: tuple[float, ...]


@dataclass(kw_only=True, frozen=True)
class FoldResult:
    """Figures over equally many held-out expressions of each k."""

    trained_loops: int
    groups: tuple[GroupPoint, ...]
    """By k, ascending: accuracy at each measured loop, expected depth and its spread."""
    gate: GateStatistics
    """Over all expressions."""
    exits: tuple[FoldExit, ...]

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of each group."""
        return tuple(group.group for group in self.groups)

    @property
    def accuracy(self) -> Float[Tensor, "K R"]:
        """Share answered right, by k and loop."""
        return torch.tensor([group.accuracy_by_loop for group in self.groups])

    @property
    def expected_loops(self) -> Float[Tensor, " K"]:
        """Mean expected exit loop, by k."""
        return torch.tensor([group.expected_loops for group in self.groups])


def evaluate_fold(
    model: LoopLM,
    task: FoldTask,
    num_loops: int | None = None,
    *,
    ks: Sequence[int] | None = None,
    count: int = 1000,
    seed: int = 0,
    thresholds: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
) -> FoldResult:
    """Measures `model` on `count` held-out expressions of each k.

    Args:
        model: is run as it stands; put it in eval mode.
        num_loops: deepest loop to read, two beyond the trained depth when None. The gate decides among the trained
            ones, or as many as are read.
        ks: 1 to `task.max_k` when None; longer expressions than were trained are allowed.
        thresholds: of :class:`~looplm.inference.exit_policy.QuantileExit`.

    Raises UserError for a k, count or threshold out of range.
    """
    depth = model.model.config.num_loops + EXTRA_LOOPS if num_loops is None else num_loops
    wanted = sorted(set(ks)) if ks is not None else list(range(1, task.max_k + 1))
    batches = [_batch(task.examples(k, count, seed)) for k in wanted]
    lengths = torch.tensor(wanted).repeat_interleave(count)  # (N,), the k of each expression
    # Every row counts as the same document: expressions are independent, and nothing here is per byte.
    found = record(model, batches, torch.ones(1, dtype=torch.long), depth)
    return FoldResult(
        trained_loops=found.trained_loops,
        groups=accuracy_by_group(found, lengths),
        gate=gate_statistics(found),
        exits=tuple(_exit(found, threshold, len(wanted)) for threshold in thresholds),
    )


def _batch(rows: Int[Tensor, "N S"]) -> dict[str, Tensor]:
    """Rows of one k as :func:`looplm.evaluation.record.record` reads them; only the last token is predicted."""
    labels = torch.full_like(rows, IGNORE_INDEX)
    labels[:, -1] = rows[:, -1]
    return {
        "input_ids": rows,
        "labels": labels,
        "attention_mask": torch.ones_like(rows),
        "document_index": torch.zeros(len(rows), dtype=torch.long),
    }


def _exit(found: DepthRecord, threshold: float, num_groups: int) -> FoldExit:
    loops = loops_at(found, threshold, found.gated_loops())  # (N,)
    right = found.predictions.gather(0, loops[None] - 1)[0] == found.targets
    return FoldExit(
        threshold=threshold,
        accuracy=tuple(right.double().view(num_groups, -1).mean(1).tolist()),
        mean_loops=tuple(loops.double().view(num_groups, -1).mean(1).tolist()),
    )
