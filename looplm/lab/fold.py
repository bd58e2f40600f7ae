"""Fold: k + 1 digits folded from the left with a fixed random 10 x 10 table, so that k lookups must follow each other.

    3 1 4 =  ->  table[table[3][1]][4]        (k = 2)

Every row of the table is a permutation of the digits, drawn from a seed, and the digits of an expression are
independent and uniform. Whatever has been folded so far, the next digit then makes the result uniform: for every k
the ten answers are equally frequent, and an answer cannot be guessed better than 1 in 10 without the last digit. A
table of independent entries has favourite answers, and some tables reach only a few. Columns are left free: were they
permutations too (a Latin square), any one hidden digit would hide the answer entirely, and a learner would get no
reward for the last steps before it has the first. How far the last digits alone go is in `guess_accuracy`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError

BASE = 10
"""Digits, which are also their own token ids."""
EQUALS, PAD = BASE, BASE + 1
VOCAB_SIZE = BASE + 2

_TABLE, _STREAM, _EXAMPLES = range(3)  # keep apart the draws of one seed


class FoldTask:
    """Expressions of 1 to `max_k` table lookups, as token rows with one predicted token each: the answer.

    A row is `d0 d1 .. dk = answer`, then pads up to the width of the batch. Only the answer is labelled; no partial
    result is ever shown. Raises UserError for `max_k` below 1 or a negative seed.
    """

    def __init__(self, max_k: int = 4, seed: int = 0) -> None:
        if max_k < 1:
            raise UserError(f"max_k is {max_k}; an expression needs at least one table lookup.")
        self.max_k, self.seed = max_k, _checked_seed(seed)
        rng = np.random.default_rng((_TABLE, seed))
        self.table = torch.from_numpy(np.stack([rng.permutation(BASE) for _ in range(BASE)]))
        """(10, 10) int64, table[left][right]."""

    def fold(self, digits: Int[Tensor, "N m"]) -> Int[Tensor, " N"]:
        """Folds each row of digits from the left; a single digit is its own result."""
        result = digits[:, 0]
        for column in digits[:, 1:].unbind(1):
            result = self.table[result, column]
        return result

    def examples(self, k: int, count: int, seed: int) -> Int[Tensor, "N m"]:
        """`count` expressions of k lookups, drawn independently: (count, k + 3) rows `d0 .. dk = answer`.

        k may exceed `max_k`. Raises UserError for k or count below 1.
        """
        if k < 1 or count < 1:
            raise UserError(f"k is {k} and count {count}; both must be at least 1.")
        rng = np.random.default_rng((_EXAMPLES, _checked_seed(seed), k))
        digits = torch.from_numpy(rng.integers(BASE, size=(count, k + 1)))
        return torch.cat((digits, torch.full((count, 1), EQUALS), self.fold(digits)[:, None]), dim=1)

    def stream(self, batch_size: int, seed: int) -> "FoldStream":
        """Endless training batches; see :class:`FoldStream`."""
        return FoldStream(self, batch_size, seed)

    def guess_accuracy(self, k: int, num_seen: int) -> float:
        """Accuracy of the best guess at k lookups from the last `num_seen` digits alone, exactly; 0.1 from none.

        What a model scores by it without having folded from the start.
        """
        if not 0 <= num_seen <= k + 1 or k < 1:
            raise UserError(f"num_seen is {num_seen} at k = {k}; k counts from 1, and there are k + 1 digits.")
        if num_seen == k + 1:
            return 1.0
        # What the unseen digits have folded to is uniform: by the balance of the rows, or being the first digit.
        state = torch.arange(BASE)[:, None]  # (start, seen expressions)
        for _ in range(num_seen):
            state = self.table[state].flatten(1)
        counts = torch.stack([(state == digit).sum(0) for digit in range(BASE)])  # (answer, seen expressions)
        return counts.amax(0).double().mean().item() / BASE


class FoldStream:
    """Endless batches of `batch_size` expressions, each with its own k, uniform in 1..max_k.

    A batch holds input_ids, labels and document_ids, int64 (B, max_k + 3): a row is one document, labels are
    unshifted as everywhere, and IGNORE_INDEX except at the answer. The pads stand to the right, where causal
    attention does not look.

    A batch depends on the task, `batch_size`, `seed` and the number of batches before it, on nothing else, so a
    state is a few integers and resuming is exact. Raises UserError for a batch size below 1 or a negative seed.
    """

    def __init__(self, task: FoldTask, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        self.task, self.batch_size, self.seed = task, batch_size, _checked_seed(seed)
        self.num_drawn = 0
        """Batches drawn so far."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        rng = np.random.default_rng((_STREAM, self.seed, self.num_drawn))
        self.num_drawn += 1
        return self._batch(rng)

    def _batch(self, rng: np.random.Generator) -> dict[str, Tensor]:
        task, rows = self.task, torch.arange(self.batch_size)
        ks = torch.from_numpy(rng.integers(1, task.max_k + 1, size=self.batch_size))
        digits = torch.from_numpy(rng.integers(BASE, size=(self.batch_size, task.max_k + 1)))
        folded = torch.stack([task.fold(digits[:, : k + 1]) for k in range(1, task.max_k + 1)])  # (max_k, B)
        answers = folded[ks - 1, rows]
        positions = torch.arange(task.max_k + 3)
        inside = positions <= ks[:, None]  # (B, S)
        input_ids = torch.where(inside, torch.nn.functional.pad(digits, (0, 2)), PAD)
        input_ids[rows, ks + 1] = EQUALS
        input_ids[rows, ks + 2] = answers
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        labels[rows, ks + 2] = answers
        return {"input_ids": input_ids, "labels": labels, "document_ids": torch.zeros_like(input_ids)}

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, and what they must be continued with."""
        return {"num_drawn": self.num_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last batch that `state` counts. Raises UserError when it would draw differently."""
        here = self._identity()
        changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state[name] != here[name]]
        if changed:
            raise UserError(f"The fold stream cannot be resumed where it was left: {', '.join(changed)}.")
        self.num_drawn = state["num_drawn"]

    def _identity(self) -> dict[str, int]:
        task = self.task
        return {"max_k": task.max_k, "table_seed": task.seed, "batch_size": self.batch_size, "seed": self.seed}


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise UserError(f"seed is {seed}; it must not be negative.")
    return seed
