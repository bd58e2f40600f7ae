"""Multi-hop questions: answered by looking up the statements, so many trained on and no more, the others asked."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from looplm.errors import UserError
from looplm.lab.multihop import NAMES, RELATIONS, MultihopTask
from looplm.lab.task import TaskDocuments, TaskStream

SIZES = {"num_entities": 20, "num_relations": 3, "num_layers": 4}


def texts(task: MultihopTask, rows: torch.Tensor) -> list[str]:
    return [" ".join(task.words[token] for token in row if task.words[token] != "<pad>") for row in rows.tolist()]


def facts(task: MultihopTask, batch: list[str]) -> dict[tuple[str, str], str]:
    """(relation, person) -> person, as the statements of a batch say."""
    found = {}
    for text in batch:
        match text.split():
            case ["The", relation, "of", person, "is", other]:
                assert found.setdefault((relation, person), other) == other
    return found


def look_up(text: str, known: dict[tuple[str, str], str]) -> tuple[int, str]:
    """Hops and answer of a question, by following its words from the last to the first."""
    question, answer = text.removeprefix("Who is ").split(" ? Answer: ")
    *relations, person = question.replace("the ", "").split(" of ")
    for relation in reversed(relations):
        person = known[relation, person]
    assert person == answer, text
    return len(relations), answer


def test_every_question_follows_from_the_statements():
    task = MultihopTask(num_pairs=60, **SIZES)
    batch = texts(task, next(TaskStream(task, 3000, seed=0))["input_ids"])
    known = facts(task, batch)
    assert len(known) == 15 * 3  # everyone but the last layer, each relation
    hops = Counter(look_up(text, known)[0] for text in batch if text.startswith("Who"))
    assert sorted(hops) == [1, 2, 3]
    assert all(600 < count < 900 for count in (*hops.values(), len(batch) - hops.total()))
    for level in (1, 2, 3):
        for text in texts(task, task.questions(level, 50, seed=0)):
            assert look_up(text, known)[0] == level


def test_relations_lead_to_the_next_layer():
    task = MultihopTask(num_pairs=1, **SIZES)
    layer = torch.arange(20) // 5
    assert (layer[task.related[:15]] == layer[:15, None] + 1).all()
    assert (task.related[15:] == -1).all()
    assert task.related[:15].unique().tolist() == list(range(5, 20))
    assert not torch.equal(task.related, MultihopTask(num_pairs=1, seed=1, **SIZES).related)


@pytest.mark.parametrize("num_pairs", [1, 27, 100])
def test_so_many_pairs_are_trained_on_and_the_others_are_asked(num_pairs):
    task = MultihopTask(num_pairs=num_pairs, **SIZES)
    drawn: dict[int, set[str]] = {1: set(), 2: set(), 3: set()}
    for document in islice(TaskDocuments(task, seed=0), 4000):
        text = texts(task, torch.tensor([document["input_ids"]]))[0]
        if text.startswith("Who"):
            drawn[text.count(" of ")].add(text)
    assert len(drawn[3]) == num_pairs
    assert len(drawn[2]) == max(1, round(45 * num_pairs / 135))
    assert len(drawn[1]) == 45
    for level, total in ((2, 45), (3, 135)):
        asked = set(texts(task, task.questions(level, 3000, seed=1)))
        assert not asked & drawn[level] and len(asked) + len(drawn[level]) == total
    assert set(texts(task, task.questions(1, 2000, seed=1))) == drawn[1]


def test_more_pairs_are_the_same_pairs_and_more():
    few, many = (MultihopTask(num_pairs=n, **SIZES) for n in (20, 60))
    assert few._order(3)[:20].tolist() == many._order(3)[:20].tolist()
    assert sorted(many._order(3).tolist()) == list(range(135))


def test_the_sizes_of_the_paper():
    task = MultihopTask(num_pairs=100_000, min_hops=3)
    assert task.num_questions(3) == 800_000 and task.num_trained(3) == 100_000
    assert task.levels == (3,) and task.max_len == 15
    batch = texts(task, task.draw(200, np.random.default_rng(0)).input_ids)
    assert {text.count(" of ") for text in batch if text.startswith("Who")} == {3}
    assert 60 < sum(text.startswith("The") for text in batch) < 140


def test_answers_are_balanced_over_the_layer_they_are_in():
    task = MultihopTask(num_pairs=10, num_entities=30, num_relations=10, num_layers=3, max_hops=2)
    answers = Counter(task.questions(2, 5000, seed=0)[:, -1].tolist())
    assert set(answers) == set(range(20, 30)) and max(answers.values()) < 1000


def test_words_are_different_and_without_spaces():
    words = MultihopTask(num_pairs=1).words
    assert len(set(words)) == len(words) == 500 + 20 + 8
    assert len(set(NAMES)) == len(NAMES) == 520 and len(set(RELATIONS)) == len(RELATIONS) == 30
    assert not any(set(word) & set(" \n") for word in words)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_pairs": 0},
        {"num_pairs": 135},
        {"num_entities": 521},
        {"num_entities": 18},
        {"num_relations": 0},
        {"num_relations": 31},
        {"num_layers": 1},
        {"max_hops": 4},
        {"max_hops": 1},
        {"min_hops": 0},
        {"min_hops": 3, "max_hops": 2},
        {"seed": -1},
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong):
    with pytest.raises(UserError):
        MultihopTask(**{"num_pairs": 10, **SIZES, **wrong})


def test_questions_out_of_range_are_refused():
    task = MultihopTask(num_pairs=134, num_entities=20, num_relations=3, num_layers=4)
    for level, count, seed, said in (
        (0, 1, 0, "hops is 0"),
        (4, 1, 0, "hops is 4"),
        (3, 0, 0, "count"),
        (3, 1, -1, "seed"),
    ):
        with pytest.raises(UserError, match=said):
            task.questions(level, count, seed)


def test_shorter_questions_are_never_all_trained_on():
    """134 of 135 questions of three hops are, and of the 45 of two hops the same share would round to all."""
    task = MultihopTask(num_pairs=134, num_entities=20, num_relations=3, num_layers=4)
    assert [task.num_questions(hops) - task.num_trained(hops) for hops in (2, 3)] == [1, 1]
    held_out, trained = task.questions(2, 50, 0), TaskDocuments(task, seed=0)
    assert len(held_out.unique(dim=0)) == 1
    question = held_out[0].tolist()
    assert all(document["input_ids"] != question for document in islice(trained, 4000))
