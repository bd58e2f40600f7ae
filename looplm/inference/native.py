"""Kernels of this CPU for decoding, built from `native.cpp` by the machine's own C++ compiler when first wanted.

Nothing happens at import. The library lies in a cache directory under a name that says what it was made of (source,
compiler, processor), so that it is built once and never run on a CPU it was not made for. Where there is no compiler,
or the directory cannot be written, PyTorch does the work and the log says why.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi",
)  # fmt: skip
BUILD_SECONDS = 120
"""A compiler that takes longer is given up."""
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
"""Dtypes there are kernels for."""


class LayerArgs(ctypes.Structure):
    """What is the same in every call of one layer: `Layer` in native.cpp."""

    _fields_: ClassVar = [
        ("norms", ctypes.c_void_p * 4),
        ("weights", ctypes.c_void_p * 7),
        ("biases", ctypes.c_void_p * 7),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("hidden", "wide", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("norms_before", "norms_after", "norms_the_sum", "norms_qk")),
        ("eps", ctypes.c_double),
        ("qk_eps", ctypes.c_double),
    ]


class RowsArgs(ctypes.Structure):
    """What is the same for all layers of one pass: `Rows` in native.cpp."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("rows", "table", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("count", "table_stride", "loop_stride", "threads")),
    ]


class Unavailable(Exception):
    """Why there are no kernels here, in a sentence."""


@functools.cache
def library() -> "ctypes.CDLL | Unavailable":
    """The kernels, built if they have not been; or why they could not be, which is not tried again."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        return Unavailable(f"no C++ compiler was found ({', '.join(names)})")
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return Unavailable(f"{compiler} could not build them: {said[0] if said else error}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"{compiler} could not build them: {error}")


def cache_directory() -> Path:
    """Where the library is kept: `$XDG_CACHE_HOME/looplm`, usually ~/.cache/looplm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "looplm"


def _built(compiler: str) -> Path:
    """The library's file. Two processes may build it at one time: each writes its own, and a rename puts it there."""
    made_of = (SOURCE.read_text(encoding="utf-8"), compiler, _version(compiler), FLAGS, _processor())
    name = f"native-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    directory = cache_directory()
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as own:
        built = Path(own) / name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        built.replace(target)
    return target


def _version(compiler: str) -> str:
    ran = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
    return ran.stdout


def _processor() -> str:
    """What `-march=native` depends on."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    return "\n".join([platform.machine(), platform.processor(), *(x for x in lines[:40] if x.startswith("flags"))])


class Rows:
    """Single positions of one pass, as the kernels read them."""

    def __init__(
        self,
        rows: Int[Tensor, "B 4"],
        table: Int[Tensor, "slots positions"],
        rope: tuple[Float[Tensor, "B 1 d"], Float[Tensor, "B 1 d"]],
        loop_stride: int,
    ) -> None:
        """rows: slot, loop, and the position from start to stop. table: the place of each position of a slot.
        loop_stride: how far the set of the next loop lies behind this loop's, in places."""
        self._kept_alive = rows, table, rope
        assert rows.is_contiguous() and table.is_contiguous() and all(part.is_contiguous() for part in rope)
        self.args = RowsArgs(
            rows.data_ptr(), table.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(),
            len(rows), table.shape[1], loop_stride, torch.get_num_threads(),
        )  # fmt: skip


class Kernels:
    """The kernels for one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises Unavailable."""
        if dtype not in NAMES:
            raise Unavailable(f"there are none for {dtype}")
        kernels, name = library(), NAMES[dtype]
        if isinstance(kernels, Unavailable):
            raise kernels
        pointer = ctypes.c_void_p
        self._layer, self._attend, self._norm = (
            getattr(kernels, f"{part}_{name}") for part in ("layer", "attend", "norm")
        )
        self._layer.argtypes = [pointer] * 6
        self._attend.argtypes = [pointer] * 8
        self._norm.argtypes = [pointer, pointer, ctypes.c_double, ctypes.c_int64, ctypes.c_int64, pointer]
        for function in (self._layer, self._attend, self._norm):
            function.restype = None

    def layer(self, layer: LayerArgs, rows: Rows, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A layer for single positions, x (B, 1, D); their keys and values are stored on the way."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self._layer(
            ctypes.addressof(layer), ctypes.addressof(rows.args), x.data_ptr(), keys.data_ptr(), values.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def attend(
        self, layer: LayerArgs, rows: Rows, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Stores keys and values and attends: q (B, 1, H * d), k and v (B, 1, K * d), before q/k norm and RoPE."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        self._attend(
            ctypes.addressof(layer), ctypes.addressof(rows.args), q.data_ptr(), k.data_ptr(), v.data_ptr(),
            keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def norm(self, x: Tensor, scale: nn.Parameter | None, eps: float) -> Tensor:
        """RMSNorm over the last dimension."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), address(scale), eps, x.numel() // size, size, out.data_ptr())
        return out


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
