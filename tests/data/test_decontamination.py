"""Documents that repeat a reference text are told apart, and only they."""

import pytest

from looplm.data.decontamination import Decontamination, normalised_words, strings_in
from looplm.errors import UserError

REFERENCE = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def test_words_are_compared_without_case_and_punctuation():
    assert normalised_words("It's 3.5 — «Été»!") == ["it", "s", "3", "5", "été"]


@pytest.mark.parametrize(
    ("text", "contaminated"),
    [
        (REFERENCE, True),
        (f"Before. {REFERENCE.upper().replace(',', ' --')} After.", True),
        ("natalia sold clips to 48 of her friends in april and then", False),  # 12 words in a row
        ("natalia sold clips to 48 of her friends in april and then she", True),  # 13
        ("Natalia sold clips to 50 of her friends in April, and then she sold twice as many clips in May.", False),
        ("", False),
    ],
)
def test_thirteen_words_in_a_row_are_a_match(text, contaminated):
    assert Decontamination([REFERENCE], ngram=13).is_contaminated(text) == contaminated


def test_a_short_reference_must_occur_whole_and_a_tiny_one_is_not_checked():
    decontamination = Decontamination(["What is the capital of France today?", "Yes."], ngram=13)
    assert decontamination.num_unchecked == 1
    assert decontamination.is_contaminated("He asked: what is the capital of France today? Yes.")
    assert not decontamination.is_contaminated("What is the capital of France? Yes.")


def test_dropped_documents_are_counted_and_the_first_are_named():
    decontamination = Decontamination([REFERENCE], ngram=13)
    kept = [decontamination.keeps(text, f"line {n}") for n, text in enumerate([REFERENCE, "other", *[REFERENCE] * 30])]
    assert kept == [False, True, *[False] * 30]
    assert decontamination.num_dropped == 31
    assert decontamination.dropped[:2] == ["line 0", "line 2"] and len(decontamination.dropped) == 20


def test_every_string_of_a_record_counts():
    record = {"question": "a", "choices": ["b", {"label": "c"}], "answer": 3, "none": None}
    assert list(strings_in(record)) == ["a", "b", "c"]


def test_references_that_cannot_match_are_an_error():
    with pytest.raises(UserError, match="7 words that a match needs"):
        Decontamination(["too short", ""], ngram=13)
