"""The tokenizer: lossless for any text, with Ouro's special tokens, and itself again after saving."""

import pytest
from transformers import AutoTokenizer

from looplm.data.tokenizer import MIN_VOCAB_SIZE, boundary_token_ids, encode_plain, train_tokenizer
from looplm.errors import UserError

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "Naïve café, 12345 cafés.\n" * 20]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=280)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words",
        "  leading,   inner and trailing spaces  ",
        "don't clean up , these ! spaces . ' s",
        "tabs\tand\nnewlines\n\n\n    indented",
        "CRLF\r\nand CR\rand LF\n",
        "null\x00byte and \x1b[0m escape",
        "emoji 🙂👩‍👩‍👧‍👦 and flags 🇮🇸",
        "中文 العربية हिन्दी e\u0301 combining, \u00a0 no-break, \u2028 separator",
        "\ufeffa byte-order mark in the middle \ufeff",
        "\U0010ffff the last code point, \ufffd the replacement character",
        "0123456789 3.14159",
        "spelled out <|endoftext|> and <|im_start|>user",
        "".join(map(chr, range(256))),
    ],
)
def test_decode_is_the_inverse_of_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(encode_plain([text], tokenizer)[0]) == text


def test_training_merges_what_is_frequent_up_to_the_vocabulary_size(tokenizer):
    assert len(tokenizer) == 280
    assert len(tokenizer.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])
    assert len(train_tokenizer(TEXTS, vocab_size=4096)) < 400  # there is nothing more to merge


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(TEXTS, vocab_size=280)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_special_tokens_have_ouros_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert boundary_token_ids(tokenizer) == (0, 0)


def test_encoding_adds_no_token(tokenizer):
    assert tokenizer.encode("a b") == tokenizer.encode("a b", add_special_tokens=False)


def test_a_special_token_in_plain_text_stays_text(tokenizer):
    ids = encode_plain(["a<|endoftext|>b"], tokenizer)[0]
    assert 0 not in ids
    assert tokenizer.encode("a<|endoftext|>b").count(0) == 1  # and the setting is not left behind


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]


def test_chat_template_is_chatml(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\n"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello\n<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "don't , <|im_start|>user\n  é🙂 42"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.special_tokens_map == tokenizer.special_tokens_map


def test_a_vocabulary_without_room_for_the_bytes_is_an_error():
    assert len(train_tokenizer(TEXTS, MIN_VOCAB_SIZE)) == MIN_VOCAB_SIZE
    with pytest.raises(UserError, match="258 tokens is too small"):
        train_tokenizer(TEXTS, MIN_VOCAB_SIZE - 1)


def test_boundaries_fall_back_on_eos_and_need_one():
    bare = train_tokenizer(TEXTS, MIN_VOCAB_SIZE)
    bare.eos_token, bare.bos_token = "<|im_end|>", "<|im_start|>"
    assert boundary_token_ids(bare) == (1, 2)
    bare.bos_token = None
    assert boundary_token_ids(bare) == (2, 2)
    bare.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        boundary_token_ids(bare)
