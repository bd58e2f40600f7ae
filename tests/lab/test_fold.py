"""The fold task: answers against a solver written otherwise, balance by enumeration, what is held out."""

from collections import Counter

import pytest
import torch

from looplm.errors import UserError
from looplm.lab.fold import PAD, FoldTask
from looplm.lab.task import TaskStream


def solve(table: list[list[int]], digits: list[int]) -> int:
    """Folds recursively from the outside in, in plain Python."""
    return digits[0] if len(digits) == 1 else table[solve(table, digits[:-1])][digits[-1]]


def all_expressions(k: int) -> torch.Tensor:
    return torch.cartesian_prod(*[torch.arange(10)] * (k + 1))


def cut(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], int]]:
    """(digits, answer) of every row of a batch, read off the pads."""
    rows = [[token for token in row if token != PAD] for row in batch["input_ids"].tolist()]
    return [(row[:-1], row[-1]) for row in rows]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_expression_has_the_answer_of_the_brute_force_solver(k, seed):
    task = FoldTask(seed=seed)
    digits = all_expressions(k)
    expected = [solve(task.table.tolist(), row) for row in digits.tolist()]
    assert task.fold(digits).tolist() == expected


def test_the_fold_is_from_the_left_and_the_row_is_what_was_folded():
    task = FoldTask()
    vars(task)["table"] = torch.arange(100).view(10, 10) // 10  # table[left][right] = left
    assert task.fold(torch.tensor([[7, 1, 2, 3]])).tolist() == [7]
    vars(task)["table"] = torch.arange(10).expand(10, 10)  # table[left][right] = right
    assert task.fold(torch.tensor([[7, 1, 2, 3]])).tolist() == [3]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_exactly_balanced_for_every_k(k, seed):
    answers = FoldTask(seed=seed).fold(all_expressions(k))
    assert answers.bincount(minlength=10).tolist() == [10**k] * 10


def test_the_table_depends_on_the_seed_alone_and_is_no_latin_square():
    first = FoldTask(seed=1).table
    assert torch.equal(first, FoldTask(max_k=2, seed=1).table)
    assert not torch.equal(first, FoldTask(seed=2).table)
    assert torch.equal(first.sort(1).values, torch.arange(10).expand(10, 10))
    assert not torch.equal(first.sort(0).values, torch.arange(10)[:, None].expand(10, 10))


@pytest.mark.parametrize("k", [2, 3])
def test_a_tenth_is_held_out_and_each_choice_of_any_other_digits_has_one_held_out_partner(k):
    task = FoldTask(seed=4)
    held_out = task.held_out(all_expressions(k)).view([10] * (k + 1))
    for position in range(k + 1):
        assert (held_out.sum(position) == 1).all()


def test_nothing_is_held_out_of_the_table_itself():
    assert not FoldTask().held_out(all_expressions(1)).any()


@pytest.mark.parametrize("k", [2, 3])
def test_training_answers_stay_balanced_without_the_held_out(k):
    task = FoldTask(seed=0)
    digits = all_expressions(k)
    answers = task.fold(digits[~task.held_out(digits)])
    shares = answers.bincount(minlength=10) / len(answers)
    assert shares.min() > 0.09 and shares.max() < 0.11


def test_training_draws_every_expression_that_is_not_held_out_and_none_that_is():
    stream = TaskStream(FoldTask(max_k=2), batch_size=1000, seed=0)
    drawn = {tuple(digits) for _ in range(15) for digits, _ in cut(next(stream)) if len(digits) == 3}
    digits = all_expressions(2)
    assert drawn == {tuple(row) for row in digits[~FoldTask(max_k=2).held_out(digits)].tolist()}


def test_examples_are_held_out_answered_right_and_uniform():
    task = FoldTask()
    for k in range(2, 7):
        rows = task.questions(k, 2000, seed=1)
        assert rows.shape == (2000, k + 2)
        assert task.held_out(rows[:, :-1]).all()
        assert [solve(task.table.tolist(), row[:-1]) for row in rows.tolist()] == rows[:, -1].tolist()
        for column in rows[:, :-1].unbind(1):
            assert column.bincount(minlength=10).min() > 140
    assert len({tuple(row) for row in task.questions(1, 2000, seed=1).tolist()}) == 100


def test_examples_depend_on_the_seed():
    task = FoldTask()
    assert torch.equal(task.questions(3, 50, seed=1), task.questions(3, 50, seed=1))
    assert not torch.equal(task.questions(3, 50, seed=1), task.questions(3, 50, seed=2))


def test_k_is_uniform():
    stream = TaskStream(FoldTask(max_k=4), batch_size=4000, seed=0)
    counts = Counter(len(digits) - 1 for digits, _ in cut(next(stream)))
    assert sorted(counts) == [1, 2, 3, 4]
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_guess_accuracy_is_that_of_counting_all_expressions(k):
    task = FoldTask(seed=2)
    digits = all_expressions(k).tolist()
    for num_seen in range(k + 2):
        by_seen: dict[tuple[int, ...], Counter[int]] = {}
        for row in digits:
            seen = tuple(row[len(row) - num_seen :])
            by_seen.setdefault(seen, Counter())[solve(task.table.tolist(), row)] += 1
        right = sum(max(counts.values()) for counts in by_seen.values())
        assert task.guess_accuracy(k, num_seen) == pytest.approx(right / len(digits), abs=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FoldTask(max_k=0),
        lambda: FoldTask(seed=-1),
        lambda: FoldTask().questions(0, 1, 0),
        lambda: FoldTask().questions(1, 0, 0),
        lambda: FoldTask().questions(1, 1, -1),
        lambda: FoldTask().guess_accuracy(0, 0),
        lambda: FoldTask().guess_accuracy(2, 4),
        lambda: FoldTask().guess_accuracy(2, -1),
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()
