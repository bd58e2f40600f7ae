"""Whatever is sent, the status is right, the message says what to change, and the server goes on."""

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looplm.serving.schema import ChatRequest, CompletionRequest, LoopsRequest

MODEL = "stdlib-small"
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
LIMIT = {"max_tokens": 2}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's form, checked to be one."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"].endswith((".", ")", "?"))
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        (TEXTS, {"model": "other", "prompt": "x"}, 404, "model", "does not exist"),
        (TEXTS, {"prompt": "x"}, 400, "model", "missing"),
        (TEXTS, {"model": MODEL}, 400, "prompt", "missing"),
        (TEXTS, {"model": MODEL, "prompt": ""}, 400, "prompt", "empty"),
        (TEXTS, {"model": MODEL, "prompt": []}, 400, "prompt", "empty"),
        (TEXTS, {"model": MODEL, "prompt": ["x", ""]}, 400, None, "Prompt 1: The prompt is empty"),
        (TEXTS, {"model": MODEL, "prompt": [1, "x"]}, 400, "prompt", "list of token ids"),
        (TEXTS, {"model": MODEL, "prompt": [999999]}, 400, None, "outside the vocabulary"),
        (TEXTS, {"model": MODEL, "prompt": [-1]}, 400, None, "outside the vocabulary"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_tokens": -1}, 400, "max_tokens", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_tokens": "5"}, 400, "max_tokens", "integer"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_tokens": True}, 400, "max_tokens", "integer"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, None, "set echo"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_tokens": 10**30}, 400, None, "context"),
        (TEXTS, {"model": MODEL, "prompt": "x", "temperature": -0.1}, 400, "temperature", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "top_p": 1.5}, 400, "top_p", "less"),
        (TEXTS, {"model": MODEL, "prompt": "x", "n": 0}, 400, "n", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "n": 10**6}, 400, "n", "less"),
        (TEXTS, {"model": MODEL, "prompt": "x", "seed": -5}, 400, "seed", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stop": ""}, 400, "stop", "at least 1 character"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stop": ["ok", ""]}, 400, "stop.1", "at least 1 character"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stop": ["x"] * 17}, 400, "stop", "at most 16"),
        (TEXTS, {"model": MODEL, "prompt": "x", "logprobs": 21}, 400, "logprobs", "less"),
        (TEXTS, {"model": MODEL, "prompt": "x", "max_token": 1}, 400, "max_token", "mean max_tokens?"),
        (TEXTS, {"model": MODEL, "prompt": "x", "presence_penalty": 1}, 400, "presence_penalty", "not supported"),
        (TEXTS, {"model": MODEL, "prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stream_options": {}}, 400, None, "stream to true"),
        (TEXTS, {"model": MODEL, "prompt": "x", "num_loops": 0}, 400, "num_loops", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "num_loops": 9}, 400, None, "at most 8"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit_threshold": -1}, 400, "exit_threshold", "greater"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "kl:x"}, 400, None, "hidden-diff:EPS"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "kl:nan"}, 400, None, "from 0"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "kl:1", "num_loops": 1}, 400, None, "give one of them"),
        (TEXTS, {"model": MODEL, "prompt": "x", "draft_tokens": 1}, 400, None, "give both"),
        (TEXTS, {"model": MODEL, "prompt": "x", "draft_loops": 1, "logprobs": 1}, 400, None, "draft_loops"),
        (TEXTS, {"model": MODEL, "prompt": "x", "best_of": 2}, 400, None, "best_of"),
        (CHATS, {"model": MODEL, "messages": []}, 400, "messages", "at least 1"),
        (CHATS, {"model": MODEL, "messages": "hi"}, 400, "messages", "list"),
        (CHATS, {"model": MODEL, "messages": [{"role": "bot", "content": "x"}]}, 400, "messages.0.role", "system"),
        (CHATS, {"model": MODEL, "messages": [{"role": "user"}]}, 400, "messages.0.content", "missing"),
        (CHATS, {"model": MODEL, "messages": USER, "top_logprobs": 2}, 400, None, "logprobs: true"),
        (CHATS, {"model": MODEL, "messages": USER, "tools": []}, 400, "tools", "not supported"),
        (CHATS, {"model": MODEL, "messages": USER, "max_tokens": 1, "max_completion_tokens": 1}, 400, None, "one of"),
        ("/v1/loops", {"model": MODEL, "prompt": "x", "top": 0}, 400, "top", "greater"),
        ("/v1/loops", {"model": MODEL, "prompt": "x " * 5000}, 400, None, "more than the 2048"),
        ("/v1/loops", {"model": MODEL, "prompt": [5000]}, 400, None, "0 to 2047"),
    ],
)
def test_what_is_wrong_is_said(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    answer = http.post(path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (status, param) and said in error["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "missing|object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "JSON object"),
        (b"null", "missing|object"),
        (b'{"model": "stdlib-small", "prompt": "x", "temperature": NaN}', "finite"),
        (b'{"model": "stdlib-small", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON"),
        (b'{"model": "stdlib-small", "prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"model": "\\ud800", "prompt": "x"}', "does not exist|Unicode|string"),
        (b'{"\\ud800": 1}', "JSON object"),
    ],
)
def test_what_is_no_json(http: httpx.Client, content: bytes, said: str) -> None:
    answer = http.post(TEXTS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert any(one in error_of(answer)["message"] for one in said.split("|"))


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    """A form on another site's page can send text/plain without asking; it must not start anything."""
    content, headers = json.dumps({"model": MODEL, "prompt": "x"}), {"content-type": "text/plain"}
    answer = http.post(TEXTS, content=content, headers=headers)
    assert answer.status_code == 400 and "application/json" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", TEXTS, 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/x", 404), ("GET", "/nowhere", 404)],
)
def test_other_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status and error_of(answer)


def test_what_is_no_http(server: Any) -> None:
    for sent in (b"\x00\x01garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(sent)
            assert raw.recv(100).startswith(b"HTTP/1.1 4")
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}


# --- Anything at all ------------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
likely = st.sampled_from(
    [0, 1, -1, 2, 0.5, 1e308, 2**63, 2**64, "", "x", "kl:1", True, None, [], ["a"], [1], [[1]], {}]
)


def bodies(kind: type, start: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid request with some of its fields replaced, and some unknown ones."""
    fields = st.sampled_from([name for name in kind.model_fields if name not in LIMIT])
    changed = st.dictionaries(fields | st.text(max_size=8), likely | anything, min_size=1, max_size=4)
    return changed.map(lambda change: {**start, **change, **LIMIT})


@pytest.mark.parametrize(
    ("path", "kind", "start"),
    [
        (TEXTS, CompletionRequest, {"model": MODEL, "prompt": "x"}),
        (CHATS, ChatRequest, {"model": MODEL, "messages": USER}),
        ("/v1/loops", LoopsRequest, {"model": MODEL, "prompt": "x y"}),
    ],
)
def test_no_request_makes_it_fail(server: Any, path: str, kind: type, start: dict[str, Any]) -> None:
    with server.client() as client:

        @settings(
            max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(bodies(kind, start) | anything)
        def run(body: Any) -> None:
            content = json.dumps(body).encode()
            answer = client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                error_of(answer)
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["object"] in ("text_completion", "chat.completion", "loops")

        run()
    assert server.idle()
