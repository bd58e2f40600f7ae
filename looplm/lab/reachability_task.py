"""Reachability to be learnt: a graph's edges in any order, then a question, answered at once.

    3>7 0>2 7>1 2>6 ... 3?1 yes

An edge is one word, and so is the question. A graph has two components of equal size, alike but for the names of their
vertices, and all names are drawn anew: the question asks for a vertex at a known distance from the first one's root,
or, with equal chance, for its double in the other component. So yes and no are exactly balanced at every distance, and
nothing gives the answer away but the edges on the way: the number of edges, of vertices or of neighbours never does.

Each component is a path from its root to the vertex asked for, the other vertices attached at random, and a few more
edges that shorten no distance from the root (they close cycles and join branches). With 8 vertices there are more than
10^10 such documents: what is evaluated has in all likelihood never been trained on.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looplm.errors import UserError
from looplm.lab.task import (
    QUESTIONS,
    Documents,
    at_least_one,
    checked_seed,
    fill_up,
)
from looplm.lab.task_recipe import recipe_functions


@dataclass(frozen=True)
class ReachabilityTask:
    """Graphs of `num_vertices`, half of them in each component, which has `num_extra` edges beyond those of a tree.

    `seed` decides nothing about the task, only where its documents begin.
    Raises UserError for an odd number of vertices or below 4, more extra edges than there may be, or a negative seed.
    """

    name: ClassVar = "reachability"
    level_name: ClassVar = "distance"
    num_vertices: int = 8
    num_extra: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_vertices < 4 or self.num_vertices % 2:
            raise UserError(
                f"num_vertices is {self.num_vertices}; two equal components need an even number from 4 on."
            )
        most = self._half * (self._half - 1) // 2  # edges back to an earlier vertex of a path are always free
        if not 0 <= self.num_extra <= most:
            raise UserError(f"num_extra is {self.num_extra}; it must lie between 0 and {most}.")
        checked_seed(self.seed)

    @property
    def _half(self) -> int:
        return self.num_vertices // 2

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(range(1, self._half))

    @property
    def words(self) -> tuple[str, ...]:
        """Edges, questions, yes, no, <pad>."""
        pairs = [(s, t) for s in range(self.num_vertices) for t in range(self.num_vertices)]
        return (*(f"{s}>{t}" for s, t in pairs), *(f"{s}?{t}" for s, t in pairs), "yes", "no", "<pad>")

    @property
    def max_len(self) -> int:
        return 2 * (self._half - 1 + self.num_extra) + 2

    def draw(self, count: int, rng: np.random.Generator) -> Documents:
        """See :class:`~looplm.lab.task.Task`: the distance is uniform in 1 to num_vertices / 2 - 1."""
        distances = rng.integers(1, self._half, size=count)
        documents = []
        for distance in self.levels:
            rows = (distances == distance).nonzero()[0]
            documents.append((torch.from_numpy(rows), self.graphs(distance, len(rows), rng)))
        return fill_up(documents, count, self.max_len, len(self.words) - 1)

    def questions(self, level: int, count: int, seed: int) -> Int[Tensor, "N S"]:
        """See :class:`~looplm.lab.task.Task`."""
        if level not in self.levels:
            raise UserError(f"distance is {level}; it must lie between 1 and {self._half - 1}.")
        rng = np.random.default_rng((QUESTIONS, checked_seed(seed), level))
        return self.graphs(level, at_least_one("count", count), rng)

    def graphs(self, distance: int, count: int, rng: np.random.Generator) -> Int[Tensor, "N S"]:
        """`count` documents whose question asks for a vertex `distance` edges away from a root, or its double."""
        sources, targets = self._component(distance, count, rng)  # (count, edges), vertices 0 (the root) to half - 1
        names = rng.permuted(np.tile(np.arange(self.num_vertices), (count, 1)), axis=1)
        rows = np.arange(count)
        mine, other = names[:, : self._half], names[:, self._half :]
        edges = np.concatenate(
            [self.num_vertices * of[rows[:, None], sources] + of[rows[:, None], targets] for of in (mine, other)],
            axis=1,
        )
        edges = rng.permuted(edges, axis=1)
        yes = rng.integers(2, size=count) == 1
        asked = np.where(yes, mine[:, distance], other[:, distance])
        question = self.num_vertices**2 + self.num_vertices * mine[:, 0] + asked
        answer = 2 * self.num_vertices**2 + ~yes
        return torch.from_numpy(np.column_stack([edges, question, answer]))

    def _component(self, distance: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sources and targets of each row's edges, (count, half - 1 + num_extra) each."""
        half, rows = self._half, np.arange(count)
        free = ~np.broadcast_to(np.eye(half, dtype=bool), (count, half, half)).copy()  # edges that may still be drawn
        depth = np.zeros((count, half), dtype=np.int64)
        sources, targets = [], []
        for vertex in range(1, half):
            parent = np.full(count, vertex - 1) if vertex <= distance else rng.integers(vertex, size=count)
            depth[:, vertex] = depth[rows, parent] + 1
            free[rows, parent, vertex] = False
            sources.append(parent)
            targets.append(np.full(count, vertex))
        free &= depth[:, None, :] <= depth[:, :, None] + 1  # no distance from the root becomes shorter
        for _ in range(self.num_extra):
            drawn = (rng.random((count, half, half)) * free).reshape(count, -1).argmax(1)
            source, target = np.divmod(drawn, half)
            free[rows, source, target] = False
            sources.append(source)
            targets.append(target)
        return np.stack(sources, axis=1), np.stack(targets, axis=1)


documents, tokenizer, measure = recipe_functions(ReachabilityTask)
