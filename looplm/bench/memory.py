"""Memory of a step: the most that was held at one time, above what was held before.

On a CUDA device the caching allocator counts its tensors. On the CPU it is what the operating system gave the
process: its resident set, whose high-water mark Linux lets a process reset. That counts everything, the scratch
of the matrix library and fragmentation too.
"""

import ctypes
import gc
import re
from pathlib import Path

import torch

from looplm.errors import UserError

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMeter:
    """`start`, run something, `peak_bytes`. Raises UserError where neither CUDA nor Linux's /proc is there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cuda" and not CLEAR_REFS.exists():
            raise UserError("Memory is measured on CUDA devices and, for the CPU, under Linux; use --no-memory here.")
        self.held = 0

    def start(self) -> None:
        """Takes what is held now, with garbage collected and free memory given back, as the zero."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.held = torch.cuda.memory_allocated(self.device)
            return
        give_back_free_memory()
        CLEAR_REFS.write_text("5")  # the high-water mark becomes the present size
        self.held = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Most bytes held at one time since `start`, above those held then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.held
        return _status_bytes("VmHWM") - self.held


def give_back_free_memory() -> None:
    """Returns what malloc keeps for later to the operating system (glibc; elsewhere nothing to do)."""
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another C library, which may not keep any
        return
    trim(0)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, field
    return int(match[1]) * 1024
