"""Mano: modular arithmetic in prefix notation, answered at once (Ouro, section 6.2 and appendix B.2).

    <bos> <len_2> - * 3 5 1 <ans> 14        (3 * 5 - 1 modulo 23)

An expression of length l has l operations, each +, - or * with equal chance, and l + 1 numbers, uniform; l is uniform
in 1..max_length. The paper does not say which trees are drawn: here the first operand gets 0 to l - 1 of the remaining
operations, evenly, and the second the rest. Nothing is predicted but the answer.

Answers are not quite balanced: 0 swallows whatever it is multiplied with. `ManoTask.answer_shares` gives what each is
worth, and so what a constant guess scores.

From length 2 on, one assignment of numbers in `modulus` is held out for every tree: training never draws it,
evaluation draws nothing else. The paper's lengths leave nothing to memorise; short expressions would.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.lab.task import (
    QUESTIONS,
    TASK,
    Documents,
    at_least_one,
    checked_seed,
    fill_up,
)
from looplm.lab.task_recipe import recipe_functions

FIRST_HELD_OUT_LENGTH = 2
OPERATIONS = ("+", "-", "*")


@dataclass(frozen=True)
class ManoTask:
    """Expressions of 1 to `max_length` operations modulo `modulus`.

    The paper's sizes: modulus 23, max_length 10, 16 or 24. `seed` decides what is held out.
    Raises UserError for a modulus below 2, max_length below 1 or a negative seed.
    """

    name: ClassVar = "mano"
    level_name: ClassVar = "length"
    modulus: int = 23
    max_length: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise UserError(f"modulus is {self.modulus}; arithmetic needs at least 2.")
        at_least_one("max_length", self.max_length)
        checked_seed(self.seed)

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(range(1, self.max_length + 1))

    @property
    def words(self) -> tuple[str, ...]:
        """Numbers, which are their own ids; operations; <bos>, <ans>; <len_0> to <len_L>; <eos>."""
        numbers = tuple(str(number) for number in range(self.modulus))
        lengths = tuple(f"<len_{length}>" for length in range(self.max_length + 1))
        return (*numbers, *OPERATIONS, "<bos>", "<ans>", *lengths, "<eos>")

    @property
    def max_len(self) -> int:
        return 2 * self.max_length + 5

    def draw(self, count: int, rng: np.random.Generator) -> Documents:
        """See :class:`~looplm.lab.task.Task`."""
        lengths = rng.integers(1, self.max_length + 1, size=count)
        documents = []
        for length in self.levels:
            rows = (lengths == length).nonzero()[0]
            documents.append((torch.from_numpy(rows), self.answered(self.expressions(length, len(rows), rng, False))))
        return fill_up(documents, count, self.max_len, len(self.words) - 1)

    def questions(self, level: int, count: int, seed: int) -> Int[Tensor, "N S"]:
        """See :class:`~looplm.lab.task.Task`. At length 1 any expression; `level` may not exceed `max_length`."""
        if not 1 <= level <= self.max_length:
            raise UserError(f"length is {level}; it must lie between 1 and max_length, {self.max_length}.")
        rng = np.random.default_rng((QUESTIONS, checked_seed(seed), level))
        return self.answered(self.expressions(level, at_least_one("count", count), rng, held_out=True))

    def answered(self, expressions: Int[Tensor, "N m"]) -> Int[Tensor, "N S"]:
        """Expressions of one length as documents: <bos> <len_l> ... <ans> and the answer."""
        length = expressions.shape[1] // 2
        bos = self.modulus + len(OPERATIONS)
        around = torch.tensor([bos, bos + 2 + length, bos + 1]).expand(len(expressions), -1)
        return torch.cat([around[:, :2], expressions, around[:, 2:], self.solve(expressions)[:, None]], dim=1)

    def solve(self, expressions: Int[Tensor, "N m"]) -> Int[Tensor, " N"]:
        """The value of each expression, all of one length: read from the right with a stack a row."""
        rows = torch.arange(len(expressions))
        stack = torch.zeros(len(expressions), expressions.shape[1] // 2 + 2, dtype=torch.long)
        top = torch.full_like(rows, -1)
        for token in expressions.flip(1).unbind(1):
            first, second = stack[rows, top], stack[rows, top - 1]  # read of numbers too, where it says nothing
            results = torch.stack([first + second, first - second, first * second])
            operation = token - self.modulus
            is_operation = operation >= 0
            top = torch.where(is_operation, top - 1, top + 1)
            result = results[operation.clamp_min(0), rows] % self.modulus
            stack[rows, top] = torch.where(is_operation, result, token)
        return stack[:, 0]

    def expressions(self, length: int, count: int, rng: np.random.Generator, held_out: bool) -> Int[Tensor, "N m"]:
        """`count` expressions of `length` operations, (count, 2 * length + 1) tokens; held-out ones, or the rest."""
        tokens = self._trees(length, count, rng)
        numbers = rng.integers(self.modulus, size=(count, length + 1))
        if length >= FIRST_HELD_OUT_LENGTH:
            # The last number is what makes the marks sum to the residue wanted; no draw has to be rejected.
            marks = self._marks(length)
            residues = np.zeros(count, dtype=np.int64) if held_out else rng.integers(1, self.modulus, size=count)
            others = marks[np.arange(length), numbers[:, :length]].sum(1)
            numbers[:, length] = np.argsort(marks[length])[(residues - others) % self.modulus]
        tokens[tokens < 0] = numbers.ravel()
        return torch.from_numpy(tokens)

    def held_out(self, expressions: Int[Tensor, "N m"]) -> Bool[Tensor, " N"]:
        """Which expressions of one length training never draws: of each tree, one choice of any number, given all
        others."""
        length = expressions.shape[1] // 2
        if length < FIRST_HELD_OUT_LENGTH:
            return torch.zeros(len(expressions), dtype=torch.bool)
        numbers = expressions[expressions < self.modulus].view(-1, length + 1)
        return torch.from_numpy(self._marks(length))[torch.arange(length + 1), numbers].sum(1) % self.modulus == 0

    def answer_shares(self, length: int) -> Float[Tensor, " p"]:
        """How often each answer occurs among all expressions of `length` operations, float64, exactly.

        Among the held-out ones, which are scored, shares differ a little: at modulus 3 by .014 at length 2 and by .006
        at length 3, at larger moduli and lengths by less; modulus 2 holds out one kind of expression at length 2.
        """
        p = self.modulus
        left, right = np.arange(p)[:, None], np.arange(p)[None]
        results = [((left + right) % p).ravel(), ((left - right) % p).ravel(), (left * right % p).ravel()]
        shares = [np.full(p, 1 / p)]
        for size in range(1, length + 1):
            pairs = np.mean([np.outer(shares[i], shares[size - 1 - i]) for i in range(size)], axis=0).ravel()
            shares.append(np.mean([np.bincount(result, weights=pairs, minlength=p) for result in results], axis=0))
        return torch.from_numpy(shares[length])

    def _trees(self, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, 2 * length + 1) tokens from the left: operations, and -1 where a number stands."""
        rows = np.arange(count)
        tokens = np.full((count, 2 * length + 1), -1)
        pending = np.zeros((count, length + 2), dtype=np.int64)  # sizes of the operands still to be written, a stack
        pending[:, 0] = length
        top = np.zeros(count, dtype=np.int64)
        for position in range(2 * length + 1):
            size = pending[rows, top]
            first = (rng.random(count) * size).astype(np.int64)  # 0..size - 1
            operations = rng.integers(self.modulus, self.modulus + len(OPERATIONS), size=count)
            inner = size > 0
            tokens[inner, position] = operations[inner]
            pending[rows[inner], top[inner]] = (size - 1 - first)[inner]
            top = np.where(inner, top + 1, top - 1)
            pending[rows[inner], top[inner]] = first[inner]
        return tokens

    def _marks(self, length: int) -> np.ndarray:
        """(length + 1, modulus), a permutation for each number of an expression: held out is what sums to 0."""
        rng = np.random.default_rng((TASK, self.seed, length))
        return np.stack([rng.permutation(self.modulus) for _ in range(length + 1)])


documents, tokenizer, measure = recipe_functions(ManoTask)
