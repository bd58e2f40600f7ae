"""Clients for `serve_load.py`: streams that look at what they get, and clients that misbehave. None waits for ever."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 120.0
"""Seconds that a client waits for all of an answer."""
CROWD = 1000
"""Connections at one time, in the run with rough clients."""
ROUGH = ("vanish early", "vanish midway", "stall", "send garbage", "send bad JSON", "stop sending", "send 10 MB")


@dataclass(frozen=True)
class Job:
    """A request, and what comes back when it runs alone."""

    body: dict[str, Any]
    text: str
    token_ids: list[int]
    loops: list[int]


@dataclass
class Tally:
    """What has been seen."""

    streams: int = 0
    tokens: int = 0
    mistakes: list[str] = field(default_factory=list)
    """Texts, tokens or depths other than alone, and streams that did not end as they should."""
    rough: dict[str, int] = field(default_factory=dict)
    crowd: str = "none"
    """How many of CROWD connections were answered, and within what time."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    between: list[float] = field(default_factory=list)
    """Seconds from one event to the next."""
    whole: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that the server holds, and how many of them are room for keys, values and states; once a second."""
    seconds: float = 0.0


def request_bytes(body: dict[str, Any], length: int | None = None) -> bytes:
    """A request over a connection of its own. length: what it says of its size, if not the truth."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, closed at the end whatever happens, and after PATIENCE at the latest: TimeoutError then."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]. Raises ValueError for another answer, or one that is cut short."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise ValueError(f"status {status!r}: {(await reader.read())[-300:]!r}")
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise ValueError("the stream was cut short")


async def stream(port: int, job: Job, tally: Tally) -> None:
    """One stream, compared with the text alone."""
    begun = last = time.perf_counter()
    text, token_ids, loops = "", [], []
    final: dict[str, Any] = {}
    try:
        async with connected(port) as (reader, writer):
            writer.write(request_bytes(job.body))
            async for event in events(reader):
                now = time.perf_counter()
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                (tally.between if token_ids else tally.first).append(now - last)
                last = now
                choice = event["choices"][0]
                text += choice["text"]
                if choice["finish_reason"]:
                    final = choice
                else:
                    token_ids += choice["token_ids"]
                    loops += choice["loops"]
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        tally.mistakes.append(f"{job.body}: {type(error).__name__} {error}")
        return
    if (text, token_ids, loops) != (job.text, job.token_ids, job.loops) or final.get("token_ids") != token_ids:
        tally.mistakes.append(f"{job.body}: {text!r} {loops}, alone {job.text!r} {job.loops}")
    tally.streams += 1
    tally.tokens += len(token_ids)
    tally.whole.append(time.perf_counter() - begun)


async def misbehave(port: int, job: Job, draw: random.Random, tally: Tally) -> None:
    """A client that vanishes, stalls, or sends what is no request."""
    kind = draw.choice(ROUGH)
    tally.rough[kind] = tally.rough.get(kind, 0) + 1
    sent = request_bytes({**job.body, "max_tokens": 400, "ignore_eos": True, "n": draw.choice((1, 2))})
    with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
        async with connected(port) as (reader, writer):
            if kind == "send garbage":
                sent = draw.randbytes(draw.randrange(1, 5000)) + b"\r\n\r\n"
            elif kind == "send bad JSON":
                sent = sent.replace(b'"max_tokens": 400', b'"max_tokens": 4e', 1)
            elif kind == "stop sending":
                sent = sent[: draw.randrange(1, len(sent))]
            elif kind == "send 10 MB":
                sent = request_bytes({}, length=10**7) + b" " * (10**7 - 2)
            writer.write(sent)
            await writer.drain()
            if kind == "vanish midway":
                await reader.readexactly(draw.randrange(100, 4000))
            elif kind in ("stall", "stop sending"):
                await asyncio.sleep(draw.uniform(0.5, 3))
            elif kind.startswith("send"):
                status = await asyncio.wait_for(reader.readline(), 5)
                if not status.startswith(b"HTTP/1.1 4"):
                    tally.mistakes.append(f"to those who {kind} the server says {status!r}")
            writer.transport.abort()


async def crowd(port: int, tally: Tally) -> None:
    """CROWD connections at one time, each of which is answered."""
    begun = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(connected(port)) for _ in range(CROWD)]
        for _, writer in pairs:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        statuses = [await reader.readline() for reader, _ in pairs]
    answered = sum(status.startswith(b"HTTP/1.1 200") for status in statuses)
    tally.crowd = f"{answered:,} of {CROWD:,} in {time.perf_counter() - begun:.1f} s"
    if answered < CROWD:
        tally.mistakes.append(f"connections answered: {tally.crowd}")
