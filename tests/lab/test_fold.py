"""The fold task: answers against a solver written otherwise, balance by enumeration, a resume that draws the same."""

import itertools
from collections import Counter

import pytest
import torch

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError
from looplm.lab.fold import PAD, FoldTask


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
    task.table = torch.arange(100).view(10, 10) // 10  # table[left][right] = left
    assert task.fold(torch.tensor([[7, 1, 2, 3]])).tolist() == [7]
    task.table = torch.arange(10).expand(10, 10)  # table[left][right] = right
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
    stream = FoldTask(max_k=2).stream(batch_size=1000, seed=0)
    drawn = {tuple(digits) for _ in range(15) for digits, _ in cut(next(stream)) if len(digits) == 3}
    digits = all_expressions(2)
    assert drawn == {tuple(row) for row in digits[~FoldTask(max_k=2).held_out(digits)].tolist()}


def test_examples_are_held_out_answered_right_and_uniform():
    task = FoldTask()
    for k in range(2, 7):
        rows = task.examples(k, 2000, seed=1)
        assert rows.shape == (2000, k + 2)
        assert task.held_out(rows[:, :-1]).all()
        assert [solve(task.table.tolist(), row[:-1]) for row in rows.tolist()] == rows[:, -1].tolist()
        for column in rows[:, :-1].unbind(1):
            assert column.bincount(minlength=10).min() > 140
    assert len({tuple(row) for row in task.examples(1, 2000, seed=1).tolist()}) == 100


def test_examples_depend_on_the_seed():
    task = FoldTask()
    assert torch.equal(task.examples(3, 50, seed=1), task.examples(3, 50, seed=1))
    assert not torch.equal(task.examples(3, 50, seed=1), task.examples(3, 50, seed=2))


def test_a_batch_labels_the_answer_alone_and_pads_to_the_right():
    task = FoldTask(max_k=4, seed=3)
    batch = next(task.stream(batch_size=500, seed=0))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "document_ids"), (500, 6)
    )
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert not batch["document_ids"].any()
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        length = len([token for token in ids if token != PAD])  # k + 2
        assert ids[length:] == [PAD] * (6 - length)
        answer = solve(task.table.tolist(), ids[: length - 1])
        assert ids[length - 1] == answer
        assert labels == [IGNORE_INDEX] * (length - 1) + [answer] + [IGNORE_INDEX] * (6 - length)


def test_k_is_uniform():
    stream = FoldTask(max_k=4).stream(batch_size=4000, seed=0)
    counts = Counter(len(digits) - 1 for digits, _ in cut(next(stream)))
    assert sorted(counts) == [1, 2, 3, 4]
    assert all(900 < count < 1100 for count in counts.values())


def test_a_resumed_stream_draws_what_would_have_come():
    task = FoldTask()
    stream = task.stream(batch_size=8, seed=2)
    for _ in itertools.repeat(None, 3):
        next(stream)
    state = stream.state_dict()
    expected = [next(stream) for _ in range(3)]
    resumed = task.stream(batch_size=8, seed=2)
    resumed.load_state_dict(state)
    for ours, theirs in zip(expected, resumed, strict=False):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(expected[0]["input_ids"], expected[1]["input_ids"])


def test_the_draw_depends_on_the_seed():
    first, second = (next(FoldTask().stream(batch_size=8, seed=seed))["input_ids"] for seed in (1, 2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("task", "batch_size", "seed", "named"),
    [
        (FoldTask(max_k=3), 8, 2, "max_k"),
        (FoldTask(seed=1), 8, 2, "task_seed"),
        (FoldTask(), 9, 2, "batch_size"),
        (FoldTask(), 8, 3, " seed"),
    ],
)
def test_a_state_of_another_stream_is_refused(task, batch_size, seed, named):
    state = FoldTask().stream(batch_size=8, seed=2).state_dict()
    with pytest.raises(UserError, match=named):
        task.stream(batch_size, seed).load_state_dict(state)


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
        lambda: FoldTask().stream(0, 0),
        lambda: FoldTask().stream(1, -1),
        lambda: FoldTask().examples(0, 1, 0),
        lambda: FoldTask().examples(1, 0, 0),
        lambda: FoldTask().examples(1, 1, -1),
        lambda: FoldTask().guess_accuracy(0, 0),
        lambda: FoldTask().guess_accuracy(2, 4),
        lambda: FoldTask().guess_accuracy(2, -1),
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()


def test_a_trainer_takes_whole_batches():
    stream, same = (FoldTask(max_k=2).stream(batch_size=8, seed=2) for _ in range(2))
    assert torch.equal(stream.take(8)["input_ids"], next(same)["input_ids"])
    with pytest.raises(UserError, match="8 expressions at a time, and 4 are wanted"):
        stream.take(4)
