"""Clients that go: answers and streams whose work ends with them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

Result = TypeVar("Result")


class EventStream(StreamingResponse):
    """Server-sent events. `at_end` is called however it ends: whole, with a client that is gone, or with a failure."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._at_end = at_end

    async def stream_response(self, send: Send) -> None:
        """Sends all of it."""
        try:
            await super().stream_response(send)
        finally:
            self._at_end()


class ClientGone(Exception):
    """Nobody is there to be answered."""


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGone then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        doing.cancel()
        watching.cancel()
