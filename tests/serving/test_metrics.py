"""What `/metrics` shows is what the engine has counted."""

from collections.abc import Callable
from typing import Any

import pytest


def shown(text: str) -> dict[str, float]:
    """Samples by name, with their labels."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_counts_are_the_engines(serve: Callable[..., Any]) -> None:
    server = serve()
    body = {"model": "stdlib-small", "prompt": "def main(", "max_tokens": 10, "temperature": 0, "return_depths": True}
    with server.client() as http:
        plain = http.post("/v1/completions", json=body).json()["choices"][0]
        drafted = {**body, "num_loops": 4, "draft_loops": 1, "draft_tokens": 2}
        assert http.post("/v1/completions", json=drafted).status_code == 200
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            stream.read()
        http.get("/nowhere")
        found = shown(http.get("/metrics").text)
    stats = server.worker.engine.stats
    for name in ("weight_passes", "token_loops", "prompt_token_loops", "generated_tokens", "claimed_loops"):
        assert found[f"looplm_{name}_total"] == getattr(stats, name) > 0
    assert found["looplm_cache_bytes"] == stats.cache_bytes > 0
    assert found["looplm_draft_acceptance"] == stats.acceptance
    assert found["looplm_texts_unfinished"] == found["looplm_texts_waiting"] == 0
    loops = [*plain["loops"], *[4] * 10, *plain["loops"]]
    for depth in range(1, 5):
        assert found[f'looplm_depth_loops_bucket{{le="{depth}.0"}}'] == sum(loop <= depth for loop in loops)
    assert found['looplm_texts_total{reason="length"}'] == 3
    assert found['looplm_http_requests_total{path="/v1/completions",status="200"}'] == 3
    assert found['looplm_http_requests_total{path="other",status="404"}'] == 1
    assert found["looplm_first_token_seconds_count"] == 1


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"num_loops": 4},
        {"draft_loops": 1},
        {"draft_loops": 1, "draft_tokens": 64},
        {"num_loops": 3, "draft_loops": 1, "draft_tokens": 5},
        {"temperature": 0.9, "seed": 3, "n": 3, "draft_loops": 1, "draft_tokens": 4},
    ],
)
def test_what_texts_say_they_took_is_what_the_server_has_counted(
    serve: Callable[..., Any], extra: dict[str, Any]
) -> None:
    """Drafts that did not stand included, and prompts apart."""
    body = {"model": "stdlib-small", "prompt": "import os", "max_tokens": 40, "temperature": 0, "return_depths": True}
    with serve().client() as http:
        answer = http.post("/v1/completions", json={**body, **extra}).json()
        found = shown(http.get("/metrics").text)
    usage, choices = answer["usage"], answer["choices"]
    assert usage["token_loops"] == found["looplm_token_loops_total"]
    assert usage["claimed_loops"] == found["looplm_claimed_loops_total"]
    rejected = [choice["rejected_token_loops"] for choice in choices]
    assert usage["token_loops"] == sum(sum(choice["token_loops"][1:]) for choice in choices) + sum(rejected)
    assert any(rejected) == ("draft_loops" in extra)


def test_what_waits_is_counted(serve: Callable[..., Any], make_engine: Callable[..., Any]) -> None:
    server = serve(engine=make_engine(max_batch=1))
    body = {"model": "stdlib-small", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "n": 3, "stream": True}
    with server.client() as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            found = shown(http.get("/metrics").text)
            assert (found["looplm_texts_unfinished"], found["looplm_texts_waiting"]) == (3, 2)
        assert server.idle()
        assert shown(http.get("/metrics").text)['looplm_texts_total{reason="cancelled"}'] == 3
