"""`looplm serve` and `looplm chat`: the same text as `looplm generate`, a server that ends well, what is refused."""

import contextlib
import copy
import io
import json
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

import looplm
from looplm.cli import chat
from looplm.cli import main as cli
from looplm.cli.main import app
from looplm.hf.checkpoint import find_checkpoint
from looplm.serving.server import listen, reserve

MODEL = "stdlib-small"
PROMPT = "def main("


def invoke(*arguments: str, said: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=said, catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ([], {}),
        (["--num-loops", "2"], {"num_loops": 2}),
        (["--exit-threshold", "0.9"], {"exit_threshold": 0.9}),
        (["--exit", "stable:1"], {"exit": "stable:1"}),
        (["--num-loops", "4", "--draft-loops", "1"], {"num_loops": 4, "draft_loops": 1}),
        (["--temperature", "0.8", "--seed", "4"], {"temperature": 0.8, "seed": 4}),
    ],
)
def test_the_text_is_that_of_generate(http: httpx.Client, options: list[str], extra: dict[str, Any]) -> None:
    told = invoke("generate", MODEL, "--prompt", PROMPT, "--max-tokens", "12", "--dtype", "fp32", *options)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **extra}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert told.stdout == f"{PROMPT}{choice['text']}\n"


@contextlib.contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`looplm serve` as users start it, and its address."""
    command = [sys.executable, "-m", "looplm", "serve", MODEL, "--port", "0", "--dtype", "fp32", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert select.select([started.stdout], [], [], 120)[0], "the server does not come up"
            line = started.stdout.readline()
            yield started, line.rsplit(" ", 1)[1].strip()
        finally:
            started.kill()


def test_a_server_lets_texts_end_when_it_is_told_to() -> None:
    with process("--model-name", "mine") as (started, url):
        body = {"model": "mine", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            first = next(lines)
            started.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert started.wait(30) == 128 + signal.SIGTERM
        assert started.stderr is not None and "Traceback" not in started.stderr.read()


def test_what_serve_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["looplm", "serve", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Choose another --port" in refused("--port", str(taken.getsockname()[1]))
    assert "Cannot listen at nowhere.invalid" in refused("--host", "nowhere.invalid")
    assert "--kv-cache is 'all'" in refused("--kv-cache", "all")
    assert "nothing-here" in refused("nothing-here", "--port", "0")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "looplm.serving.server")
    assert "pip install 'looplm[serve]'" in refused("--port", "0")


def test_of_two_that_reserve_a_port_one_listens() -> None:
    """While a checkpoint is loaded nobody listens yet, so that a second server gets as far as this."""
    with reserve("127.0.0.1", 0) as first, reserve("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(looplm.UserError, match="Choose another --port"):
            listen(second)


def test_chat_with_a_server_is_chat_with_the_checkpoint(server: Any) -> None:
    said = "Open a file\nAnd close it\n/new\nOpen a file\n/exit\nnever said\n"
    options = ["--max-tokens", "8", "--num-loops", "3"]
    remote = invoke("chat", server.url, *options, said=said)
    local = invoke("chat", MODEL, "--dtype", "fp32", *options, said=said)
    assert remote.exit_code == local.exit_code == 0
    assert remote.stdout == local.stdout
    begun = invoke("chat", server.url, *options, said="Open a file\n").stdout
    # The first answer, a second that knows of it, and after /new the first again.
    assert remote.stdout.startswith(begun) and remote.stdout.endswith(begun)
    assert len(remote.stdout) > 2 * len(begun) > 2


def test_chat_shows_depth(server: Any) -> None:
    shown = invoke("chat", server.url, "--max-tokens", "6", "--num-loops", "2", "--show-depth", said="Hi\n")
    assert shown.stdout.count("²") == 7 and "loop 2" in shown.stdout


def test_what_chat_refuses(
    server: Any, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from looplm.serving.limits import Limits

    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["looplm", "chat", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(chat, "GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no looplm server" in refused(url)
    assert "no looplm server" in refused(url)
    assert "Invalid port" in refused("http://[::1")
    for address in ("127.0.0.1:8000", "localhost:8000/v1", "[::1]:8000"):
        assert f"write http://{address}" in refused(address)
    monkeypatch.setattr(chat, "GREETING_SECONDS", 30)
    locked = serve(Limits(api_key="secret"))
    assert "API key" in refused(locked.url, "--api-key", "wrong")
    assert "give one of them" in refused(server.url, "--num-loops", "1", "--exit", "kl:1")
    # What is wrong with one message is said, and the conversation goes on.
    went_on = invoke("chat", server.url, "--max-tokens", "99999", said="Hi\n/exit\n")
    assert went_on.exit_code == 0 and "2048 positions" in went_on.stderr
    assert invoke("chat", server.url, "--exit", "never", said="Hi\n").stderr.count("hidden-diff:EPS") == 1


def test_a_server_that_goes_away_midway_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    event = {"choices": [{"delta": {"content": "half"}, "finish_reason": None, "loops": [1]}]}
    answers = [
        head + f"Content-Length: {len(models)}\r\n\r\n".encode() + models,
        head + b"Content-Length: 9999\r\n\r\ndata: " + json.dumps(event).encode() + b"\n\n",
    ]
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
        told = invoke("chat", f"http://127.0.0.1:{listener.getsockname()[1]}", said="Hi\n/exit\n")
        thread.join(30)
    assert told.exit_code == 0 and told.stdout.startswith("half") and "did not answer to the end" in told.stderr


def test_without_a_template_there_is_no_chat(
    serve: Callable[..., Any], model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    server = serve(engine=looplm.Engine(model, plain))
    with server.client() as http:
        assert http.get("/v1/models").json()["data"][0]["chat"] is False
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "no chat template" in refused.json()["error"]["message"]
    assert "no chat template" in invoke("chat", server.url, said="Hi\n").stderr
    checkpoint = shutil.copytree(find_checkpoint(MODEL), tmp_path / "plain")
    plain.save_pretrained(checkpoint)
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    assert "no chat template" in invoke("chat", str(checkpoint), said="Hi\n").stderr


def test_the_page_ships() -> None:
    import looplm.serving

    page = Path(next(iter(looplm.serving.__path__))) / "page.html"
    text = page.read_text("utf-8")
    assert "http://" not in text and "https://" not in text and "<script src" not in text
