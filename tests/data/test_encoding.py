"""Each format: which tokens a record becomes, which of them are predicted, and which records are refused."""

import numpy as np
import pytest

from looplm.data.decontamination import Decontamination
from looplm.data.documents import is_held_out
from looplm.data.encoding import Encoder, in_memory
from looplm.data.formats import Record, reader_of
from looplm.data.recipe import RecordSource
from looplm.errors import UserError


def records(*fields: dict) -> list[Record]:
    return [Record(f"a.jsonl:{n}", f"a.jsonl, line {n}", item) for n, item in enumerate(fields, 1)]


def encode(tokenizer, *fields, decontamination=None, **source):
    return list(Encoder(RecordSource(**source), tokenizer, decontamination).encode(records(*fields)))


def test_text_stands_between_its_boundaries(small_tokenizer):
    [document] = encode(small_tokenizer, {"body": "a <|endoftext|> b"}, text_field="body")
    assert document.ids[0] == document.ids[-1] == 0 and 0 not in document.ids[1:-1]
    assert small_tokenizer.decode(document.ids[1:-1]) == "a <|endoftext|> b"
    assert document.predicted is None and document.num_bytes == 17 and document.ids.dtype == np.uint16


def test_empty_texts_are_left_out_and_order_is_kept(small_tokenizer):
    documents = encode(small_tokenizer, *[{"text": "" if n % 3 == 0 else f"number {n}"} for n in range(200)])
    texts = [small_tokenizer.decode(document.ids[1:-1]) for document in documents]
    assert texts == [f"number {n}" for n in range(200) if n % 3]


def test_instructions_as_chat_are_the_chat_they_stand_for(small_tokenizer):
    [document] = encode(
        small_tokenizer, {"q": "Why?", "a": "So."}, format="instruction", prompt_field="q", response_field="a"
    )
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    [chat] = encode(small_tokenizer, {"messages": messages}, format="chat")
    assert np.array_equal(document.ids, chat.ids)
    assert np.array_equal(document.predicted, chat.predicted)


@pytest.mark.parametrize("responses_only", [True, False])
def test_plain_instructions_are_prompt_and_response(small_tokenizer, responses_only):
    [document] = encode(
        small_tokenizer,
        {"prompt": "2 + 2 = ", "response": "4"},
        format="instruction",
        as_chat=False,
        responses_only=responses_only,
    )
    assert small_tokenizer.decode(document.ids) == "<|endoftext|>2 + 2 = 4<|endoftext|>"
    if responses_only:
        assert small_tokenizer.decode(document.ids[document.predicted]) == "4<|endoftext|>"
    else:
        assert document.predicted is None


def test_tokens_pass_as_they_are(small_tokenizer):
    [document] = encode(small_tokenizer, {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, format="tokens")
    assert document.ids.tolist() == [5, 6, 7] and document.predicted.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("source", "fields", "said"),
    [
        ({}, {"content": "x", "id": 1}, "string under \"text\"; its fields are: 'content', 'id'"),
        ({}, {"text": ["x"]}, 'string under "text", found a list there'),
        ({"format": "chat"}, {"conversation": []}, "no field \"messages\"; its fields are: 'conversation'"),
        ({"format": "chat"}, {"messages": 3}, "expected a list of messages"),
        ({"format": "instruction"}, {"prompt": "x"}, "string under \"response\"; its fields are: 'prompt'"),
        ({"format": "tokens"}, {"input_ids": [1]}, "needs exactly input_ids and labels, found: 'input_ids'"),
        ({"format": "tokens"}, {"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"format": "tokens"}, {"input_ids": [], "labels": []}, "flat list"),
        ({"format": "tokens"}, {"input_ids": [[1]], "labels": [[1]]}, "flat list"),
        ({"format": "tokens"}, {"input_ids": [[1], [1, 2]], "labels": [1, 2]}, "flat list"),
        ({"format": "tokens"}, {"input_ids": [1.5, 2], "labels": [1, 2]}, "flat list"),
        ({"format": "tokens"}, {"input_ids": ["a"], "labels": ["a"]}, "flat list"),
        (
            {"format": "tokens"},
            {"input_ids": [1, 2], "labels": [1, 3]},
            "every label must be the token at its own place",
        ),
        ({"format": "tokens"}, {"input_ids": [1, 2], "labels": [1, -100]}, "nothing is to be predicted"),
        (
            {"format": "tokens"},
            {"input_ids": [1, 400], "labels": [1, 400]},
            "run from 1 to 400; the vocabulary ends at 399",
        ),
        ({"format": "tokens"}, {"input_ids": [-1, 2], "labels": [-1, 2]}, "run from -1 to 2"),
    ],
)
def test_bad_records_are_named(small_tokenizer, source, fields, said):
    good = {"text": "x"} if not source else None
    with pytest.raises(UserError, match="a.jsonl, line") as caught:
        encode(small_tokenizer, *([good] if good else []), fields, **source)
    assert said in str(caught.value)


def test_the_parts_are_those_of_the_split_by_name(small_tokenizer):
    fields = [{"text": f"number {n}"} for n in range(300)]
    parts = {part: encode(small_tokenizer, *fields, part=part) for part in ("all", "train", "held_out")}
    assert len(parts["train"]) + len(parts["held_out"]) == len(parts["all"]) == 300
    held_out = [f"number {n}" for n in range(300) if is_held_out(f"a.jsonl:{n + 1}")]
    assert [small_tokenizer.decode(document.ids[1:-1]) for document in parts["held_out"]] == held_out
    assert held_out


def test_contaminated_documents_are_dropped(small_tokenizer):
    decontamination = Decontamination(["one two three four"], ngram=4)
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]
    assert encode(small_tokenizer, {"messages": messages}, format="chat", decontamination=decontamination) == []
    [kept] = encode(
        small_tokenizer, {"text": "One, two, three, four!"}, {"text": "x"}, decontamination=decontamination
    )
    assert kept.num_bytes == 1
    assert decontamination.dropped == ["a.jsonl, line 1", "a.jsonl, line 1"]


def test_the_text_of_a_conversation_is_its_messages():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [record] = records({"messages": messages})
    assert reader_of(RecordSource(format="chat"))(record).text == "a\nb"


def test_a_stream_in_memory_mixes_masked_and_whole_documents(small_tokenizer):
    masked = encode(small_tokenizer, {"input_ids": [5, 6], "labels": [-100, 6]}, format="tokens")
    text = encode(small_tokenizer, {"text": "x"})
    stream = in_memory([*masked, *text], np.uint16)
    assert stream.document_starts.tolist() == [0, 2]
    assert np.asarray(stream.predicted).tolist() == [0, 1, 1, 1, 1]
    assert in_memory([], np.uint16).num_tokens == 0
