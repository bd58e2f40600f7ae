"""Answers of every loop, and how they agree."""

import pytest
import torch

from looplm.analysis.agreement import agreement, agreement_by_level
from looplm.analysis.readout import Labels, free_answers, label_logits, last_label, ranked, spelled_labels
from looplm.errors import UserError


def test_counts_by_hand():
    answers = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]])
    found = agreement(answers, ["no", "yes"], right=torch.tensor([0, 1, 1, 1]))
    assert found.matrix == ((4, 2, 3), (2, 4, 3), (3, 3, 4))
    assert found.marginals == ((0.5, 0.5), (0.5, 0.5), (0.25, 0.75))
    assert found.flips == (((0, 1), (1, 0)), ((0, 1), (0, 0)))
    assert found.accuracy == (0.75, 0.75, 1.0)
    assert found.chance[0][1] == pytest.approx(2.0)
    assert found.chance[0][2] == pytest.approx(4 * (0.5 * 0.25 + 0.5 * 0.75))


def test_levels_by_hand():
    answers = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]])
    easy, hard = agreement_by_level(answers, torch.tensor([0, 1, 1, 1]), [1, 2, 1, 2])
    assert (easy.level, easy.num_prompts, easy.changed, easy.accuracy) == (1, 2, (0.0, 0.0), (1.0, 1.0, 1.0))
    assert (hard.level, hard.num_prompts, hard.changed, hard.accuracy) == (2, 2, (1.0, 0.5), (0.5, 0.5, 1.0))
    (only,) = agreement_by_level(answers, None, [None, 3, None, None])
    assert (only.level, only.num_prompts, only.changed, only.accuracy) == (3, 1, (1.0, 0.0), None)


def test_rare_free_answers_share_a_name_but_do_not_agree():
    numbers, ids = ranked(torch.tensor([[7, 7, 5, 9], [7, 7, 9, 5]]), most=1)
    assert ids == (7,)
    found = agreement(numbers, ["seven"])
    assert found.labels == ("seven", "other")
    assert found.matrix == ((4, 2), (2, 4))
    assert found.marginals == ((0.5, 0.5), (0.5, 0.5))
    assert found.flips == (((0, 0), (0, 0)),)


def test_one_loop_has_no_flips():
    found = agreement(torch.tensor([[0, 1]]), ["no", "yes"])
    assert found.matrix == ((2,),)
    assert found.flips == ()


def test_answers_are_the_head_s(make_model):
    model = make_model()
    hidden = torch.randn(3, 5, 16, dtype=torch.float64)
    logits = model.lm_head(hidden)
    assert torch.equal(free_answers(model.lm_head, hidden), logits.argmax(-1))
    labels = Labels(("no", "yes"), ((3, 5), (8,)))
    found = label_logits(model.lm_head, hidden, labels)
    torch.testing.assert_close(found[..., 0], torch.logaddexp(logits[..., 3], logits[..., 5]))
    torch.testing.assert_close(found[..., 1], logits[..., 8])


class Words:
    """A tokenizer of words and spaces, a number each."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        parts = ([" "] if text.startswith(" ") else []) + text.split()
        return [self.ids.setdefault(part, len(self.ids)) for part in parts]


def test_labels_take_every_spelling_but_not_the_space_itself():
    words = Words()
    labels = spelled_labels(words, ["yes", "no"])
    assert labels.names == ("yes", "no")
    assert sorted(labels.token_ids[0]) == sorted(words.ids[word] for word in ("yes", "Yes"))
    with pytest.raises(UserError, match="begin with the same token"):
        spelled_labels(words, ["yes", "Yes"])
    with pytest.raises(UserError, match="at least two"):
        spelled_labels(words, ["yes"])


def test_the_last_label_of_a_text_counts():
    assert last_label("Yes, it may be ... so the answer is NO.", ("yes", "no")) == 1
    assert last_label("nobody knows yesterday", ("yes", "no")) is None
    assert last_label("no. not at all", ("no", "not at all")) == 1
