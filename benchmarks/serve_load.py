"""`looplm serve` under load: every text compared with itself alone, with and without clients that misbehave.

    python benchmarks/serve_load.py                           # two minutes of load, two with rough clients
    python benchmarks/serve_load.py --seconds 10 --streams 8  # to see that it runs

Streams of mixed length, depth, policy, drafts and temperature run against a server in a process of its own. What each
should say has been computed first, one text at a time, by an engine in this process, in float64, where a text does
not depend on its batch-mates at all. Prints one table of latency, throughput and memory, and one of the cost of the
HTTP layer as ratios to the engine alone. Nothing waits for ever: a server that stops answering ends it with an error.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import looplm

PROMPTS = (
    "def main(",
    "import os\n",
    "class Reader:\n    def __init__(self, path):\n",
    "# Returns the length of the ",
    "for line in file:\n    if not line:\n",
    "try:\n    value = int(text)\nexcept ",
    '"""Read a file, line by line.\n\n',
    "x",
)
DEPTHS: tuple[dict[str, Any], ...] = (
    {},
    {"num_loops": 1},
    {"num_loops": 2},
    {"num_loops": 4},
    {"exit_threshold": 0.6},
    {"exit_threshold": 0.9},
    {"exit": "stable:1"},
    {"exit": "hidden-diff:3"},
    {"num_loops": 4, "draft_loops": 1, "draft_tokens": 2},
)
LENGTHS = (1, 3, 8, 16, 32, 64)
PATIENCE = 120.0
"""Seconds that a client waits for all of an answer."""
MOST_MISTAKES = 100
"""After so many a run is over: the server is broken, or gone."""
CROWD = 1000
"""Connections at one time, in the run with rough clients."""


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


# --- What should come back ------------------------------------------------------------------------------------------


def submit(engine: looplm.Engine, body: dict[str, Any]) -> Any:
    """The one request of a body, put into an engine."""
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.schema import CompletionRequest

    read = CompletionRequest(**body)
    exit = exit_of(read, engine.model.model.config.num_loops)
    sampling = read.sampling(body["max_tokens"])
    (request,) = engine.submit(body["prompt"], sampling, exit, speculation=speculation_of(read))
    return request


def make_jobs(engine: looplm.Engine, model_name: str, count: int, seed: int = 0) -> list[Job]:
    """Jobs of every kind, each run alone."""
    draw = random.Random(seed)
    jobs = []
    for number in range(count):
        body = {
            "model": model_name,
            "prompt": draw.choice(PROMPTS),
            "max_tokens": draw.choice(LENGTHS),
            "temperature": draw.choice((0, 0, 0.8)),
            "seed": number,
            "stream": True,
            "return_depths": True,
            **DEPTHS[number % len(DEPTHS)],
        }
        request = submit(engine, body)
        while request.finish_reason is None:
            engine.step()
        result = engine.result(request)
        jobs.append(Job(body, result.text or "", result.token_ids, result.loops))
    return jobs


# --- Clients --------------------------------------------------------------------------------------------------------


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


ROUGH = ("vanish early", "vanish midway", "stall", "send garbage", "send bad JSON", "stop sending", "send 10 MB")


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


async def load(
    port: int,
    jobs: Sequence[Job],
    *,
    streams: int,
    seconds: float,
    rough: int = 0,
    crowded: bool = False,
    pid: int | None = None,
    seed: int = 0,
) -> Tally:
    """`streams` clients, one stream after another each, and `rough` that misbehave, for some seconds."""
    tally, begun = Tally(), time.perf_counter()

    def left() -> bool:
        return time.perf_counter() - begun < seconds and len(tally.mistakes) < MOST_MISTAKES

    async def client(draw: random.Random) -> None:
        while left():
            await stream(port, draw.choice(jobs), tally)
        tally.seconds = time.perf_counter() - begun  # that of the last; rough clients may take longer

    async def rough_client(draw: random.Random) -> None:
        while left():
            await misbehave(port, draw.choice(jobs), draw, tally)
            await asyncio.sleep(draw.uniform(0, 0.5))

    async def watch() -> None:
        while left() and pid is not None:
            tally.memory.append((resident(pid), await room(port)))
            await asyncio.sleep(min(1.0, seconds / 8))

    async def come_at_once() -> None:
        if crowded:
            await asyncio.sleep(seconds / 2)
            await crowd(port, tally)

    clients = [client(random.Random(seed + i)) for i in range(streams)]
    clients += [rough_client(random.Random(seed - 1 - i)) for i in range(rough)]
    await asyncio.gather(watch(), come_at_once(), *clients)
    return tally


