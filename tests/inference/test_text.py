"""End tokens, the text of single tokens, and stop strings."""

import pytest

from looplm.data.tokenizer import train_tokenizer
from looplm.inference.text import REPLACEMENT, Tokenizer, end_token_ids, final_text, find_stop, token_texts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat. " * 20], 300)


def test_a_tokenizer_of_ours_is_what_the_engine_needs(tokenizer):
    assert isinstance(tokenizer, Tokenizer)


def test_end_tokens_are_end_of_text_and_end_of_turn(tokenizer):
    assert end_token_ids(tokenizer) == {0, 2}


def test_without_special_tokens_nothing_ends_a_text(tokenizer):
    class Bare:
        eos_token_id = None
        added_tokens_decoder = {}
        encode = tokenizer.encode
        decode = tokenizer.decode

    assert end_token_ids(Bare()) == set()


@pytest.mark.parametrize(
    "text", ["the cat sat", " leading  and double spaces\n", "naïve café 🙂🙂 日本", "a<|im_end|>b", ""]
)
def test_token_texts_join_to_the_whole(tokenizer, text):
    token_ids = tokenizer.encode(text)
    pieces = token_texts(tokenizer, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_cut_character_is_shown_as_such(tokenizer):
    token_ids = tokenizer.encode("🙂")
    assert len(token_ids) > 1
    assert token_texts(tokenizer, token_ids[:-1])[-1] == REPLACEMENT
    broken = [token_ids[-1], token_ids[-1], *tokenizer.encode("a")]
    assert "".join(token_texts(tokenizer, broken)) == tokenizer.decode(broken)


def test_find_stop_looks_only_as_far_back_as_it_must(tokenizer):
    long = tokenizer.encode("dog " + "the cat sat on the mat. " * 20)
    assert find_stop(tokenizer, long, ["xyz", "mat. "])
    assert not find_stop(tokenizer, long, ["dog"])
    for end in range(1, len(long) + 1):
        if "cat sat" in tokenizer.decode(long[:end]):
            assert find_stop(tokenizer, long[:end], ["cat sat"])
            break


def test_a_stop_string_of_many_bytes_is_found(tokenizer):
    token_ids = tokenizer.encode("x🙂日本")
    assert find_stop(tokenizer, token_ids, ["🙂日本"])


def test_a_stop_string_across_special_tokens_is_found(tokenizer):
    """They are not shown, and so do not part it."""
    ids = [*tokenizer.encode("the c"), *[tokenizer.eos_token_id] * 40, *tokenizer.encode("at sat")]
    assert final_text(tokenizer, ids, ("cat",)) == "the "
    assert find_stop(tokenizer, ids, ("cat",)) and not find_stop(tokenizer, ids, ("dog",))


def test_final_text_is_cut_before_the_earliest_stop(tokenizer):
    token_ids = tokenizer.encode("the cat sat on the mat")
    assert final_text(tokenizer, token_ids, []) == "the cat sat on the mat"
    assert final_text(tokenizer, token_ids, ["mat", "sat", "dog"]) == "the cat "
    assert final_text(tokenizer, [*token_ids, 2], []) == "the cat sat on the mat"
