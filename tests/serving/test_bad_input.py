"""Whatever is sent, the status is right, the message says what to change, and the server goes on."""

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

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
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "kl:nan"}, 400, None, "exit is 'kl:nan'; its number must be"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "stable:0"}, 400, None, "finite, from 1"),
        (TEXTS, {"model": MODEL, "prompt": "x", "num_loops": 4, "draft_loops": 4}, 400, None, "leaves at loop 4"),
        (TEXTS, {"model": MODEL, "prompt": "x", "num_loops": 1, "draft_loops": 3}, 400, None, "leaves at loop 1"),
        (TEXTS, {"model": MODEL, "prompt": [1] * 2048}, 400, None, "2048 tokens; with one to write that is more than"),
        (TEXTS, {"model": MODEL, "prompt": [1] * 2048, "max_tokens": 1}, 400, None, "max_tokens 1 that is 2049"),
        (TEXTS, {"model": MODEL, "prompt": [1] * 2049, "max_tokens": 0, "echo": True}, 400, None, "has 2049 tokens"),
        (TEXTS, {"model": MODEL, "prompt": "x", "exit": "kl:1", "num_loops": 1}, 400, None, "give one of them"),
        (TEXTS, {"model": MODEL, "prompt": "x", "draft_tokens": 1}, 400, None, "give both"),
        (TEXTS, {"model": MODEL, "prompt": "x", "draft_loops": 1, "logprobs": 1}, 400, None, "draft_loops"),
        (TEXTS, {"model": MODEL, "prompt": "x", "best_of": 2}, 400, None, "best_of"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stop_token_ids": [-1]}, 400, None, "stop_token_ids has -1"),
        (TEXTS, {"model": MODEL, "prompt": "x", "stop_token_ids": [2048]}, 400, None, "0 to 2047"),
        (TEXTS, {"model": MODEL, "prompt": ["x"] * 81, "n": 2}, 400, None, "asks for 162 texts; at most 160"),
        (TEXTS, {"model": MODEL, "prompt": ["x"] * 161, "max_tokens": 0, "echo": True}, 400, None, "161 texts"),
        (TEXTS, {"model": MODEL, "prompt": "x" * 1_000_000}, 400, None, "1000000 characters"),
        (TEXTS, {"model": MODEL, "prompt": [1] * 100_000}, 400, None, "100000 tokens"),
        (TEXTS, {"model": MODEL, "prompt": "x", **dict.fromkeys(map(str, range(70)))}, 400, None, "72 fields"),
        (CHATS, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 10**6}]}, 400, None, "characters"),
        (CHATS, {"model": MODEL, "messages": USER * 5000}, 400, "messages", "at most 4096"),
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
        ("/v1/loops", {"model": MODEL, "prompt": "x" * 1_000_000}, 400, None, "1000000 characters"),
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
        (b'{"model": "stdlib-small", "prompt": "x", "temperature": NaN}', "NaN is no number"),
        (b'{"model": "stdlib-small", "prompt": "x", "metadata": {"a": [-Infinity]}}', "-Infinity is no number"),
        (b'{"model": "stdlib-small", "prompt": "x", "temperature": 1e999}', "finite"),
        (b'{"model": "stdlib-small", "prompt": "x", "max_tokens": 1, "max_tokens": 2}', "'max_tokens' is given twice"),
        (b'{"model": "stdlib-small", "prompt": "x", "metadata": {"a": 1, "a": 1}}', "'a' is given twice"),
        (b'{"model": "stdlib-small", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON"),
        (b'{"model": "stdlib-small", "prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"model": "\\ud800", "prompt": "x"}', "does not exist|Unicode|string"),
        (b'{"\\ud83d": 1}', "the field '\\ud83d' is not valid Unicode"),
        (b'{"model": "stdlib-small", "prompt": "x", "metadata": {"\\ud83d": 1}}', "is not valid Unicode"),
    ],
)
def test_what_is_no_json(http: httpx.Client, content: bytes, said: str) -> None:
    answer = http.post(TEXTS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert any(one in error_of(answer)["message"] for one in said.split("|"))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{"role": "x"}] * 9999}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 9999}]}),
        (CompletionRequest, {"prompt": "x", **{str(i): 1 for i in range(9999)}}),
        (CompletionRequest, {"prompt": [["a"]] * 9999}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 9999}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 9999}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "a" for i in range(9999)}}),
        (LoopsRequest, {"prompt": ["a"] * 9999}),
    ],
)
def test_a_large_body_that_is_wrong_all_over_is_given_up_at_once(kind: Any, body: dict[str, Any]) -> None:
    """Every mistake takes time that all other clients wait for."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({"model": MODEL, **body})
    assert wrong.value.error_count() <= 3


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    """A form on another site's page can send text/plain without asking; it must not start anything."""
    content, headers = json.dumps({"model": MODEL, "prompt": "x"}), {"content-type": "text/plain"}
    answer = http.post(TEXTS, content=content, headers=headers)
    assert answer.status_code == 400 and "application/json" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", TEXTS, 405),
        ("OPTIONS", TEXTS, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/" + "x" * 50_000, 404),
        ("GET", "/../../etc/passwd", 404),
    ],
)
def test_other_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status and error_of(answer)


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", f"/v1/models/{MODEL}"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert head.status_code == whole.status_code == 200 and head.content == b"" != whole.content
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_what_is_no_http(server: Any) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for sent in (
        b"\x00\x01garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
        start + b"Content-Length: -5\r\n\r\n",
        start + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        start + b"\r\n",  # neither a length nor chunks: an empty body
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(sent)
            head, _, content = raw.makefile("rb").read().partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 4") and b"content-type: application/json" in head
            error = json.loads(content)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"].endswith(".")
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}


