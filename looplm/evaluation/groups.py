"""Accuracy and depth by kind of question, where the difficulty is known: does the gate go deeper where it must?"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from looplm.evaluation.record import DepthRecord
from looplm.model.gate import expected_loops


@dataclass(kw_only=True, frozen=True)
class GroupPoint:
    """The tokens of one group."""

    group: int
    num_tokens: int
    accuracy_by_loop: tuple[float, ...]
    """Share predicted right at loop 1, 2, ... of the record."""
    expected_loops: float
    """Mean over the group's tokens of the expected exit loop."""
    expected_loops_std: float
    """Standard deviation of the same across its tokens."""


def accuracy_by_group(
    record: DepthRecord, groups: Int[Tensor, " N"] | Sequence[int], num_loops: int | None = None
) -> tuple[GroupPoint, ...]:
    """Splits the recorded tokens by `groups`, one integer each (the k of a fold, say), in ascending order.

    The gate decides among the first `num_loops` loops, the trained depth when None.
    """
    labels = groups if isinstance(groups, Tensor) else record.targets.new_tensor(groups)
    right = record.predictions == record.targets  # (R, N)
    expected = expected_loops(record.gate_logits[: record.gated_loops(num_loops)]).double()  # (N,)
    points: list[GroupPoint] = []
    for group in labels.unique(sorted=True).tolist():
        chosen = labels == group
        points.append(
            GroupPoint(
                group=group,
                num_tokens=int(chosen.sum()),
                accuracy_by_loop=tuple(right[:, chosen].double().mean(1).tolist()),
                expected_loops=expected[chosen].mean().item(),
                expected_loops_std=expected[chosen].std(correction=0).item(),
            )
        )
    return tuple(points)
