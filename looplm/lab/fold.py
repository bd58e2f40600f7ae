"""Fold: k + 1 digits folded from the left with a fixed random 10 x 10 table, so that k lookups must follow each other.

    3 1 4 -> table[table[3][1]][4]        (k = 2)

The answer follows the last digit directly. Nothing marks the end, so a model folds whatever prefix it has read;
only the answer of the whole expression is ever labelled, never a partial result.

Every row of the table is a permutation of the digits, drawn from a seed, and digits are independent and uniform.
Whatever has been folded so far, the next digit then makes the result uniform: among all expressions the ten answers
are equally frequent at every k (among the hundred that k = 2 holds out they are not quite). A table of independent
entries has favourite answers, and some reach only a few. Columns are left free: were they permutations too (a Latin
square), one unseen digit would hide the answer entirely, and nothing would reward the last lookups before the first
are learnt. How far the last digits alone go says `FoldTask.guess_accuracy`.

From k = 2 on, one expression in ten is held out: training never draws it, evaluation draws nothing else, so that what
is measured is folding and not memory. At k = 1 there is only the table itself, which training must see whole.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int
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

BASE = 10
"""Digits, which are their own token ids."""
PAD = BASE
VOCAB_SIZE = BASE + 1
FIRST_HELD_OUT_K = 2

_TABLE, _MARKS = range(2)  # like task.STREAM, keep the draws of one seed apart


@dataclass(frozen=True)
class FoldTask:
    """Expressions of 1 to `max_k` table lookups. Raises UserError for `max_k` below 1 or a negative seed."""

    name: ClassVar = "fold"
    level_name: ClassVar = "k"
    max_k: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one("max_k", self.max_k)
        checked_seed(self.seed)

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(range(1, self.max_k + 1))

    @property
    def words(self) -> tuple[str, ...]:
        return (*map(str, range(BASE)), "<pad>")

    @property
    def max_len(self) -> int:
        return self.max_k + 2

    @cached_property
    def table(self) -> Int[Tensor, "10 10"]:
        """table[folded so far][next digit], int64."""
        rng = np.random.default_rng((_TABLE, self.seed))
        return torch.from_numpy(np.stack([rng.permutation(BASE) for _ in range(BASE)]))

    def draw(self, count: int, rng: np.random.Generator) -> Documents:
        """See :class:`~looplm.lab.task.Task`: each expression has its own k, uniform in 1..max_k."""
        ks = torch.from_numpy(rng.integers(1, self.max_k + 1, size=count))
        documents = []
        for k in self.levels:
            rows = (ks == k).nonzero()[:, 0]
            documents.append((rows, self.answered(self.expressions(k, len(rows), rng, held_out=False))))
        return fill_up(documents, count, self.max_len, PAD)

    def questions(self, level: int, count: int, seed: int) -> Int[Tensor, "N S"]:
        """See :class:`~looplm.lab.task.Task`: at k = 1 any expression; k may exceed `max_k`."""
        rng = np.random.default_rng((QUESTIONS, checked_seed(seed), level))
        return self.answered(
            self.expressions(at_least_one("k", level), at_least_one("count", count), rng, held_out=True)
        )

    def answered(self, digits: Int[Tensor, "N m"]) -> Int[Tensor, "N S"]:
        """Expressions with their answers behind them."""
        return torch.cat((digits, self.fold(digits)[:, None]), dim=1)

    def fold(self, digits: Int[Tensor, "N m"]) -> Int[Tensor, " N"]:
        """Folds each row of digits from the left; a single digit is its own result."""
        result = digits[:, 0]
        for column in digits[:, 1:].unbind(1):
            result = self.table[result, column]
        return result

    def held_out(self, digits: Int[Tensor, "N m"]) -> Bool[Tensor, " N"]:
        """Which expressions training never draws: given all digits but one, exactly one choice of that one."""
        k = digits.shape[1] - 1
        if k < FIRST_HELD_OUT_K:
            return torch.zeros(len(digits), dtype=torch.bool)
        marks = torch.from_numpy(self._marks(k))
        return marks[torch.arange(k + 1), digits].sum(1) % BASE == 0

    def expressions(self, k: int, count: int, rng: np.random.Generator, held_out: bool) -> Int[Tensor, "N m"]:
        """`count` expressions of k lookups, (count, k + 1) digits: uniform over those held out, or over the rest."""
        digits = rng.integers(BASE, size=(count, k + 1))
        if k >= FIRST_HELD_OUT_K:
            # The last digit is what makes the marks sum to the residue wanted; no draw has to be rejected.
            marks = self._marks(k)
            residues = np.zeros(count, dtype=np.int64) if held_out else rng.integers(1, BASE, size=count)
            others = marks[np.arange(k), digits[:, :k]].sum(1)
            digits[:, k] = np.argsort(marks[k])[(residues - others) % BASE]
        return torch.from_numpy(digits)

    def guess_accuracy(self, k: int, num_seen: int) -> float:
        """Accuracy of the best guess at k lookups from the last `num_seen` digits alone, over all expressions.

        What can be scored without folding from the start. Raises UserError for k below 1 or num_seen outside
        0..k + 1.
        """
        if not 0 <= num_seen <= at_least_one("k", k) + 1:
            raise UserError(f"num_seen is {num_seen}; an expression of {k} lookups has {k + 1} digits.")
        if num_seen == k + 1:
            return 1.0
        # What the unseen digits fold to is uniform: a free first digit, or the balance of the rows.
        results = torch.arange(BASE)[:, None]  # (result so far, seen digits)
        for _ in range(num_seen):
            results = self.table[results].flatten(1)
        counts = torch.stack([(results == digit).sum(0) for digit in range(BASE)])  # (answer, seen digits)
        return counts.amax(0).double().mean().item() / BASE

    def _marks(self, k: int) -> np.ndarray:
        """(k + 1, 10), a permutation for each position: held out are the expressions whose marks sum to 0 mod 10."""
        rng = np.random.default_rng((_MARKS, self.seed, k))
        return np.stack([rng.permutation(BASE) for _ in range(k + 1)])


documents, tokenizer, measure = recipe_functions(FoldTask)
