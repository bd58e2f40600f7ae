"""Reachability documents against a breadth-first search; yes and no balanced, and told apart by nothing cheap."""

from collections import Counter

import pytest
import torch

from looplm.errors import UserError
from looplm.lab.reachability_task import ReachabilityTask
from looplm.lab.task import TaskStream


def read(task: ReachabilityTask, row: list[int]) -> tuple[set[tuple[int, int]], int, int, str]:
    """Edges, source, target and answer of a document, from its words."""
    *edges, question, answer = [task.words[token] for token in row]
    pairs = [tuple(map(int, edge.split(">"))) for edge in edges]
    assert len(set(pairs)) == len(pairs)
    source, target = map(int, question.split("?"))
    return set(pairs), source, target, answer  # pyright: ignore[reportReturnType]


def distance(edges: set[tuple[int, int]], source: int, target: int) -> int | None:
    """Edges on the shortest path, wave by wave; None where there is none."""
    wave, seen, steps = {source}, {source}, 0
    while wave:
        if target in wave:
            return steps
        wave = {t for s, t in edges if s in wave} - seen
        seen |= wave
        steps += 1
    return None


@pytest.mark.parametrize(("num_vertices", "num_extra"), [(4, 0), (4, 1), (8, 1), (8, 6), (12, 2)])
def test_every_answer_is_right_and_every_distance_as_named(num_vertices, num_extra):
    task = ReachabilityTask(num_vertices, num_extra)
    assert task.levels == tuple(range(1, num_vertices // 2))
    for level in task.levels:
        for row in task.questions(level, 60, seed=0).tolist():
            edges, source, target, answer = read(task, row)
            assert len(edges) == 2 * (num_vertices // 2 - 1 + num_extra)
            assert all(s != t for s, t in edges) and {v for edge in edges for v in edge} == set(range(num_vertices))
            found = distance(edges, source, target)
            assert found == (level if answer == "yes" else None)


def test_answers_are_balanced_and_counting_neighbours_does_not_tell_them_apart():
    task = ReachabilityTask(8, 2)
    by_clue: dict[tuple[int, ...], Counter[str]] = {}
    for row in task.questions(3, 1500, seed=1).tolist():
        edges, source, target, answer = read(task, row)
        clue = (
            sum(s == source for s, _ in edges),
            sum(t == source for _, t in edges),
            sum(s == target for s, _ in edges),
            sum(t == target for _, t in edges),
        )
        by_clue.setdefault(clue, Counter())[answer] += 1
    total = sum(by_clue.values(), Counter())
    assert abs(total["yes"] - 750) < 80
    large = [counts for counts in by_clue.values() if counts.total() > 80]
    assert len(large) >= 5 and all(abs(c["yes"] / c.total() - 0.5) < 0.18 for c in large)


def test_names_edges_and_distances_are_drawn_evenly():
    task = ReachabilityTask(6, 1)
    batch = next(TaskStream(task, 1500, seed=0))["input_ids"]
    first = Counter(batch[:, 0].tolist())
    assert len(first) == 30 and max(first.values()) < 90  # 50 on average
    lengths = Counter()
    for row in batch.tolist():
        edges, source, target, answer = read(task, row)
        if answer == "yes":
            lengths[distance(edges, source, target)] += 1
    assert sorted(lengths) == [1, 2] and all(320 < count < 430 for count in lengths.values())


def test_questions_depend_on_their_seed():
    task = ReachabilityTask()
    asked = [task.questions(2, 20, seed) for seed in (0, 0, 1)]
    assert torch.equal(asked[0], asked[1]) and not torch.equal(asked[0], asked[2])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ReachabilityTask(num_vertices=7),
        lambda: ReachabilityTask(num_vertices=2),
        lambda: ReachabilityTask(num_extra=-1),
        lambda: ReachabilityTask(num_vertices=8, num_extra=7),
        lambda: ReachabilityTask(seed=-1),
        lambda: ReachabilityTask().questions(0, 1, 0),
        lambda: ReachabilityTask().questions(4, 1, 0),
        lambda: ReachabilityTask().questions(1, 0, 0),
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()
