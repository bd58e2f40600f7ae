"""Fold: k + 1 digits folded from the left with a fixed random 10 x 10 table, so that k lookups must follow each other.

    3 1 4 -> table[table[3][1]][4]        (k = 2)

The answer follows the last digit directly. Nothing marks the end, so a model folds whatever prefix it has read;
only the answer of the whole expression is ever labelled, never a partial result.

Every row of the table is a permutation of the digits, drawn from a seed, and digits are independent and uniform.
Whatever has been folded so far, the next digit then makes the result uniform: all ten answers are equally frequent at
every k. A table of independent entries has favourite answers, and some reach only a few. Columns are left free: were
they permutations too (a Latin square), one unseen digit would hide the answer entirely, and nothing would reward the
last lookups before the first are learnt. How far the last digits alone go says `FoldTask.guess_accuracy`.

From k = 2 on, one expression in ten is held out: training never draws it, evaluation draws nothing else, so that what
is measured is folding and not memory. At k = 1 there is only the table itself, which training must see whole.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError

BASE = 10
"""Digits, which are their own token ids."""
PAD = BASE
VOCAB_SIZE = BASE + 1
FIRST_HELD_OUT_K = 2

_TABLE, _MARKS, _STREAM, _EXAMPLES = range(4)  # keep the draws of one seed apart


class FoldTask:
    """Expressions of 1 to `max_k` table lookups. Raises UserError for `max_k` below 1 or a negative seed."""

    def __init__(self, max_k: int = 4, seed: int = 0) -> None:
        self.max_k, self.seed = _at_least_one("max_k", max_k), _checked_seed(seed)
        rng = np.random.default_rng((_TABLE, seed))
        self.table = torch.from_numpy(np.stack([rng.permutation(BASE) for _ in range(BASE)]))
        """(10, 10) int64, table[folded so far][next digit]."""

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

    def draw(self, k: int, count: int, rng: np.random.Generator, held_out: bool) -> Int[Tensor, "N m"]:
        """`count` expressions of k lookups, (count, k + 1) digits: uniform over those held out, or over the rest."""
        digits = rng.integers(BASE, size=(count, k + 1))
        if k >= FIRST_HELD_OUT_K:
            # The last digit is what makes the marks sum to the residue wanted; no draw has to be rejected.
            marks = self._marks(k)
            residues = np.zeros(count, dtype=np.int64) if held_out else rng.integers(1, BASE, size=count)
            others = marks[np.arange(k), digits[:, :k]].sum(1)
            digits[:, k] = np.argsort(marks[k])[(residues - others) % BASE]
        return torch.from_numpy(digits)

    def examples(self, k: int, count: int, seed: int) -> Int[Tensor, "N m"]:
        """`count` held-out expressions of k lookups, drawn independently: (count, k + 2), the answer last.

        At k = 1 any expression. k may exceed `max_k`. Raises UserError for k or count below 1 or a negative seed.
        """
        rng = np.random.default_rng((_EXAMPLES, _checked_seed(seed), k))
        digits = self.draw(_at_least_one("k", k), _at_least_one("count", count), rng, held_out=True)
        return torch.cat((digits, self.fold(digits)[:, None]), dim=1)

    def stream(self, batch_size: int, seed: int) -> "FoldStream":
        """Endless training batches, see :class:`FoldStream`."""
        return FoldStream(self, batch_size, seed)

    def guess_accuracy(self, k: int, num_seen: int) -> float:
        """Accuracy of the best guess at k lookups from the last `num_seen` digits alone, over all expressions.

        What can be scored without folding from the start. Raises UserError for k below 1 or num_seen outside
        0..k + 1.
        """
        if not 0 <= num_seen <= _at_least_one("k", k) + 1:
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


class FoldStream:
    """Endless batches of `batch_size` training expressions, each with its own k, uniform in 1..max_k.

    A batch holds input_ids, labels and document_ids, int64 (B, max_k + 2). A row is one document: digits, answer,
    pads, which stand to the right, where causal attention does not look. Labels are unshifted as everywhere, and
    IGNORE_INDEX except at the answer.

    A batch depends on the task, `batch_size`, `seed` and the number of batches before it, on nothing else, so
    resuming is exact. Raises UserError for a batch size below 1 or a negative seed.
    """

    def __init__(self, task: FoldTask, batch_size: int, seed: int) -> None:
        self.task, self.batch_size, self.seed = task, _at_least_one("batch_size", batch_size), _checked_seed(seed)
        self.num_drawn = 0
        """Batches drawn so far."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        rng = np.random.default_rng((_STREAM, self.seed, self.num_drawn))
        self.num_drawn += 1
        max_k = self.task.max_k
        ks = torch.from_numpy(rng.integers(1, max_k + 1, size=self.batch_size))
        input_ids = torch.full((self.batch_size, max_k + 2), PAD)
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        for k in range(1, max_k + 1):
            rows = (ks == k).nonzero()[:, 0]
            digits = self.task.draw(k, len(rows), rng, held_out=False)
            input_ids[rows, : k + 1] = digits
            input_ids[rows, k + 1] = labels[rows, k + 1] = self.task.fold(digits)
        return {"input_ids": input_ids, "labels": labels, "document_ids": torch.zeros_like(input_ids)}

    def take(self, num_rows: int) -> dict[str, Tensor]:
        """The next batch, for a trainer in one process. Raises UserError unless `num_rows` is the batch size."""
        if num_rows != self.batch_size:
            raise UserError(
                f"The fold stream draws {self.batch_size} expressions at a time, and {num_rows} are wanted."
            )
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, and what they must be continued with."""
        return {"num_drawn": self.num_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last batch that `state` counts. Raises UserError when it would draw differently."""
        here = self._identity()
        changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state[name] != here[name]]
        if changed:
            raise UserError(
                f"The fold stream cannot be resumed where it was left: {', '.join(changed)}. Resume with the values "
                "the run was started with."
            )
        self.num_drawn = state["num_drawn"]

    def _identity(self) -> dict[str, int]:
        task = self.task
        return {"max_k": task.max_k, "task_seed": task.seed, "batch_size": self.batch_size, "seed": self.seed}


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1.")
    return value


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise UserError(f"seed is {seed}; it must not be negative.")
    return seed
