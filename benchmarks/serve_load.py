"""`looplm serve` under load: every text compared with itself alone, with and without clients that misbehave.

    python benchmarks/serve_load.py                           # two minutes of load, two with rough clients
    python benchmarks/serve_load.py --seconds 10 --streams 8  # to see that it runs

Streams of mixed length, depth, policy, drafts and temperature run against a server in a process of its own. What each
should say has been computed first, one text at a time, by an engine in this process, in float64, where a text does
not depend on its batch-mates at all. Prints tables of latency, throughput and memory, and the cost of the HTTP layer
as ratios to the engine alone, measured in turn.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
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
    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    between: list[float] = field(default_factory=list)
    """Seconds from one event to the next."""
    whole: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that the server holds, and how many of them are room for keys, values and states; once a second."""
    seconds: float = 0.0


# --- What should come back ------------------------------------------------------------------------------------------


def make_jobs(engine: looplm.Engine, model_name: str, count: int, seed: int = 0) -> list[Job]:
    """Jobs of every kind, each run alone."""
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.schema import CompletionRequest

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
        read = CompletionRequest(**body)
        trained = engine.model.model.config.num_loops
        (result,) = engine.generate(
            body["prompt"],
            read.sampling(body["max_tokens"]),
            exit_of(read, trained),
            speculation=speculation_of(read),
        )
        jobs.append(Job(body, result.text or "", result.token_ids, result.loops))
    return jobs


# --- Clients --------------------------------------------------------------------------------------------------------


def request_bytes(body: dict[str, Any]) -> bytes:
    """A request over a connection of its own."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, closed at the end whatever happens."""
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
        tally.mistakes.append(f"{job.body}: {error}")
        return
    if (text, token_ids, loops) != (job.text, job.token_ids, job.loops) or final.get("token_ids") != token_ids:
        tally.mistakes.append(f"{job.body}: {text!r} {loops}, alone {job.text!r} {job.loops}")
    tally.streams += 1
    tally.tokens += len(token_ids)
    tally.whole.append(time.perf_counter() - begun)


async def misbehave(port: int, job: Job, draw: random.Random, tally: Tally) -> None:
    """A client that vanishes, stalls, or sends garbage."""
    kind = draw.choice(
        ("vanishes early", "vanishes midway", "stalls", "sends garbage", "sends bad JSON", "stops sending")
    )
    tally.rough[kind] = tally.rough.get(kind, 0) + 1
    body = {**job.body, "max_tokens": 400, "ignore_eos": True, "n": draw.choice((1, 2))}
    with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
        async with connected(port) as (reader, writer):
            if kind == "sends garbage":
                writer.write(draw.randbytes(draw.randrange(1, 5000)) + b"\r\n\r\n")
                await asyncio.wait_for(reader.read(), 5)
                return
            if kind == "sends bad JSON":
                writer.write(request_bytes(body).replace(b'"max_tokens": 400', b'"max_tokens": 4e', 1))
                await asyncio.wait_for(reader.read(), 5)
                return
            sent = request_bytes(body)
            writer.write(sent[: draw.randrange(1, len(sent))] if kind == "stops sending" else sent)
            await writer.drain()
            if kind == "vanishes midway":
                await reader.readexactly(draw.randrange(100, 4000))
            elif kind in ("stalls", "stops sending"):
                await asyncio.sleep(draw.uniform(0.5, 3))
            writer.transport.abort()


async def load(
    port: int,
    jobs: Sequence[Job],
    *,
    streams: int,
    seconds: float,
    rough: int = 0,
    pid: int | None = None,
    seed: int = 0,
) -> Tally:
    """`streams` clients, one stream after another each, and `rough` that misbehave, for some seconds."""
    tally, begun = Tally(), time.perf_counter()

    def left() -> bool:
        return time.perf_counter() - begun < seconds

    async def client(draw: random.Random) -> None:
        while left():
            await stream(port, draw.choice(jobs), tally)

    async def rough_client(draw: random.Random) -> None:
        while left():
            await misbehave(port, draw.choice(jobs), draw, tally)
            await asyncio.sleep(draw.uniform(0, 0.5))

    async def watch() -> None:
        while left() and pid is not None:
            tally.memory.append((resident(pid), await room(port)))
            await asyncio.sleep(min(1.0, seconds / 8))

    clients = [client(random.Random(seed + i)) for i in range(streams)]
    await asyncio.gather(watch(), *clients, *[rough_client(random.Random(seed - 1 - i)) for i in range(rough)])
    tally.seconds = time.perf_counter() - begun
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
        said = process.stdout.readline()
        port = int(said.split("/v1;")[0].rsplit(":", 1)[1])
        while True:
            with contextlib.suppress(OSError):
                asyncio.run(ask(port, "/health"))
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"The server ended with status {process.wait(60)} after SIGTERM.")


async def ask(port: int, path: str) -> str:
    """The body of a plain answer."""
    async with connected(port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).decode().partition("\r\n\r\n")[2]


