"""What stands before the routes: key, host, rate, size and time of a request's body, and counts of requests."""

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from looplm.serving.errors import ApiError
from looplm.serving.metrics import Metrics

OPEN_PATHS = ("/", "/health")
"""Need no key."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DRAINED = 16
"""A body up to so many times too large is read to its end, so that the client gets to read the answer."""
MOST_CLIENTS = 4096
"""Clients whose rate is remembered."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server allows."""

    api_key: str | None = None
    max_body: int = 2_000_000
    """Bytes."""
    body_seconds: float = 30.0
    """For the body to come in."""
    request_seconds: float = 600.0
    """For a whole answer, the wait for a place included."""
    requests_per_minute: int | None = None
    """Of one client address; None: as many as it likes."""
    max_requests: int = 2048
    """Requests that are open at one time, running or waiting."""
    max_large: int = 64
    """Bodies of `max_body` that are in memory at one time; smaller ones count by their size."""
    loopback_only: bool = True
    """Whether requests must be addressed to this machine by a loopback name: a page on another site could otherwise
    reach a server without a key through a name that it points here."""


class RateLimit:
    """At most `per_minute` requests of one client, as a bucket that fills again at that rate."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_for(self, client: str) -> float:
        """Takes one request out of the client's bucket; seconds until there is one when it is empty, 0 when not."""
        now = self._clock()
        left, then = self._buckets.get(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        if len(self._buckets) >= MOST_CLIENTS:
            full_after = 60.0
            self._buckets = {c: b for c, b in self._buckets.items() if now - b[1] < full_after}
        if left < 1:
            self._buckets[client] = (left, now)
            return (1 - left) * 60 / self.per_minute
        self._buckets[client] = (left - 1, now)
        return 0.0


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        rate = limits.requests_per_minute
        self._rate = None if rate is None else RateLimit(rate)
        self._open = 0
        self._held = 0
        """Bytes of bodies of open requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what is refused, and passes on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        kept: list[bytes] = []

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._open += 1
        try:
            try:
                self._check(scope)
                await self.app(scope, await self._body(scope, receive, kept), noting)
            except ApiError as error:
                await error.response()(scope, receive, noting)
        finally:
            self._open -= 1
            self._held -= sum(map(len, kept))
            self.metrics.request(scope["path"], status, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError for a request that is refused before its body is read."""
        headers = {name: value for name, value in scope["headers"]}
        # HTTP/1.0 needs no name, and no browser speaks it.
        host = headers.get(b"host", b"localhost" if scope["http_version"] == "1.0" else b"")
        if self.limits.loopback_only and _host(host) not in LOOPBACK:
            raise ApiError(403, "This server answers only to localhost. Start it with --host to open it to others.")
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        key = self.limits.api_key
        if key is not None and not _has_key(headers.get(b"authorization", b""), key):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                headers={"www-authenticate": "Bearer"},
            )
        if self._open > self.limits.max_requests:
            raise ApiError(503, f"{self._open - 1} requests are open; try again later.", headers={"retry-after": "1"})
        if self._rate is not None and scope["path"].startswith("/v1/"):
            client = scope["client"][0] if scope.get("client") else ""
            wait = self._rate.wait_for(client)
            if wait:
                raise ApiError(
                    429,
                    f"More than {self._rate.per_minute} requests a minute; try again in {wait:.1f} seconds.",
                    headers={"retry-after": str(int(wait) + 1)},
                )

    async def _body(self, scope: Scope, receive: Receive, kept: list[bytes]) -> Receive:
        """Reads the body whole; returns a `receive` that gives it. Raises ApiError when it is too large or slow.

        kept: what is in memory of it goes there, and counts for as long as the request is open.
        """
        headers = {name: value for name, value in scope["headers"]}
        size, limit = 0, self.limits.max_body
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > DRAINED * limit:
            raise self._too_large()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return _giving(message, receive)
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > DRAINED * limit:
                        raise self._too_large()
                    if size <= limit:
                        if self._held + len(piece) > self.limits.max_large * limit:
                            raise ApiError(503, "Too much is being sent at one time; try again later.", headers=LATER)
                        kept.append(piece)
                        self._held += len(piece)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(
                408, f"The body did not come in within {self.limits.body_seconds:g} seconds.", headers=CLOSE
            ) from None
        if size > limit:
            raise self._too_large()
        kept[:] = [b"".join(kept)]
        return _giving({"type": "http.request", "body": kept[0], "more_body": False}, receive)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than the {self.limits.max_body} bytes allowed.", headers=CLOSE)


CLOSE = {"connection": "close"}
LATER = {**CLOSE, "retry-after": "1"}


def _giving(message: Message, receive: Receive) -> Receive:
    """A `receive` that gives `message` first."""
    waiting = [message]

    async def give() -> Message:
        return waiting.pop() if waiting else await receive()

    return give


def _has_key(header: bytes, key: str) -> bool:
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())


def _host(header: bytes) -> str:
    """The name in a Host header, without port and brackets."""
    name = header.decode("latin-1").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]
