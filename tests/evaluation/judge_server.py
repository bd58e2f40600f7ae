"""A judge that answers as a test tells it to, well or badly, on a port of this machine."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behave = Callable[[dict[str, Any], int], str]
"""From a request and how often the same was asked before to "score N", "say TEXT", "status N", "slow", "drip", "drop",
"away"."""


class JudgeServer:
    """What was asked, in order, and where."""

    def __init__(self, behave: Behave) -> None:
        self.behave, self.requests, self.headers = behave, [], []
        self.lock, self.done = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    before = judge.requests.count(body)
                    judge.requests.append(body)
                    judge.headers.append(dict(self.headers))
                kind, _, value = judge.behave(body, before).partition(" ")
                with suppress(OSError):  # the other side may have gone
                    self.answer(kind, value)

            def do_GET(self) -> None:  # whoever follows a redirect
                with judge.lock:
                    judge.requests.append({})
                    judge.headers.append(dict(self.headers))
                self.send_error(404)

            def answer(self, kind: str, value: str) -> None:
                if kind == "drop":
                    return
                if kind == "slow":
                    judge.done.wait(5)
                    return
                if kind in ("status", "away"):
                    said = f"refused {self.headers.get('Authorization')}".encode()
                    self.send_response(int(value) if kind == "status" else 302)
                    self.send_header("Location", value)
                    self.send_header("Retry-After", "0")
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)
                    return
                text = f'Because.\n{{"score": {value}}}' if kind in ("score", "drip") else value
                content = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                for i in range(0, len(content), 4):
                    self.wfile.write(content[i : i + 4])
                    if kind == "drip":
                        time.sleep(0.05)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def judge_server(behave: Behave) -> Iterator[JudgeServer]:
    """A judge that listens inside the block."""
    judge = JudgeServer(behave)
    thread = threading.Thread(target=judge.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield judge
    finally:
        judge.done.set()
        judge.server.shutdown()
        thread.join()
        judge.server.server_close()
