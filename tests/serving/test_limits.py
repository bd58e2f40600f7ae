"""Keys, rates, sizes, hosts, and clients that are slow, vanish, or come a thousand at a time."""

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import looplm
from looplm.serving import server as sockets
from looplm.serving.limits import Limits, RateLimit

MODEL = "stdlib-small"
TEXTS = "/v1/completions"
SHORT = {"model": MODEL, "prompt": "x", "max_tokens": 2, "temperature": 0}
LONG = {**SHORT, "max_tokens": 2000, "ignore_eos": True}


def post_bytes(body: dict[str, Any], length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_key_is_asked_for(serve: Callable[..., Any]) -> None:
    server = serve(Limits(api_key="kéy"))
    with server.client() as http:
        for path in ("/health", "/"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"authorization": "Basic kéy"}, {"authorization": "Bearer key"}, {"authorization": "kéy"}):
            encoded = {name: value.encode() for name, value in headers.items()}
            for path in ("/v1/models", "/metrics"):
                assert code_of(http.get(path, headers=encoded)) == (401, "invalid_api_key")
            assert http.post(TEXTS, json=SHORT, headers=encoded).status_code == 401
        assert http.get("/v1/models?api_key=kéy&key=kéy").status_code == 401  # addresses are written into logs
        good = {"authorization": "bearer kéy".encode()}
        assert http.post(TEXTS, json=SHORT, headers=good).status_code == 200


def test_rate(serve: Callable[..., Any]) -> None:
    with serve(Limits(requests_per_minute=3)).client() as http:
        assert [http.get("/v1/models").status_code for _ in range(3)] == [200] * 3
        refused = http.get("/v1/models")
        assert code_of(refused) == (429, "rate_limit_exceeded") and 1 <= int(refused.headers["retry-after"]) <= 21
        assert http.get("/health").status_code == 200


def test_a_rate_fills_again_for_each_client() -> None:
    now = 0.0
    rate = RateLimit(60, clock=lambda: now)
    assert [rate.wait_for("a") for _ in range(60)] == [0.0] * 60
    assert rate.wait_for("a") == pytest.approx(1.0) and rate.wait_for("b") == 0
    now = 0.5
    assert rate.wait_for("a") == pytest.approx(0.5)
    now = 1.01
    assert rate.wait_for("a") == 0 and rate.wait_for("a") > 0
    for client in range(5000):
        rate.wait_for(str(client))
        now += 0.1
    assert len(rate._buckets) <= 4096


def test_a_body_may_be_too_large(serve: Callable[..., Any]) -> None:
    with serve(Limits(max_body=1_000_000)).client() as http:
        for size in (1_100_000, 10_000_000):
            answer = http.post(TEXTS, content=b"x" * size, headers={"content-type": "application/json"})
            assert code_of(answer) == (413, "request_too_large")
        chunked = http.post(TEXTS, content=(b"x" * 100_000 for _ in range(30)))
        assert code_of(chunked) == (413, "request_too_large")
        assert http.post(TEXTS, json=SHORT).status_code == 200