def resident(pid: int) -> int:
    """Bytes of memory that a process holds (Linux)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def room(port: int) -> int:
    """Bytes that the engine has taken for keys, values and states."""
    lines = (line.split() for line in (await ask(port, "/metrics")).splitlines())
    return sum(int(float(line[1])) for line in lines if line[:1] in (["looplm_cache_bytes"], ["looplm_state_bytes"]))


def processor_seconds(pid: int) -> float:
    """Processor time that a process has had (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(port: int, pid: int, engine: looplm.Engine, model_name: str, rounds: int) -> dict[str, float]:
    """The HTTP layer against the engine alone, in turn, one client: seconds to the first token, of a whole text, and
    of processor time, which other work on the machine does not change."""
    kinds = ("first", "whole", "processor")
    times: dict[str, list[float]] = {f"{where} {kind}": [] for where in ("http", "engine") for kind in kinds}
    (job,) = make_jobs(engine, model_name, 1)
    body = {**job.body, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "num_loops": 4}
    params = looplm.SamplingParams(max_tokens=64, ignore_eos=True)

    async def over_http() -> tuple[float, float]:
        begun, first = time.perf_counter(), 0.0
        async with connected(port) as (reader, writer):
            writer.write(request_bytes(body))
            async for _ in events(reader):
                first = first or time.perf_counter() - begun
        return first, time.perf_counter() - begun

    for _ in range(rounds):
        used = processor_seconds(pid)
        first, whole = asyncio.run(over_http())
        times["http processor"].append(processor_seconds(pid) - used)
        times["http first"].append(first)
        times["http whole"].append(whole)
        begun, first, used = time.perf_counter(), 0.0, time.process_time()
        for _ in engine.stream(body["prompt"], params, looplm.FixedDepth(4)):
            first = first or time.perf_counter() - begun
        times["engine first"].append(first)
        times["engine whole"].append(time.perf_counter() - begun)
        times["engine processor"].append(time.process_time() - used)
    return {name: statistics.median(values) for name, values in times.items()}


# --- Tables ---------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> str:
    """50, 90, 99 and 100 of 100, in milliseconds."""
    ordered = sorted(values)
    return " ".join(
        f"{1000 * ordered[min(len(ordered) - 1, int(p * len(ordered)))]:>9,.0f}" for p in (0.5, 0.9, 0.99, 1)
    )


def report(name: str, tally: Tally) -> None:
    """A table of one run."""
    print(f"\n{name}: {tally.streams:,} streams, {tally.tokens:,} tokens in {tally.seconds:.0f} s,", end=" ")
    print(f"{tally.tokens / tally.seconds:,.0f} tokens a second; {len(tally.mistakes)} differ from the text alone")
    for kind, count in sorted(tally.rough.items()):
        print(f"  {count:>5} clients: {kind}")
    print(f"{'milliseconds':<22}{'median':>9} {'90 %':>9} {'99 %':>9} {'most':>9}")
    for label, values in (
        ("to the first token", tally.first),
        ("between events", tally.between),
        ("whole", tally.whole),
    ):
        if values:
            print(f"{label:<22}{percentiles(values)}")
    if len(tally.memory) >= 8:
        quarter = len(tally.memory) // 4
        print("memory of the server by quarters of the run, and of it for keys, values and states, MB:", end="")
        for part in (tally.memory[i * quarter : (i + 1) * quarter] for i in range(4)):
            held, for_texts = (statistics.median(values) / 1e6 for values in zip(*part, strict=True))
            print(f"  {held:,.0f} ({for_texts:,.0f})", end="")
        print()
    for mistake in tally.mistakes[:5]:
        print(f"  {mistake[:400]}")


def main() -> None:
    """Runs all of it; exit status 1 when a text was not its own."""
    parser = argparse.ArgumentParser(description="Put `looplm serve` under load.")
    parser.add_argument("--checkpoint", default="stdlib-small")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rough", type=int, default=24, help="clients that misbehave, in the second run")
    parser.add_argument("--seconds", type=float, default=120, help="of each run")
    parser.add_argument("--jobs", type=int, default=72, help="different requests")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--memory-gb", type=float, default=0.3, help="for keys, values and states of the server")
    parser.add_argument("--rounds", type=int, default=9, help="of the comparison with the engine alone")
    asked = parser.parse_args()
    tokenizer = looplm.load_tokenizer(asked.checkpoint)
    engine = looplm.Engine(looplm.load(asked.checkpoint, dtype="fp64"), tokenizer)
    jobs = make_jobs(engine, asked.checkpoint, asked.jobs)
    mistakes = 0
    with server(asked.checkpoint, asked.max_batch, asked.memory_gb) as (port, pid):
        found = compare(port, pid, engine, asked.checkpoint, asked.rounds)
        print("One client against the engine alone, medians in turn:")
        for name in ("first", "whole", "processor"):
            http, alone = found[f"http {name}"], found[f"engine {name}"]
            print(
                f"  {name:<6} {1000 * http:8.1f} ms over HTTP, {1000 * alone:8.1f} ms alone, ratio {http / alone:.2f}"
            )
        for name, rough in (("Well-behaved", 0), ("With rough clients", asked.rough)):
            tally = asyncio.run(
                load(
                    port,
                    jobs,
                    streams=asked.streams,
                    seconds=asked.seconds,
                    rough=rough,
                    pid=pid,
                )
            )
            report(name, tally)
            mistakes += len(tally.mistakes)
        print(f"The server after that: {asyncio.run(ask(port, '/health'))}")
    raise SystemExit(1 if mistakes else 0)


if __name__ == "__main__":
    main()
