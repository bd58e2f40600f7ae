"""Mano: answers against a recursive reader, trees and answers as often as they should be, what is held out."""

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from looplm.errors import UserError
from looplm.lab.mano import ManoTask
from looplm.lab.task import TaskStream

SYMBOLS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def read(words: Iterator[str], modulus: int) -> int:
    """Reads one prefix expression from the left, operand by operand; what is behind it stays in `words`."""
    word = next(words)
    if word not in SYMBOLS:
        return int(word)
    first = read(words, modulus)
    return SYMBOLS[word](first, read(words, modulus)) % modulus


def in_words(task: ManoTask, row: list[int]) -> list[str]:
    return [task.words[token] for token in row]


@pytest.mark.parametrize(("modulus", "max_length"), [(23, 10), (7, 3), (2, 1), (5, 24)])
def test_a_document_is_as_in_the_paper_and_its_answer_that_of_a_recursive_reader(modulus, max_length):
    task = ManoTask(modulus, max_length)
    lengths = Counter()
    for row in next(TaskStream(task, 300, seed=0))["input_ids"].tolist():
        bos, length, *expression, ans, answer = [word for word in in_words(task, row) if word != "<eos>"]
        assert (bos, ans, length) == ("<bos>", "<ans>", f"<len_{len(expression) // 2}>")
        assert sum(word in SYMBOLS for word in expression) == len(expression) // 2
        rest = iter(expression)
        assert read(rest, modulus) == int(answer) and next(rest, None) is None
        lengths[len(expression) // 2] += 1
    assert sorted(lengths) == list(range(1, max_length + 1))


def test_the_paper_has_a_worked_example_with_a_slip():
    task = ManoTask(23, 3)  # - * a b + c d is (a b) - (c + d)
    tokens = torch.tensor([[task.words.index(word) for word in ("-", "*", "3", "5", "+", "9", "1")]])
    assert task.solve(tokens).item() == 15 - 10


@pytest.mark.parametrize(("modulus", "length"), [(3, 1), (3, 2), (2, 3), (5, 2)])
def test_every_expression_is_solved(modulus, length):
    """All trees, operations and numbers, written out without the task's own code."""
    task = ManoTask(modulus, length)

    def trees(size: int) -> list[tuple[str, ...]]:
        if size == 0:
            return [(str(number),) for number in range(modulus)]
        return [
            (operation, *first, *second)
            for operation in SYMBOLS
            for left in range(size)
            for first in trees(left)
            for second in trees(size - 1 - left)
        ]

    expressions = trees(length)
    rows = torch.tensor([[task.words.index(word) for word in expression] for expression in expressions])
    assert task.solve(rows).tolist() == [read(iter(expression), modulus) for expression in expressions]


def test_lengths_are_uniform_and_trees_split_evenly():
    task = ManoTask(23, 4)
    rng = np.random.default_rng(0)
    filled = (next(TaskStream(task, 4000, seed=0))["input_ids"] != len(task.words) - 1).sum(1)
    counts = Counter((filled - 5).div(2, rounding_mode="floor").tolist())
    assert all(900 < counts[length] < 1100 for length in (1, 2, 3, 4))
    expressions = task.expressions(3, 9000, rng, held_out=False)
    operations = expressions[:, 0]
    assert all(2800 < (operations == 23 + i).sum() < 3200 for i in range(3))
    # Size of the first operand: 0, 1 or 2 operations, told by where a reader would stand after it.
    sizes = Counter()
    for row in expressions.tolist():
        open_operands, size = 1, 0
        for token in row[1:]:
            open_operands += 1 if token >= 23 else -1
            size += token >= 23
            if open_operands == 0:
                break
        sizes[size] += 1
    assert all(2800 < sizes[size] < 3200 for size in (0, 1, 2))


@pytest.mark.parametrize("held_out", [False, True])
def test_numbers_are_uniform_at_every_place(held_out):
    task = ManoTask(7, 3)
    expressions = task.expressions(3, 7000, np.random.default_rng(1), held_out)
    for column in expressions[expressions < 7].view(-1, 4).unbind(1):
        assert column.bincount(minlength=7).min() > 880 and column.bincount().max() < 1120


@pytest.mark.parametrize("modulus", [5, 7])
def test_one_choice_of_any_number_is_held_out_given_the_others(modulus):
    task = ManoTask(modulus, 2, seed=3)
    numbers = torch.cartesian_prod(*[torch.arange(modulus)] * 3)
    for tree in ([-1, -1, None, None, None], [-1, None, -1, None, None]):
        rows = torch.empty(len(numbers), 5, dtype=torch.long)
        rows[:, [i for i, token in enumerate(tree) if token]] = modulus + 1
        rows[:, [i for i, token in enumerate(tree) if token is None]] = numbers
        held_out = task.held_out(rows).view(modulus, modulus, modulus)
        for position in range(3):
            assert (held_out.sum(position) == 1).all()


def test_training_draws_every_other_expression_and_evaluation_what_is_held_out():
    task = ManoTask(3, 2)
    drawn = task.expressions(2, 20_000, np.random.default_rng(0), held_out=False)
    asked = task.questions(2, 10_000, seed=0)[:, 2:-2]
    assert not task.held_out(drawn).any() and task.held_out(asked).all()
    seen, kept = ({tuple(row) for row in rows.tolist()} for rows in (drawn, asked))
    assert len(seen | kept) == 2 * 9 * 27 and not seen & kept and len(kept) == 2 * 9 * 9
    assert len({tuple(row) for row in task.questions(1, 2000, seed=0).tolist()}) == 27


def test_what_is_held_out_and_asked_depends_on_the_seeds():
    numbers = ManoTask(7, 3).expressions(3, 500, np.random.default_rng(0), held_out=True)
    assert not ManoTask(7, 3, seed=1).held_out(numbers).all()
    asked = [ManoTask(7, 3).questions(3, 20, seed) for seed in (0, 0, 1)]
    assert torch.equal(asked[0], asked[1]) and not torch.equal(asked[0], asked[2])


@pytest.mark.parametrize(("modulus", "length"), [(3, 2), (2, 3), (5, 2)])
def test_answer_shares_are_those_of_counting_with_each_tree_as_likely_as_it_is_drawn(modulus, length):
    def weigh(size: int) -> dict[int, Fraction]:
        if size == 0:
            return dict.fromkeys(range(modulus), Fraction(1, modulus))
        shares = dict.fromkeys(range(modulus), Fraction(0))
        for left in range(size):
            for (a, pa), (b, pb) in itertools.product(weigh(left).items(), weigh(size - 1 - left).items()):
                for operation in SYMBOLS.values():
                    shares[operation(a, b) % modulus] += pa * pb / (3 * size)
        return shares

    expected = [float(share) for share in weigh(length).values()]
    assert ManoTask(modulus, length).answer_shares(length).tolist() == pytest.approx(expected, abs=1e-12)


def test_answers_are_drawn_as_often_as_answer_shares_says():
    task = ManoTask(7, 3)
    for held_out in (False, True):
        expressions = task.expressions(3, 30_000, np.random.default_rng(2), held_out)
        shares = task.solve(expressions).bincount(minlength=7) / 30_000
        torch.testing.assert_close(shares.double(), task.answer_shares(3), atol=0.01, rtol=0)
    # The paper's lengths: 0 is likelier than an even share of 1 / 23 = .043, and no longer with length than by .004.
    zero = [ManoTask(23, length).answer_shares(length)[0].item() for length in (10, 16, 24)]
    assert zero == pytest.approx([0.070, 0.072, 0.074], abs=5e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ManoTask(modulus=1),
        lambda: ManoTask(max_length=0),
        lambda: ManoTask(seed=-1),
        lambda: ManoTask().questions(0, 1, 0),
        lambda: ManoTask(max_length=3).questions(4, 1, 0),
        lambda: ManoTask().questions(1, 0, 0),
        lambda: ManoTask().questions(1, 1, -1),
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()
