"""Generation against what the memory's bandwidth allows: every token must read the weights once a loop."""

import random
import statistics
import time
from collections.abc import Iterator

import torch

from looplm.bench.devices import Peak
from looplm.bench.figures import Figure
from looplm.bench.sizes import TrainSizes
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, FixedDepth, SamplingParams

SECTION = "decoding"


def weight_bytes(model: LoopLMForCausalLM) -> int:
    """Bytes of weights that one decoded token reads: the core once a loop, prelude, coda and head once."""
    core = sum(p.nbytes for p in model.model.layers.parameters())
    once = [*model.model.prelude.parameters(), *model.model.coda.parameters(), model.lm_head.weight]
    return core * model.config.num_loops + sum(p.nbytes for p in once)


def decode(
    sizes: TrainSizes,
    device: torch.device,
    peak: Peak | None,
    *,
    until: float,
    batch_sizes: tuple[int, ...] = (1, 32),
    max_tokens: int = 32,
    prompt_tokens: int = 16,
    repeats: int = 3,
) -> Iterator[Figure]:
    """Greedy, all loops, from random weights in bfloat16. The limit: bandwidth / weight bytes, for each row.

    Prompts are part of the time. Not begun after `until`, on the clock of `time.monotonic`.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = LoopLMForCausalLM(LoopLMConfig.from_model_config(sizes.model_config()))
    model = model.to(torch.bfloat16).eval()  # pyright: ignore[reportArgumentType]
    read = weight_bytes(model)
    yield Figure(
        section=SECTION, what="weights read per token", value=f"{read / 1e9:.3f} GB in {sizes.num_loops} loops",
        number=read,
    )  # fmt: skip
    draw = random.Random(0)
    params, depth = SamplingParams(max_tokens=max_tokens, ignore_eos=True), FixedDepth(sizes.num_loops)
    for batch_size in batch_sizes:
        what = f"{batch_size} at a time"
        if time.monotonic() > until:
            yield Figure(section=SECTION, what=what, value="not tried: out of time")
            continue
        prompts = [[draw.randrange(sizes.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch_size)]
        engine = Engine(model, max_batch=batch_size)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            list(engine.generate(prompts, params, depth))
            seconds.append(time.perf_counter() - began)
        speed = batch_size * max_tokens / statistics.median(seconds[1:])  # the first warms up
        value = f"{speed:,.1f} tokens/s"
        if peak is not None:
            limit = batch_size * peak.bandwidth_gbs * 1e9 / read
            value += f", {speed / limit:.1%} of the {limit:,.0f} that bandwidth allows"
        value += f", cache {engine.stats.cache_bytes / 2**20:,.0f} MiB"
        yield Figure(section=SECTION, what=what, value=value, number=speed)
