"""Counts for Prometheus: what the engine has done, what waits, what requests came and how they ended."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from looplm.inference.engine import Engine
from looplm.inference.request import Request

PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/loops")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

ENGINE_COUNTERS = {
    "weight_passes": "Applications of the core's weights in decoding, however many rows each carried",
    "token_loops": "Positions times loops computed in decoding",
    "head_reads": "Rows read by the LM head in decoding",
    "prompt_weight_passes": "Applications of the core's weights to prompts",
    "prompt_token_loops": "Positions times loops computed for prompts",
    "prompt_tokens": "Tokens of prompts",
    "shared_prompt_tokens": "Of these, tokens that had been computed before",
    "generated_tokens": "Tokens generated",
    "claimed_loops": "Sum over generated tokens of the loop they were read out at",
    "drafted_tokens": "Drafts that were tested",
    "accepted_tokens": "Drafts that stood",
}
ENGINE_GAUGES = {
    "cache_bytes": "Keys and values there is room for",
    "cache_bytes_in_use": "Most bytes of keys and values that held something at one time",
    "state_bytes": "Room for states that wait for deeper loops",
}


class Metrics:
    """Everything that `/metrics` shows of one server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        loops = range(1, engine.model.model.config.num_loops + 1)
        self._depth = Histogram(
            "looplm_depth_loops",
            "The loop at which a generated token was read out",
            buckets=tuple(map(float, loops)),
            registry=self.registry,
        )
        self._finished = Counter("looplm_texts", "Texts that ended", ["reason"], registry=self.registry)
        self._requests = Counter("looplm_http_requests", "HTTP requests", ["path", "status"], registry=self.registry)
        self._seconds = Histogram(
            "looplm_http_request_seconds", "Time of HTTP requests", ["path"], buckets=SECONDS, registry=self.registry
        )
        self._first_token = Histogram(
            "looplm_first_token_seconds",
            "Time to the first token of a stream",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(EngineCollector(engine))

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self.registry)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Counts an HTTP request that has ended; status 0: nobody was there to be answered."""
        known = path if path in PATHS else "other"
        self._requests.labels(known, str(status)).inc()
        self._seconds.labels(known).observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Counts the first token of a stream."""
        self._first_token.observe(seconds)

    def finished(self, request: Request) -> None:
        """Counts a text that has ended, and the depth of its tokens. Safe in any thread."""
        self._finished.labels(request.finish_reason or "cancelled").inc()
        for loop in request.loops:
            self._depth.observe(loop)


class EngineCollector(Collector):
    """Reads an engine's counts when it is asked. They are plain numbers: reading them disturbs nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Counts since the engine was made, and what runs and waits now."""
        stats = self._engine.stats
        for name, help in ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"looplm_{name}", help, value=getattr(stats, name))
        for name, help in ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"looplm_{name}", help, value=getattr(stats, name))
        if stats.drafted_tokens:
            yield GaugeMetricFamily("looplm_draft_acceptance", "Share of drafts that stood", value=stats.acceptance)
        unfinished = self._engine.num_unfinished
        running = min(unfinished, self._engine.max_batch)
        yield GaugeMetricFamily("looplm_texts_unfinished", "Texts that run or wait", value=unfinished)
        yield GaugeMetricFamily("looplm_texts_waiting", "Of these, texts without a place", value=unfinished - running)
