"""Conversations: exactly the responses are predicted, with their end-of-turn tokens, and nothing else."""

import copy

import numpy as np
import pytest

from looplm.data.chat import ChatEncoder, checked_messages
from looplm.errors import UserError

MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + END }}{% endgeneration %}{{ TAIL }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one turn": [message("user", "What is two and two?"), message("assistant", "Four.")],
    "system prompt": [message("system", "Be brief."), message("user", "Hello"), message("assistant", "Hi")],
    "many turns": [
        message("user", "a"),
        message("assistant", "b c"),
        message("user", "d"),
        message("assistant", "é 🙂"),
    ],
    "empty response": [
        message("user", "Say nothing"),
        message("assistant", ""),
        message("user", ""),
        message("assistant", "x"),
    ],
    "response of line breaks": [message("user", "x"), message("assistant", "\n\n  indented\n")],
    "two responses in a row": [message("user", "x"), message("assistant", "one"), message("assistant", "two")],
    "ends with the user": [message("user", "x"), message("assistant", "y"), message("user", "and?")],
    "spells a special token": [message("user", "x"), message("assistant", "the token <|im_end|> ends a turn")],
}


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def responses(ids: list[int], predicted: np.ndarray, tokenizer) -> list[str]:
    """The text of each run of predicted tokens."""
    edges = np.flatnonzero(np.diff(predicted, prepend=False, append=False))
    return [tokenizer.decode(ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.fixture(
    params=[None, ("'<|im_end|>\n'", "''"), ("'<|im_end|>'", "'\n'"), ("''", "'<|im_end|>\n'")],
    ids=["ChatML by prefixes", "mark with line break", "mark with end of turn", "mark of the content alone"],
)
def tokenizer(request, small_tokenizer):
    """Templates that render alike and mark their responses differently, or not at all."""
    if request.param is None:
        return small_tokenizer
    end, tail = request.param
    return with_template(small_tokenizer, MARKED_TEMPLATE.replace("END", end).replace("TAIL", tail))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_exactly_the_responses_and_their_ends_are_predicted(tokenizer, name):
    if "{% generation %}" in tokenizer.chat_template and name == "response of line breaks":
        pytest.skip("a mark is in characters of the whole text, where this response shares its first token")
    if "{% generation %}{{ message['content'] + '' }}" in tokenizer.chat_template and name == "empty response":
        pytest.skip("nothing is marked")
    messages = CONVERSATIONS[name]
    [(ids, predicted)] = ChatEncoder(tokenizer, responses_only=True).encode([("here", messages)])
    expected = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert responses(ids, predicted, tokenizer) == expected
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("name", ["one turn", "system prompt", "many turns", "ends with the user"])
def test_the_ids_are_the_template_s_own(tokenizer, name):
    [(ids, _)] = ChatEncoder(tokenizer, responses_only=True).encode([("here", CONVERSATIONS[name])])
    assert ids == tokenizer.apply_chat_template(CONVERSATIONS[name], return_dict=False)


def test_the_prompt_is_tokenised_as_in_generation(small_tokenizer):
    """A response that begins with a line break may not melt into the prompt's own last one."""
    messages = CONVERSATIONS["response of line breaks"]
    [(ids, predicted)] = ChatEncoder(small_tokenizer, responses_only=True).encode([("here", messages)])
    prompt = small_tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt and predicted.argmax() == len(prompt)


def test_a_batch_is_encoded_as_its_conversations_alone(tokenizer):
    encoder = ChatEncoder(tokenizer, responses_only=True)
    batch = [(name, messages) for name, messages in CONVERSATIONS.items()]
    for pair, (ids, predicted) in zip(batch, encoder.encode(batch), strict=True):
        [(ids_alone, predicted_alone)] = encoder.encode([pair])
        assert ids == ids_alone and np.array_equal(predicted, predicted_alone)


def test_everything_is_predicted_if_asked(tokenizer):
    [(ids, predicted)] = ChatEncoder(tokenizer, responses_only=False).encode([("here", CONVERSATIONS["many turns"])])
    assert predicted.all() and len(predicted) == len(ids)


def test_a_template_that_rewrites_the_past_is_an_error(small_tokenizer):
    template = "{% for m in messages %}{{ m.role + (m.content if loop.last else '...') + '<|im_end|>' }}{% endfor %}"
    encoder = ChatEncoder(with_template(small_tokenizer, template), responses_only=True)
    with pytest.raises(
        UserError, match=r"chat.jsonl, line 3: the chat template renders the beginning .* \(message 2\)"
    ):
        encoder.encode([("chat.jsonl, line 3", CONVERSATIONS["many turns"])])


def test_a_template_that_refuses_is_an_error_that_names_the_record(small_tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    encoder = ChatEncoder(with_template(small_tokenizer, template), responses_only=True)
    with pytest.raises(UserError, match=r"chat.jsonl, line 3: the chat template refuses .*roles must alternate"):
        encoder.encode([("chat.jsonl, line 3", CONVERSATIONS["one turn"])])


def test_a_tokenizer_without_template_is_an_error(small_tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        ChatEncoder(with_template(small_tokenizer, None), responses_only=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hello", "expected a list of messages that is not empty, found str"),
        ([], "expected a list of messages that is not empty"),
        (["hello"], "message 1: expected an object with role and content, found str"),
        ([{"from": "human", "value": "x"}], "message 1: expected the fields role and content, found from, value"),
        ([message("user", "x"), message("bot", "y")], "message 2: unknown role 'bot'"),
        ([{"role": "user", "content": None}], "message 1: content must be a string, found NoneType"),
        ([{"role": "assistant", "content": "", "tool_calls": [1]}], "message 1: tool calls are not supported"),
        ([message("user", "\ud83d")], "half of a surrogate pair"),
        ([message("user", "x")], "no message of the role assistant"),
    ],
)
def test_bad_messages_are_named(value, said):
    with pytest.raises(UserError, match="a.jsonl, line 7") as caught:
        checked_messages(value, "a.jsonl, line 7", needs_response=True)
    assert said in str(caught.value)


def test_without_responses_only_a_conversation_needs_none():
    assert checked_messages([message("user", "x")], "here", needs_response=False) == [message("user", "x")]
