"""`looplm chat`: the same with a checkpoint and with its server, and what it says of a partner that is neither."""

import copy
import io
import json
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import looplm
from looplm.cli import chat_server
from looplm.cli import main as cli
from looplm.cli.main import app
from looplm.hf.checkpoint import find_checkpoint
from looplm.serving.limits import Limits

MODEL = "stdlib-small"
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
MODELS = json.dumps({"data": [{"id": "m"}]}).encode()


def invoke(*arguments: str, said: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=said, catch_exceptions=False)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said of arguments with which no conversation begins."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["looplm", "chat", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        told = capsys.readouterr()
        assert told.out == "" and "> " not in told.err
        return told.err

    return run


@contextmanager
def impostor(*answers: bytes) -> Iterator[str]:
    """Something that gives these answers to whatever it is asked, one a connection: its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve_and_go() -> None:
            for answer in answers:
                with listener.accept()[0] as one:
                    one.settimeout(30)
                    one.recv(65536)
                    one.sendall(answer)

        thread = threading.Thread(target=serve_and_go, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def whole(content: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


# --- A conversation -------------------------------------------------------------------------------------------------


def test_chat_with_a_server_is_chat_with_the_checkpoint(server: Any) -> None:
    said = "Open a file\nAnd close it\n/new\nOpen a file\n/exit\nnever said\n"
    options = ["--max-tokens", "8", "--num-loops", "3"]
    remote = invoke(server.url, *options, said=said)
    local = invoke(MODEL, "--dtype", "fp32", *options, said=said)
    assert remote.exit_code == local.exit_code == 0
    assert remote.stdout == local.stdout
    begun = invoke(server.url, *options, said="Open a file\n").stdout
    # The first answer, a second that knows of it, and after /new the first again.
    assert remote.stdout.startswith(begun) and remote.stdout.endswith(begun)
    assert len(remote.stdout) > 2 * len(begun) > 2


def test_chat_shows_depth(server: Any) -> None:
    shown = invoke(server.url, "--max-tokens", "6", "--num-loops", "2", "--show-depth", said="Hi\n")
    assert shown.stdout.count("²") == 7 and "loop 2" in shown.stdout


def test_what_is_wrong_with_one_message_is_said_and_the_conversation_goes_on(server: Any) -> None:
    options = ["--max-tokens", "6"]
    alone = invoke(server.url, *options, said="Hi\n").stdout
    for partner in ([server.url], [MODEL, "--dtype", "fp32"]):
        told = invoke(*partner, *options, said=b"h\xff\n" + b"x " * 5000 + b"\nHi\n")
        assert told.exit_code == 0 and told.stdout.replace("\n", "") == alone.replace("\n", "")
        assert "The message is not valid Unicode text at character 1" in told.stderr
        assert "2048 positions" in told.stderr


def test_any_key_of_a_server_can_be_given(serve: Callable[..., Any]) -> None:
    server = serve(Limits(api_key="ä日"))
    assert invoke(server.url, "--api-key", "ä日", "--max-tokens", "2", said="Hi\n").exit_code == 0


def test_local_depth_has_no_server_s_limit() -> None:
    told = invoke(MODEL, "--num-loops", "9", "--max-tokens", "2", said="Hi\n")
    assert told.exit_code == 0 and "9 loops are more than the 4 this model was trained for" in told.stderr


# --- What cannot begin ----------------------------------------------------------------------------------------------


def test_who_is_no_server(
    refused: Callable[..., str], serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_server, "GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no looplm server" in refused(url)
    assert "no looplm server" in refused(url)
    assert "Invalid port" in refused("http://[::1")
    for address in ("127.0.0.1:8000", "localhost:8000/v1", "[::1]:8000"):
        assert f"write http://{address}" in refused(address)
    monkeypatch.setattr(chat_server, "GREETING_SECONDS", 30)
    assert "API key" in refused(serve(Limits(api_key="secret")).url, "--api-key", "wrong")
    for content in (b"<html>", b"\xff\xfe{", b"[]", b'"x"', b'{"data": {}}', b"[" * 100_000, b'{"data": [5]}'):
        with impostor(whole(content)) as url:
            assert "does not list models" in refused(url) or content == b'{"data": {}}'
    for content in (b'{"data": []}', b'{"data": [{"id": 5}]}'):
        with impostor(whole(content)) as url:
            assert "has no model" in refused(url)
    with impostor(b"HTTP/1.1 418 No\r\nConnection: close\r\n\r\n\xff") as url:
        assert "status 418" in refused(url)


def test_options_that_can_never_work(refused: Callable[..., str], server: Any) -> None:
    for partner in (server.url, MODEL):
        assert "--exit is 'zz'; give hidden-diff:EPS" in refused(partner, "--exit", "zz")
        assert "give one of them" in refused(partner, "--num-loops", "1", "--exit", "kl:1")
        assert "2048 positions" in refused(partner, "--max-tokens", "99999")
        assert "every token leaves at loop 2" in refused(partner, "--num-loops", "2", "--draft-loops", "2")
        assert "--system is not valid Unicode" in refused(partner, "--system", "\udcff")
    assert "at most 8" in refused(server.url, "--num-loops", "99")
    assert "has no model 'nope'; it has 'stdlib-small'" in refused(server.url, "--model", "nope")
    assert "--device and --dtype" in refused(server.url, "--device", "zz")
    assert "--device and --dtype" in refused(server.url, "--dtype", "fp32")
    assert "--model chooses" in refused(MODEL, "--model", "x")
    for key in ("", "a\nb", "\udcff"):
        assert "--api-key" in refused(server.url, "--api-key", key)


def test_without_a_template_there_is_no_chat(
    refused: Callable[..., str], serve: Callable[..., Any], model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    server = serve(engine=looplm.Engine(model, plain))
    with server.client() as http:
        assert http.get("/v1/models").json()["data"][0]["chat"] is False
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
    assert "no chat template" in refused(server.url)
    checkpoint = shutil.copytree(find_checkpoint(MODEL), tmp_path / "plain")
    plain.save_pretrained(checkpoint)
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    assert "no chat template" in refused(str(checkpoint))


# --- A server that is none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HEAD + b"Content-Length: 9999\r\n\r\n" + event(delta={"content": "half"}), "did not answer to the end"),
        (whole(event(delta={"content": "half"})), "did not answer to the end"),
        (whole(b""), "did not answer to the end"),
        (whole(b"data: {bad\n\n"), "no part of an answer: ' {bad'"),
        (whole(b"data: \xff\n\n"), "no part of an answer"),
        (whole(b'data: {"x": 1}\n\n'), "no part of an answer"),
        (whole(b"data: []\n\n"), "no part of an answer"),
        (whole(b"data: " + b"[" * 100_000 + b"\n\n"), "no part of an answer"),
        (whole(b'data: {"error": "boom\\u001b[2J"}\n\n'), "looplm: boom\\x1b[2J"),
        (whole(b'data: {"error": {"message": "boom"}}\n\n'), "looplm: boom"),
        (whole(b'data: {"error": {"message": 5}}\n\n'), "no part of an answer"),
        (whole(b'data: {"error": null}\n\n'), "no part of an answer"),
        (whole(event(index=0)), "no part of an answer"),
        (whole(event(delta={"content": 5})), "no part of an answer"),
        (whole(event(delta={"content": "x"}, loops=["a"])), "no part of an answer"),
        (whole(event(delta={"content": "x"}, loops=[10**9])), "no part of an answer"),
        (b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n\xff\xfe{", "status 500"),
        (b'HTTP/1.1 400 No\r\nConnection: close\r\n\r\n{"error": {"message": "because"}}', "looplm: because"),
    ],
)
def test_what_is_no_answer_is_said(answer: bytes, said: str) -> None:
    with impostor(whole(MODELS), answer) as url:
        told = invoke(url, "--show-depth", said="Hi\n")
    assert told.exit_code == 0 and said in told.stderr
    assert told.stdout.strip() == ("half" if b"half" in answer else "")


def test_a_terminal_is_not_told_what_to_do() -> None:
    """And what no terminal can show is still an answer."""
    hostile = whole(event(delta={"content": "hi\x1b[2J\x9b\ud83d\n"}) + b"data: [DONE]\n\n")
    with impostor(whole(MODELS), hostile, hostile) as url:
        told = invoke(url, said="Hi\nHi\n")
    assert told.exit_code == 0 and told.stdout.split() == ["hi\\x1b[2J\\x9b?"] * 2
