"""Sockets: uvicorn with clients that are too slow cut off, and a shutdown that lets texts end."""

import asyncio
import resource
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from looplm.errors import UserError
from looplm.serving.errors import ApiError

HEADER_SECONDS = 20.0
"""For the head of a request to come in, counted from its first byte or from the connection."""
STALL_SECONDS = 30.0
"""A client that takes nothing of what is sent for so long is cut off."""
BACKLOG = 2048
"""Connections that wait to be taken."""
GRACE_SECONDS = 30.0
"""For running texts to end after a signal to stop; a second signal ends them at once."""
LAST_WORDS_SECONDS = 1.0
"""For clients to be told that their text was ended. Whoever is still there then is cut off."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that waits for a slow client, but not for ever."""

    _head: TimerHandle | None = None
    _stall: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Expects the head of a request."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Expects the rest of a head that has begun to come in."""
        if self._head is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets all timers."""
        self._forget_head()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """What was sent is not being taken."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It is again."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, as all errors are answered."""
        answer = ApiError(400, msg, headers={"connection": "close"}).response()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # or something has been answered already
            headers = list(answer.raw_headers)
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Never: what asks for WebSockets is answered over HTTP. uvicorn would say how to install them."""
        return False

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def reserve(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; port 0 takes a free one. Raises UserError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """From now on clients can connect; they wait until the server runs. Raises UserError when another program has
    come first: two may reserve one port, and one may listen."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: Exception) -> UserError:
    return UserError(f"Cannot listen at {host}, port {port}: {error}. Choose another --port or --host.")


class PatientServer(uvicorn.Server):
    """Lets running texts end after a signal, but not for ever.

    end_texts: called on the event loop to end what still runs; clients are told why.
    """

    def __init__(self, config: uvicorn.Config, end_texts: Callable[[], None], grace_seconds: float) -> None:
        super().__init__(config)
        self._end_texts, self._grace_seconds, self._hurry = end_texts, grace_seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: stops the server, a second one at once. uvicorn would drop everything then, the log full of it."""
        if self.should_exit:
            self._hurry = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for those there are."""
        waiting = asyncio.create_task(self._end_what_does_not_end())
        try:
            await super().shutdown(sockets)
        finally:
            waiting.cancel()

    async def _end_what_does_not_end(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_seconds
        while loop.time() < until and not self._hurry:
            await asyncio.sleep(0.1)
        self._end_texts()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, PatientProtocol)
            connection.transport.abort()


def build_server(app: FastAPI, *, log_level: str = "warning", grace_seconds: float = GRACE_SECONDS) -> uvicorn.Server:
    """A uvicorn server for an `app` of `create_app`; `run(sockets=[...])` serves until a signal, and lets running
    texts end."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        backlog=BACKLOG,
        log_level=log_level,
        access_log=False,
        server_header=False,
    )
    return PatientServer(config, app.state.server.worker.stop, grace_seconds)


def allow_many_connections() -> None:
    """Every connection is a file: allows this process as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
