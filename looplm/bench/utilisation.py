"""Stage-I training on one device: which choices fit, how fast they are, and what share of the device that uses."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from looplm.bench.devices import Peak
from looplm.bench.figures import Figure
from looplm.bench.memory import PeakMeter
from looplm.bench.sides import Side, build_side
from looplm.bench.sizes import Compile, TrainSizes
from looplm.model.flops import training_flops
from looplm.training.stage_recipe import ActivationCheckpointing

SECTION = "training"
GIB = 2**30

CHOICES: tuple[tuple[Compile, ActivationCheckpointing], ...] = (
    ("blocks", "layer"),
    ("blocks", "none"),
    ("none", "layer"),
    ("blocks", "loop"),
    ("none", "none"),
)
"""In the order in which they are tried: the likely best first, should the time run out."""


def utilisation(
    sizes: TrainSizes,
    device: torch.device,
    peak: Peak | None,
    *,
    until: float,
    repeats: int = 3,
    most_rows: int | None = None,
    choices: Sequence[tuple[Compile, ActivationCheckpointing]] = CHOICES,
) -> Iterator[Figure]:
    """For each choice, the micro-batch with most tokens per second among those that fit; then the best of all.

    `until` is on the clock of `time.monotonic`; what is left by then is not begun. Model FLOPs are 6 per parameter,
    token and loop, heads included (`looplm.model.flops.training_flops`); recomputation and attention scores are not
    counted.
    """
    best: tuple[float, str] | None = None
    for compile, checkpointing in choices:
        what = f"compile {compile}, recompute {checkpointing}"
        if time.monotonic() > until:
            yield Figure(section=SECTION, what=what, value="not tried: out of time")
            continue
        found = None
        for rows in _doubling(sizes.batch_size):
            point = replace(sizes, batch_size=rows)
            try:
                measured = _measure(point, compile, checkpointing, device, repeats)
            except torch.OutOfMemoryError:
                break
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            grew = found is None or measured[0] > 1.03 * found[0]
            if found is None or measured[0] > found[0]:
                found = (*measured, rows)
            if not grew or rows == most_rows or time.monotonic() > until:
                break
        if found is None:
            yield Figure(section=SECTION, what=what, value=f"no memory for one row of {sizes.seq_len} tokens")
            continue
        speed, peak_bytes, rows = found
        yield Figure(
            section=SECTION,
            what=what,
            value=f"{speed_text(sizes, speed, peak)}, {rows} x {sizes.seq_len}, {peak_bytes / GIB:.2f} GiB",
            number=speed,
        )
        best = max(best or (0.0, ""), (speed, what))
    if best is not None:
        yield Figure(section=SECTION, what=f"best: {best[1]}", value=speed_text(sizes, best[0], peak), number=best[0])


def speed_text(sizes: TrainSizes, tokens_per_second: float, peak: Peak | None) -> str:
    """Tokens per second, and the share of the device's peak in model FLOPs."""
    flops = training_flops(sizes.model_config(), 1) * tokens_per_second
    share = f"{flops / peak.bf16_tflops / 1e12:.1%} of peak" if peak is not None else "peak of this device not known"
    return f"{tokens_per_second:,.0f} tokens/s, {flops / 1e12:,.1f} TFLOP/s, {share}"


def _doubling(first: int) -> Iterator[int]:
    return (first * 2**power for power in itertools.count())


def _measure(
    sizes: TrainSizes, compile: Compile, checkpointing: ActivationCheckpointing, device: torch.device, repeats: int
) -> tuple[float, int]:
    """(tokens per second at the median step, most bytes a step holds in all)."""
    side = build_side("looplm", sizes, compile=compile, checkpointing=checkpointing, device=str(device))
    meter = PeakMeter(device)
    meter.start()
    side.step()  # warms up and compiles
    return sizes.num_tokens / statistics.median(_timed(side) for _ in range(repeats)), meter.peak_bytes() + meter.held


def _timed(side: Side) -> float:
    began = time.perf_counter()
    side.step()
    return time.perf_counter() - began