def test_a_body_far_too_large_is_not_read(serve: Callable[..., Any]) -> None:
    server = serve(Limits(max_body=1000))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(post_bytes({}, length=10**12)[:200])
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_may_be_too_slow(serve: Callable[..., Any]) -> None:
    server = serve(Limits(body_seconds=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(post_bytes(SHORT, length=1000))
        assert raw.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_name_that_is_not_this_machine(server: Any) -> None:
    with server.client() as http:
        for host in ("evil.example", "localhost.evil.example", ""):
            assert code_of(http.get("/v1/models", headers={"host": host})) == (403, "forbidden_host")
        for host in ("localhost", f"localhost:{server.port}", "[::1]:80"):
            assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_other_sites_may_call_only_if_told(serve: Callable[..., Any], server: Any) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with server.client() as http:
        assert "access-control-allow-origin" not in http.options(TEXTS, headers=ask).headers
    with serve(cors_origins=("https://a.example",)).client() as http:
        assert http.options(TEXTS, headers=ask).headers["access-control-allow-origin"] == "https://a.example"
        other = http.options(TEXTS, headers={**ask, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_says_so(serve: Callable[..., Any], make_engine: Callable[..., Any]) -> None:
    server = serve(engine=make_engine(max_batch=1), max_waiting=1)
    with server.client() as http:
        never = http.post(TEXTS, json={**SHORT, "n": 3})  # not 429: clients would try again for ever
        assert never.status_code == 400 and "at most 2" in never.json()["error"]["message"]
        with http.stream("POST", TEXTS, json={**LONG, "n": 2, "stream": True}) as running:
            lines = running.iter_lines()
            assert next(lines)
            refused = http.post(TEXTS, json=SHORT)
            assert code_of(refused) == (429, "queue_full") and refused.headers["retry-after"]
        assert server.idle()
        assert http.post(TEXTS, json=SHORT).status_code == 200


def test_only_so_much_may_come_in_at_one_time(serve: Callable[..., Any]) -> None:
    """A thousand clients that send all but the end of a large body must not fill the memory."""
    server = serve(Limits(max_body=1000, max_large=2, body_seconds=20))
    almost = post_bytes(SHORT, length=1000) + b" " * 800
    with contextlib.ExitStack() as stack, server.client() as http:
        for _ in range(2):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            raw.sendall(almost)
        until = time.monotonic() + 10
        while (refused := http.post(TEXTS, json={**SHORT, "user": "x" * 600})).status_code == 200:
            assert time.monotonic() < until
        assert code_of(refused) == (503, "unavailable") and refused.headers["retry-after"]
        assert http.get("/health").status_code == 200
    with server.client() as http:  # they are gone, and their room is free
        while http.post(TEXTS, json={**SHORT, "user": "x" * 600}).status_code != 200:
            assert time.monotonic() < until


def test_texts_that_are_looked_at_end_with_their_client_and_in_time(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are scored, and what every loop says: beside the engine, one after another."""
    looks, may_end = 0, threading.Event()

    def look(*given: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        assert may_end.wait(60)
        raise looplm.UserError("seen")

    monkeypatch.setattr("looplm.serving.texts.prompt_scores", look)
    monkeypatch.setattr("looplm.serving.app.loop_views", look)
    scored = {"model": MODEL, "prompt": "x y", "max_tokens": 0, "echo": True, "logprobs": 1}
    viewed = {"model": MODEL, "prompt": "x y"}
    brief, server = serve(Limits(request_seconds=0.2)), serve()
    with brief.client() as http:
        for path, body in ((TEXTS, scored), ("/v1/loops", viewed)):
            assert code_of(http.post(path, json=body)) == (504, "timeout")
    with server.client() as http:
        with contextlib.ExitStack() as stack:
            for sent in [post_bytes(scored), post_bytes(viewed).replace(TEXTS.encode(), b"/v1/loops")] * 5:
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                raw.sendall(sent)
            until = time.monotonic() + 10
            while looks < 2 and time.monotonic() < until:
                time.sleep(0.01)
        ended = re.compile(r'http_requests_total\{path="/v1/(?:completions|loops)",.*\} (\d+)')
        while sum(map(int, ended.findall(http.get("/metrics").text))) < 10:
            assert time.monotonic() < until
        assert http.get("/health").status_code == 200  # by now the event loop has come round, and work is cancelled
        may_end.set()
        answer = http.post(TEXTS, json=scored)
        assert answer.status_code == 400 and "seen" in answer.text
    assert looks == 3  # of each server the first, and the last one


def test_an_answer_may_take_too_long(serve: Callable[..., Any]) -> None:
    server = serve(Limits(request_seconds=0.2))
    with server.client() as http:
        assert code_of(http.post(TEXTS, json=LONG)) == (504, "timeout")
        with http.stream("POST", TEXTS, json={**LONG, "stream": True}) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_place(server: Any, stream: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(post_bytes({**LONG, "n": 2, "stream": stream}))
        until = time.monotonic() + 10
        while not server.worker.engine.num_unfinished and time.monotonic() < until:
            time.sleep(0.005)
        if stream:
            assert raw.recv(100)
        assert server.worker.open_samples == 2
    assert server.idle(5)
    assert server.worker.engine.stats.generated_tokens < 10**6


def test_a_client_that_takes_nothing_is_cut_off(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.3)
    server = serve()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        # One answer larger than what the system keeps for a client.
        body = {"model": MODEL, "prompt": "x " * 1000, "top": 20}
        raw.sendall(post_bytes(body).replace(TEXTS.encode(), b"/v1/loops"))
        assert select.select([raw], [], [], 60)[0]
        time.sleep(1.0)  # what the system has taken for it by now is all that it gets
        raw.settimeout(10)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                received += piece
        head, _, body_part = received.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert 0 < len(body_part) < length
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_a_stream_that_is_not_read_frees_its_place(
    serve: Callable[..., Any], make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.5)
    server = serve(engine=make_engine(max_batch=64), send_buffer=4096)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(post_bytes({**LONG, "n": 32, "stream": True}))
        assert select.select([raw], [], [], 60)[0]
        assert server.idle(60)
    assert server.worker.engine.stats.generated_tokens < 32 * 1000


def test_a_head_that_does_not_come_is_not_waited_for(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HEADER_SECONDS", 0.2)
    server = serve()
    for sent in (b"", b"GET / HT"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(sent)
            assert raw.recv(100) == b""
    with server.client() as http:  # a connection that is kept is expected to say something when it speaks again
        assert http.get("/health").status_code == http.get("/health").status_code == 200
        assert http.post(TEXTS, json={**LONG, "max_tokens": 40}).status_code == 200


@pytest.mark.parametrize(("grace_seconds", "signals"), [(0.3, 1), (1000, 2)])
def test_what_does_not_end_is_ended_when_the_server_stops(
    serve: Callable[..., Any], grace_seconds: float, signals: int
) -> None:
    """After its time, or at a second signal: clients are told, and those that do not care are cut off."""
    server = serve(grace_seconds=grace_seconds)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as stalled,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as whole,
        server.client() as http,
    ):
        stalled.sendall(post_bytes(SHORT, length=1000))  # the end of its body never comes
        whole.sendall(post_bytes(LONG))
        with http.stream("POST", TEXTS, json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            for _ in range(signals):
                server.stop()
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The server is shutting down."
        assert whole.recv(20).startswith(b"HTTP/1.1 503")
        with contextlib.suppress(ConnectionResetError):
            assert stalled.recv(20) == b""
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_a_thousand_connections(server: Any) -> None:
    sockets.allow_many_connections()
    many = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(1000)]
    try:
        with server.client() as http:
            assert http.post(TEXTS, json=SHORT).status_code == 200
        request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        for one in many:
            one.sendall(request)
        assert all(one.recv(12) == b"HTTP/1.1 200" for one in many)
    finally:
        for one in many:
            one.close()
