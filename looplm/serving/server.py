"""Sockets: uvicorn with clients that are too slow cut off, and a shutdown that lets texts end."""

import resource
import socket
from asyncio import TimerHandle, Transport

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from looplm.errors import UserError

HEADER_SECONDS = 20.0
"""For the head of a request to come in, counted from its first byte or from the connection."""
STALL_SECONDS = 30.0
"""A client that takes nothing of what is sent for so long is cut off."""
GRACE_SECONDS = 30
"""For running texts to end after a signal to stop."""


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

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; port 0 takes a free one. Raises UserError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"Cannot listen at {host}, port {port}: {error}. Choose another --port or --host.") from None
    return listener


def build_server(app: FastAPI, *, log_level: str = "warning") -> uvicorn.Server:
    """A uvicorn server for `app`; `run(sockets=[...])` serves until a signal, and lets running texts end."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


def allow_many_connections() -> None:
    """Every connection is a file: allows this process as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
