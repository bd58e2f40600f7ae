"""Many streams at one time, beside clients that misbehave: no token is lost or goes to another.

A short form of `benchmarks/serve_load.py`. In float64, where batch-mates change nothing at all.
"""

import asyncio
import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import looplm
from looplm.serving.worker import Call

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("serve_load")


def kept_calls() -> list[Call]:
    """What is in memory of requests."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Call]


def test_streams_get_what_they_get_alone(benchmark: ModuleType, tokenizer: Any, serve: Callable[..., Any]) -> None:
    model = looplm.load("stdlib-small", dtype="fp64")
    jobs = benchmark.make_jobs(looplm.Engine(model, tokenizer), "stdlib-small", 10)
    short = [job for job in jobs if len(job.token_ids) <= 16]
    server = serve(engine=looplm.Engine(model, tokenizer, max_batch=6))
    tally = asyncio.run(benchmark.load(server.port, short, streams=10, seconds=1.5, rough=6))
    assert server.idle()
    until = time.monotonic() + 10
    while kept_calls() and time.monotonic() < until:  # the last connections are still being closed
        time.sleep(0.05)
    assert not kept_calls()
    assert tally.mistakes == [] and tally.streams >= 10 and len(tally.rough) >= 2
    table = benchmark.report({"short": tally}, {"short": 1.25})
    assert "| mistakes: lost, mixed-up or other than alone | 0 |" in table and "| 1.25 |" in table


def test_a_text_that_is_not_its_own_is_seen(benchmark: ModuleType, server: Any, tokenizer: Any) -> None:
    body = {"model": "stdlib-small", "prompt": "x", "max_tokens": 2, "stream": True, "return_depths": True}
    tally = benchmark.Tally()
    asyncio.run(benchmark.stream(server.port, benchmark.Job(body, "no such text", [1, 2], [1, 1]), tally))
    assert len(tally.mistakes) == 1 and "alone 'no such text'" in tally.mistakes[0]
    asyncio.run(benchmark.stream(server.port, benchmark.Job({**body, "n": -1}, "", [], []), tally))
    assert len(tally.mistakes) == 2 and "status" in tally.mistakes[1]