# --- The server -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(checkpoint: str, max_batch: int, memory_gb: float) -> Iterator[tuple[int, int]]:
    """`looplm serve` in a process of its own: its port and process id. It must end when it is asked to."""
    command = [sys.executable, "-m", "looplm", "serve", checkpoint, "--port", "0", "--dtype", "fp64"]
    command += ["--max-batch", str(max_batch), "--max-queue", "512", "--memory-gb", str(memory_gb)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            raise TimeoutError("the server does not come up")
        said = process.stdout.readline()
        yield int(said.split("/v1;")[0].rsplit(":", 1)[1]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            print(f"\nThe server ended with status {process.wait(60)} after SIGTERM.")
        except subprocess.TimeoutExpired:
            process.kill()
            raise


async def ask(port: int, path: str) -> str:
    """The body of a plain answer."""
    async with connected(port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).decode().partition("\r\n\r\n")[2]


async def metrics(port: int) -> dict[str, float]:
    """The server's counts by name, those without labels."""
    lines = [line.split() for line in (await ask(port, "/metrics")).splitlines() if line.startswith("looplm_")]
    return {name: float(value) for name, value in lines if "{" not in name}


async def room(port: int) -> int:
    """Bytes that the engine has taken for keys, values and states."""
    counts = await metrics(port)
    return int(counts["looplm_cache_bytes"] + counts["looplm_state_bytes"])


def resident(pid: int) -> int:
    """Bytes of memory that a process holds (Linux)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def processor_seconds(pid: int) -> float:
    """Processor time that a process has had (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- The cost of HTTP -----------------------------------------------------------------------------------------------


def compare(port: int, pid: int, engine: looplm.Engine, model_name: str, rounds: int) -> dict[str, list[float]]:
    """One client, the server and the engine alone in turn: seconds to the first token, of a whole text, and of
    processor time, which other work on the machine does not change; of both, medians."""
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ("first token", "whole text", "processor time")}
    body = {"model": model_name, "prompt": PROMPTS[0], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    body |= {"num_loops": 4, "stream": True}
    params = looplm.SamplingParams(max_tokens=64, ignore_eos=True)

    async def over_http() -> tuple[float, float]:
        begun, first = time.perf_counter(), 0.0
        async with connected(port) as (reader, writer):
            writer.write(request_bytes(body))
            async for _ in events(reader):
                first = first or time.perf_counter() - begun
        return first, time.perf_counter() - begun

    def alone() -> tuple[float, float]:
        begun, first = time.perf_counter(), 0.0
        for _ in engine.stream(body["prompt"], params, looplm.FixedDepth(4)):
            first = first or time.perf_counter() - begun
        return first, time.perf_counter() - begun

    for _ in range(rounds):
        used = processor_seconds(pid)
        http = *asyncio.run(over_http()), processor_seconds(pid) - used
        used = time.process_time()
        own = *alone(), time.process_time() - used
        for name, *pair in zip(times, http, own, strict=True):
            for values, value in zip(times[name], pair, strict=True):
                values.append(value)
    return {name: [statistics.median(values) for values in pair] for name, pair in times.items()}


def time_per_token(engine: looplm.Engine, jobs: Sequence[Job], streams: int, seconds: float) -> float:
    """Processor seconds for a token of the engine alone with so many jobs always in it, measured over `seconds`."""
    draw, running = random.Random(0), []
    tokens, begun = engine.stats.generated_tokens, time.process_time()
    while time.process_time() - begun < seconds:
        running += [submit(engine, draw.choice(jobs).body) for _ in range(streams - len(running))]
        engine.step()
        running = [request for request in running if request.finish_reason is None]
    used = time.process_time() - begun
    engine.cancel(running)
    return used / (engine.stats.generated_tokens - tokens)


# --- Tables ---------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> str:
    """50, 90, 99 and 100 of 100, in milliseconds."""
    ordered = sorted(values)
    return ", ".join(
        f"{1000 * ordered[min(len(ordered) - 1, int(p * len(ordered)))]:,.0f}" for p in (0.5, 0.9, 0.99, 1)
    )


def quarters(values: Sequence[int]) -> str:
    """Medians of the four parts of a run, in megabytes."""
    size = max(1, len(values) // 4)
    return ", ".join(f"{statistics.median(values[i * size : (i + 1) * size] or values) / 1e6:,.0f}" for i in range(4))


def report(runs: dict[str, Tally], per_token: dict[str, float]) -> str:
    """The table of some runs. per_token: processor time of a token over that of the engine alone, of each run."""
    rows: dict[str, list[str]] = {}
    for name, tally in runs.items():
        held, kept = zip(*tally.memory, strict=True) if tally.memory else ((), ())
        cells = {
            "streams": f"{tally.streams:,}",
            "tokens": f"{tally.tokens:,}",
            "tokens a second": f"{tally.tokens / tally.seconds:,.0f}",
            "mistakes: lost, mixed-up or other than alone": f"{len(tally.mistakes)}",
            "first token, ms: median, 90 %, 99 %, most": percentiles(tally.first),
            "between tokens, ms": percentiles(tally.between),
            "whole text, ms": percentiles(tally.whole),
            "memory of the server by quarters of the run, MB": quarters(held) if held else "-",
            "of it for keys, values and states, MB": quarters(kept) if kept else "-",
            "processor time of a token over the engine alone": f"{per_token[name]:.2f}" if name in per_token else "-",
            **{f"clients that {kind}": f"{tally.rough.get(kind, 0):,}" for kind in ROUGH},
            f"{CROWD:,} connections at one time, answered": tally.crowd,
        }
        for row, cell in cells.items():
            rows.setdefault(row, []).append(cell)
    lines = [f"| | {' | '.join(runs)} |", f"| --- |{' --- |' * len(runs)}"]
    lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items()]
    told = [mistake[:400] for tally in runs.values() for mistake in tally.mistakes[:5]]
    return "\n".join([*lines, *told])


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Put `looplm serve` under load.")
    parser.add_argument("--checkpoint", default="stdlib-small")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rough", type=int, default=24, help="clients that misbehave, in the second run")
    parser.add_argument("--seconds", type=float, default=120, help="of each run")
    parser.add_argument("--jobs", type=int, default=72, help="different requests")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--memory-gb", type=float, default=0.3, help="for keys, values and states of the server")
    parser.add_argument("--rounds", type=int, default=9, help="of the comparison with the engine alone")
    return parser.parse_args()


def main() -> None:
    """Runs all of it; exit status 1 when a text was not its own, or somebody was answered wrongly."""
    asked = arguments()
    model, tokenizer = looplm.load(asked.checkpoint, dtype="fp64"), looplm.load_tokenizer(asked.checkpoint)
    engine = looplm.Engine(model, tokenizer)
    jobs = make_jobs(engine, asked.checkpoint, asked.jobs)
    batch = looplm.Engine(model, tokenizer, max_batch=asked.max_batch, memory_bytes=int(asked.memory_gb * 1e9))
    runs: dict[str, Tally] = {}
    per_token: dict[str, float] = {}
    with server(asked.checkpoint, asked.max_batch, asked.memory_gb) as (port, pid):
        found = compare(port, pid, engine, asked.checkpoint, asked.rounds)
        for name, rough in ((f"{asked.streams} streams", 0), (f"beside {asked.rough} rough clients", asked.rough)):
            own = time_per_token(batch, jobs, asked.streams, asked.seconds / 8)
            used, before = processor_seconds(pid), asyncio.run(metrics(port))
            options = {"streams": asked.streams, "seconds": asked.seconds, "pid": pid}
            runs[name] = asyncio.run(load(port, jobs, rough=rough, crowded=rough > 0, **options))
            tokens = asyncio.run(metrics(port))["looplm_generated_tokens_total"]
            tokens -= before["looplm_generated_tokens_total"]
            per_token[name] = (processor_seconds(pid) - used) / tokens / own
        print(report(runs, per_token))
        print("\n| one client, median | over HTTP, ms | engine alone, ms | ratio |\n| --- | --- | --- | --- |")
        for name, (http, own) in found.items():
            print(f"| {name} | {1000 * http:.1f} | {1000 * own:.1f} | {http / own:.2f} |")
        print(f"\nThe server after that: {asyncio.run(ask(port, '/health'))}")
    raise SystemExit(1 if any(tally.mistakes for tally in runs.values()) else 0)


if __name__ == "__main__":
    main()
