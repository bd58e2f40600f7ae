"""Servers on real sockets, over the checkpoint that ships, in float32: batch-mates do not change its texts there."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import looplm
from looplm.serving.app import create_app
from looplm.serving.limits import Limits
from looplm.serving.server import build_server, listen, reserve
from looplm.serving.worker import EngineWorker

MODEL = "stdlib-small"
LONGEST = 300
"""Seconds that a test may take. None takes nearly as long; a server that no longer answers must not hang the suite."""


@dataclass(frozen=True)
class Running:
    """A server that is up."""

    url: str
    port: int
    worker: EngineWorker
    thread: threading.Thread
    stop: Callable[[], None]
    """As a signal does; a second one as a second signal."""

    def check(self) -> None:
        """Fails the test when the server is no longer up."""
        assert self.thread.is_alive(), "the server's thread has ended"
        assert self.worker.alive, "the engine's thread has ended"

    def client(self, **options: Any) -> httpx.Client:
        """Plain HTTP."""
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    def idle(self, seconds: float = 10.0) -> bool:
        """Whether the engine has nothing left to do, within some seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.check()
            if not self.worker.engine.num_unfinished and not self.worker.open_samples:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def running(
    engine: looplm.Engine,
    limits: Limits | None = None,
    send_buffer: int | None = None,
    grace_seconds: float = 1.0,
    **options: Any,
) -> Iterator[Running]:
    """Serves `engine` on a free port, in a thread of this process. send_buffer: bytes that the system keeps for a
    client that does not take them."""
    app = create_app(engine, model_name=MODEL, limits=limits or Limits(), **options)
    listener = reserve("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listen(listener)
    port = listener.getsockname()[1]
    uvicorn_server = build_server(app, log_level="critical", grace_seconds=grace_seconds)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not uvicorn_server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)

    def stop() -> None:
        uvicorn_server.handle_exit(signal.SIGTERM, None)

    try:
        yield Running(f"http://127.0.0.1:{port}", port, app.state.server.worker, thread, stop)
    finally:
        stop()
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def model() -> Any:
    return looplm.load(MODEL, dtype="fp32")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return looplm.load_tokenizer(MODEL)


@pytest.fixture(scope="session")
def make_engine(model: Any, tokenizer: Any) -> Callable[..., looplm.Engine]:
    """A new engine over the one model."""
    return lambda **options: looplm.Engine(model, tokenizer, **options)


@pytest.fixture(autouse=True)
def no_test_waits_for_ever() -> Iterator[None]:
    """Whatever a test waits for, it fails after five minutes, also in a client that has no time limit of its own."""

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"the test took more than {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def shared_server(make_engine: Callable[..., looplm.Engine]) -> Iterator[Running]:
    """Started once for a file."""
    with running(make_engine()) as up:
        yield up


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """A server without limits that a test would meet, for all tests of a file that leave it as it was."""
    shared_server.check()
    yield shared_server
    shared_server.check()


@pytest.fixture
def serve(make_engine: Callable[..., looplm.Engine]) -> Iterator[Callable[..., Running]]:
    """Starts servers of a test's own: `serve(limits, engine=..., max_waiting=...)`."""
    with ExitStack() as stack:

        def start(limits: Limits | None = None, engine: looplm.Engine | None = None, **options: Any) -> Running:
            return stack.enter_context(running(engine or make_engine(), limits, **options))

        yield start


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    """Plain HTTP to `server`, which a test must leave without work."""
    with server.client() as client:
        yield client
    assert server.idle()
