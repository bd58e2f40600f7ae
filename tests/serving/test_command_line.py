"""`looplm serve`: the same text as `looplm generate`, a server that ends well, what is refused."""

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

import looplm
from looplm.cli import main as cli
from looplm.cli.main import app
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
    for option, values in {
        "--max-batch": ("1000000000", "0"),
        "--max-queue": ("1000000000",),
        "--rate-limit": ("9" * 400,),
        "--memory-gb": ("1e300", "inf", "nan", "0"),
        "--max-body-mb": ("inf", "nan"),
        "--timeout": ("inf", "nan"),
        "--api-key": ("", " x", "a\nb", "\udcff"),
        "--host": ("", "a..b"),
        "--model-name": ("", " "),
        "--cors-origin": ("notaurl", "https://a.example/", "https://A.example", "", "https://"),
    }.items():
        for value in values:
            said = refused(option, value, *(() if option == "--host" else ("--port", "0")))
            assert option in said and "Traceback" not in said, (option, value)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "looplm.serving.server")
    assert "pip install 'looplm[serve]'" in refused("--port", "0")


def test_an_empty_key_of_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell script whose variable is empty: nothing was said."""
    monkeypatch.setenv("LOOPLM_API_KEY", "")
    with pytest.raises(looplm.UserError, match="nothing-here"):
        invoke("serve", "nothing-here", "--port", "0", "--cors-origin", "*", "--cors-origin", "http://[::1]:3000")


def test_of_two_that_reserve_a_port_one_listens() -> None:
    """While a checkpoint is loaded nobody listens yet, so that a second server gets as far as this."""
    with reserve("127.0.0.1", 0) as first, reserve("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(looplm.UserError, match="Choose another --port"):
            listen(second)


def test_the_page_ships() -> None:
    import looplm.serving

    page = Path(next(iter(looplm.serving.__path__))) / "page.html"
    text = page.read_text("utf-8")
    assert "http://" not in text and "https://" not in text and "<script src" not in text
