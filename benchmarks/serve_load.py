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
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve_clients import (
    CROWD,
    PATIENCE,
    ROUGH,
    Job,
    Tally,
    connected,
    crowd,
    events,
    misbehave,
    request_bytes,
    stream,
)

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
MOST_MISTAKES = 100
"""After so many a run is over: the server is broken, or gone."""


# --- What should come back ------------------------------------------------------------------------------------------


def submit(engine: looplm.Engine, body: dict[str, Any]) -> Any:
    """The one request of a body, put into an engine."""
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.schema import CompletionRequest

    read = CompletionRequest(**body)
    exit, sampling = exit_of(read), read.sampling(body["max_tokens"])
    (request,) = engine.submit(body["prompt"], sampling, exit, speculation=speculation_of(read, exit))
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


# --- The load --------------------------------------------------------------------------------------------------------


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
