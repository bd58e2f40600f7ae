"""Where the time of a step goes: matrix products of head and core, attention, optimizer, and everything else.

Matrix products are what both sides must do, and the rest is what stands between a step and their speed.
"""

import time
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from looplm.bench.sides import Side

Part = Literal["head products", "core products", "attention", "optimizer", "rest"]
PARTS: tuple[Part, ...] = ("head products", "core products", "attention", "optimizer", "rest")

PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm"))


def breakdown(side: Side) -> dict[Part, float]:
    """Share of each part in one profiled step; the shares sum to 1. Changes the model by a step."""
    on_device = side.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        began = time.perf_counter()
        side.step()
        total = time.perf_counter() - began
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages(group_by_input_shape=True):
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total  # microseconds
        seconds[part_of(event.key, event.input_shapes, side.sizes.vocab_size)] += spent / 1e6
    seconds["rest"] = 0.0  # what the profiler does not name (compiled kernels, Python) belongs to it as well
    seconds["rest"] = max(0.0, total - sum(seconds.values()))
    return {part: spent / sum(seconds.values()) for part, spent in seconds.items()}


def part_of(operator: str, shapes: list[list[int]], vocab_size: int) -> Part:
    """The part an operator's time counts to, by its name and the shapes of its inputs."""
    if operator in PRODUCTS:
        return "head products" if any(vocab_size in shape for shape in shapes) else "core products"
    if "scaled_dot_product" in operator or "flash_attention" in operator:
        return "attention"
    return "optimizer" if "adamw" in operator else "rest"


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