def test_what_is_no_http_after_an_answer_only_ends_the_connection(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is refused by its head, before its body has come."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(head)
        assert raw.recv(20).startswith(b"HTTP/1.1 403")
        raw.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in raw.makefile("rb").read()
    assert not [one for one in caplog.records if one.name == "asyncio"]


def test_http_1_0_names_no_host(server: Any) -> None:
    for head, status in ((b"", b"200"), (b"Host: evil.example\r\n", b"403")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"GET /health HTTP/1.0\r\n" + head + b"\r\n")
            assert raw.makefile("rb").readline().split()[1] == status


def test_web_sockets_are_answered_over_http(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="uvicorn.error")
    ask = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-key": "eA==", "sec-websocket-version": "13"}
    with server.client() as client:
        assert client.get("/health", headers=ask).json() == {"status": "ok"}
    assert not caplog.records


def test_a_body_may_come_in_chunks(http: httpx.Client) -> None:
    content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2, "temperature": 0}).encode()
    pieces = (content[i : i + 7] for i in range(0, len(content), 7))
    answer = http.post(TEXTS, content=pieces, headers={"content-type": "application/json"})
    assert "content-length" not in answer.request.headers and answer.status_code == 200


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


paths = st.sampled_from(["/", "/health", "/metrics", "/v1/models", f"/v1/models/{MODEL}", TEXTS, CHATS, "/v1/loops"])
words = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=30)
names = st.sampled_from(["Authorization", "Content-Type", "Accept", "Cookie", "Origin", "Range", "Expect", "Upgrade"])


def test_no_address_method_or_header_makes_it_fail(server: Any) -> None:
    """Every endpoint, and what is none, asked in every manner: an HTTP answer that is not the server's fault."""

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]) | words,
        paths | st.tuples(paths, words).map("?".join) | words.map(lambda word: "/" + word),
        st.lists(st.tuples(names, words), max_size=3),
        st.binary(max_size=40),
    )
    def run(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers)]) + "\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
            raw.sendall(head.encode("latin-1") + body)
            answer = raw.makefile("rb").readline()
        assert answer.startswith(b"HTTP/1.1 ") and answer[9:10] in b"1234", (answer, head)

    run()
    server.check()
