"""What the device could do and what it holds: peak FLOPs by name, memory, and the FLOPs a step is worth."""

import re
import sys

import torch

from looplm.model.config import LoopedConfig
from looplm.model.flops import inference_flops, training_flops

_PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)
"""Dense bfloat16 matrix products with float32 sums, FLOP/s, from the makers' data sheets; the first whose words the
device's name contains is taken. A board under a lower power limit reaches less, and its share of the peak says so.
"""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a device in "bf16"; None for a CPU, for "fp32" and for a device whose peak is not listed."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name its driver gives; None if it is not listed."""
    # Whole words: an "RTX A4000" is no A40, and an "L40S" no L4.
    return next((peak for name, peak in _PEAK_BF16 if re.search(rf"\b{name}\b", device_name)), None)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most bytes held at once: by tensors on a CUDA device, by the whole process on a CPU; None elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # of Unix alone

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def step_flops(
    config: LoopedConfig,
    num_tokens: int,
    *,
    seq_len: int,
    num_loops: int,
    backprop_loops: int | None = None,
    gate_only: bool = False,
    head_passes: int | None = None,
) -> float:
    """Model FLOPs of training on `num_tokens` positions in rows of `seq_len`, attention included.

    As :func:`looplm.model.flops.training_flops` counts; what is recomputed under checkpointing is not counted. Loops
    before the last `backprop_loops` cost their forward alone (and their readout in full); `gate_only` (Stage II) has
    no backward pass worth counting. head_passes:
    :func:`~looplm.training.depth.head_passes`; 3 * num_loops when None.
    """
    context = (seq_len + 1) / 2  # keys a query reads on average
    if gate_only:
        return num_tokens * inference_flops(config, num_loops, heads=num_loops, context=context)
    full = float(training_flops(config, num_tokens, num_loops, seq_len=seq_len))
    if head_passes is not None:
        full -= num_tokens * 2 * config.vocab_size * config.hidden_size * (3 * num_loops - head_passes)
    truncated = 0 if backprop_loops is None else max(0, num_loops - backprop_loops)
    # A loop's backward pass costs twice its forward. Loop 1 has no injection; the difference is not worth a case.
    forward = inference_flops(config, 2, context=context) - inference_flops(config, 1, context=context)
    return full - 2 * num_tokens * truncated * forward
