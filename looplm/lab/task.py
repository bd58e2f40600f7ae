"""What a task of the lab is, and what follows from that: training streams, documents for a recipe, a tokenizer.

A task is a frozen dataclass of plain numbers (:class:`~looplm.lab.fold.FoldTask`, for one) whose questions have one
right answer of one token, and a known difficulty, its level. Everything else in the lab takes any of them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STREAM, QUESTIONS, TASK = 2, 3, 4
"""First part of the key of every draw, so that the draws of one seed stay apart."""

_DOCUMENTS_A_DRAW = 256


class Documents(NamedTuple):
    """Training documents, one a row; the rest of a row is the task's last token, which stands to the right."""

    input_ids: Int[Tensor, "N S"]
    labels: Int[Tensor, "N S"]
    """Unshifted; IGNORE_INDEX except at the answer."""


class Task(Protocol):
    """What the lab needs of a task."""

    name: ClassVar[str]
    """As in `looplm lab NAME`."""
    level_name: ClassVar[str]
    """What makes its questions harder: k, length, hops."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Of the training documents, ascending."""
        ...

    @property
    def words(self) -> tuple[str, ...]:
        """The word of every token id, without spaces. The last one fills up rows."""
        ...

    @property
    def max_len(self) -> int:
        """S, tokens of the longest training document."""
        ...

    def draw(self, count: int, rng: np.random.Generator) -> Documents:
        """`count` training documents, independent of each other, a function of the state of `rng` alone."""
        ...

    def questions(self, level: int, count: int, seed: int) -> Int[Tensor, "N S"]:
        """`count` questions of one level, equally long, the answer last, none of which training draws.

        Raises UserError for a level or count out of range or a negative seed.
        """
        ...


class TaskStream:
    """Endless batches of `batch_size` training documents, for a trainer (:class:`looplm.training.rows.Rows`).

    A batch holds input_ids, labels and document_ids, int64 (B, max_len), a document a row. Of several ranks each gets
    every `world_size`-th row of the same batch. A batch depends on the task, `batch_size`, `seed` and the number of
    batches before it, on nothing else, so resuming is exact. Raises UserError for a negative seed, and for a batch
    size below 1 or that the ranks cannot share.
    """

    def __init__(self, task: Task, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.task, self.seed = task, checked_seed(seed)
        self.batch_size = at_least_one("batch_size", batch_size)
        if batch_size % world_size:
            raise UserError(f"A batch of {batch_size} documents cannot be shared by {world_size} ranks.")
        self.rank, self.world_size = rank, world_size
        self.num_drawn = 0
        """Batches drawn so far."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        drawn = self.task.draw(self.batch_size, np.random.default_rng((STREAM, self.seed, self.num_drawn)))
        self.num_drawn += 1
        input_ids, labels = (rows[self.rank :: self.world_size] for rows in drawn)
        return {"input_ids": input_ids, "labels": labels, "document_ids": torch.zeros_like(input_ids)}

    def take(self, num_rows: int) -> dict[str, Tensor]:
        """This rank's rows of the next batch. Raises UserError unless these are `num_rows`."""
        if num_rows * self.world_size != self.batch_size:
            raise UserError(
                f"The {self.task.name} stream draws {self.batch_size} documents at a time, and "
                f"{num_rows * self.world_size} are wanted."
            )
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, and what they must be continued with."""
        return {"num_drawn": self.num_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last batch that `state` counts. Raises UserError when it would draw differently."""
        check_same(self.task, state, self._identity())
        self.num_drawn = state["num_drawn"]

    def _identity(self) -> dict[str, Any]:
        return {"task": repr(self.task), "batch_size": self.batch_size, "seed": self.seed}


class TaskDocuments:
    """Endless training documents one by one, as a recipe's source of `kind: generator, format: tokens` reads them.

    Each is a dict of input_ids and labels, as long as it is. Where it stands is one number. Raises UserError for a
    negative seed.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, checked_seed(seed)
        self.num_drawn = 0
        """Documents drawn so far."""
        self._drawn: list[dict[str, list[int]]] = []

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self

    def __next__(self) -> dict[str, list[int]]:
        batch, position = divmod(self.num_drawn, _DOCUMENTS_A_DRAW)
        if position == 0 or not self._drawn:
            drawn = self.task.draw(_DOCUMENTS_A_DRAW, np.random.default_rng((STREAM, self.seed, batch)))
            self._drawn = [cut(ids, labels) for ids, labels in zip(*(rows.tolist() for rows in drawn), strict=True)]
        self.num_drawn += 1
        return self._drawn[position]

    def state_dict(self) -> dict[str, Any]:
        """How many documents were drawn, and what they must be continued with."""
        return {"num_drawn": self.num_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last document that `state` counts. Raises UserError when it would draw differently."""
        check_same(self.task, state, self._identity())
        self.num_drawn, self._drawn = state["num_drawn"], []

    def _identity(self) -> dict[str, Any]:
        return {"task": repr(self.task), "seed": self.seed}


def cut(input_ids: list[int], labels: list[int]) -> dict[str, list[int]]:
    """One document without what fills up its row: the answer is its last token."""
    length = max(i for i, label in enumerate(labels) if label != IGNORE_INDEX) + 1
    return {"input_ids": input_ids[:length], "labels": labels[:length]}


def fill_up(documents: list[tuple[Tensor, Tensor]], count: int, max_len: int, filler: int) -> Documents:
    """Puts documents of several lengths into rows of one.

    documents: (rows, tokens) pairs; tokens is (n, length), the answer last, and row `rows[i]` of the result gets
    tokens[i]. Together the pairs give each of the `count` rows once.
    """
    input_ids = torch.full((count, max_len), filler)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for rows, tokens in documents:
        length = tokens.shape[1]
        input_ids[rows, :length] = tokens
        labels[rows, length - 1] = tokens[:, -1]
    return Documents(input_ids, labels)


def task_tokenizer(task: Task) -> "PreTrainedTokenizerFast":
    """A tokenizer of the task's words, separated by spaces; its last one ends, and fills up, a text.

    A text with any other word cannot be encoded.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    filler = task.words[-1]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(task.words)}, unk_token=filler))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=filler, pad_token=filler, clean_up_tokenization_spaces=False
    )


def check_same(task: Task, state: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises UserError unless a saved position belongs to the same draws."""
    changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state[name] != here[name]]
    if changed:
        raise UserError(
            f"The {task.name} stream cannot be resumed where it was left: {', '.join(changed)}. Resume with the "
            "values the run was started with."
        )


def at_least_one(name: str, value: int) -> int:
    """`value`. Raises UserError when it is below 1."""
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1.")
    return value


def checked_seed(seed: int) -> int:
    """`seed`. Raises UserError when it is negative."""
    if seed < 0:
        raise UserError(f"seed is {seed}; it must not be negative.")
    return seed
