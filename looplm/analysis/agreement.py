"""Does the answer change between loops? Agreement of every two loops, what each loop answers, and the flips.

Ouro (section 7.2) reads agreement between loops as evidence that a loop's state decides its answer, and not a later
rationalisation. Agreement alone can mislead: two loops that always say yes agree perfectly. Hence the marginals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

OTHER = "other"


@dataclass(frozen=True)
class Agreement:
    """Answers of R loops to N prompts."""

    labels: tuple[str, ...]
    """The answers counted by name; with free answers a last one, "other", for all the rest."""
    num_prompts: int
    matrix: tuple[tuple[int, ...], ...]
    """(R, R): prompts on which two loops give the same answer."""
    chance: tuple[tuple[float, ...], ...]
    """(R, R): prompts on which they would, were their answers independent with these marginals."""
    marginals: tuple[tuple[float, ...], ...]
    """(R, C): share of each answer at each loop."""
    flips: tuple[tuple[tuple[int, ...], ...], ...]
    """(R - 1, C, C): prompts whose answer goes from one label (row) to another (column) with one more loop."""
    accuracy: tuple[float, ...] | None
    """(R,): share of right answers, where these are known."""
    mean_exit_pdf: tuple[float, ...]
    """(R,): how likely the gate is to leave at each loop, where the answer is read."""


def agreement(
    answers: Int[Tensor, "R N"],
    labels: Sequence[str],
    right: Int[Tensor, " N"] | None = None,
    mean_exit_pdf: Sequence[float] = (),
) -> Agreement:
    """Counts agreement among `answers`, numbers of `labels`; higher numbers are other answers, each its own."""
    num_loops, num_prompts = answers.shape
    names = tuple(labels)
    if int(answers.max()) >= len(names):
        names = (*names, OTHER)
    binned = answers.clamp(max=len(names) - 1)  # (R, N)
    shares = torch.stack([torch.bincount(row, minlength=len(names)) for row in binned]).double() / num_prompts
    exact = int(answers.max()) + 1
    full = torch.stack([torch.bincount(row, minlength=exact) for row in answers]).double() / num_prompts
    flips = (
        torch.stack(
            [
                torch.bincount(binned[r] * len(names) + binned[r + 1], minlength=len(names) ** 2).view(len(names), -1)
                for r in range(num_loops - 1)
            ]
        )
        if num_loops > 1
        else torch.zeros(0, len(names), len(names), dtype=torch.long)
    )
    # What stays is no flip; two different answers that are both "other" are one, but under no two names.
    flips = flips.clone()
    flips.diagonal(dim1=1, dim2=2).zero_()
    return Agreement(
        labels=names,
        num_prompts=num_prompts,
        matrix=_nested((answers[:, None] == answers[None]).sum(-1)),
        chance=_nested(full @ full.T * num_prompts),
        marginals=_nested(shares),
        flips=_nested(flips),
        accuracy=None if right is None else tuple((answers == right).double().mean(1).tolist()),
        mean_exit_pdf=tuple(mean_exit_pdf),
    )


@dataclass(frozen=True)
class LevelAgreement:
    """Answers of R loops to the prompts of one level."""

    level: int
    num_prompts: int
    changed: tuple[float, ...]
    """(R - 1,): share of prompts whose answer another loop changes."""
    accuracy: tuple[float, ...] | None
    """(R,): share of right answers, where these are known."""


def agreement_by_level(
    answers: Int[Tensor, "R N"], right: Int[Tensor, " N"] | None, levels: Sequence[int | None]
) -> tuple[LevelAgreement, ...]:
    """What changes at each level, ascending; prompts without one are left out."""
    found = []
    for level in sorted({one for one in levels if one is not None}):
        mine = torch.tensor([one == level for one in levels])
        given = answers[:, mine]
        found.append(
            LevelAgreement(
                level=level,
                num_prompts=int(mine.sum()),
                changed=tuple((given[1:] != given[:-1]).double().mean(1).tolist()),
                accuracy=None if right is None else tuple((given == right[mine]).double().mean(1).tolist()),
            )
        )
    return tuple(found)


def _nested(values: Tensor) -> tuple:
    """A tensor as nested tuples."""
    return tuple(_nested(part) for part in values) if values.ndim else values.item()  # pyright: ignore[reportReturnType]
