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
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("native.cpp", "native_vectors.hpp"))
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


class PassArgs(ctypes.Structure):
    """What is the same for all passes of one model on one memory: `Pass` in native.cpp."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("layers", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("norm", "gate", "gate_bias", "embed_tokens")),
        *((name, ctypes.c_void_p) for name in ("states", "hidden", "embeds", "gate_logits")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_places")),
        *((name, ctypes.c_int64) for name in ("norms", "exit_norms", "raw_state", "raw_hidden")),
        ("eps", ctypes.c_double),
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
    made_of = (SOURCE.read_bytes(), HEADER.read_bytes(), compiler, _version(compiler), FLAGS, _processor())
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
        rows: Iterable[int],
        table: Int[Tensor, "slots positions"],
        rope: tuple[Float[Tensor, "positions d"], Float[Tensor, "positions d"]],
        loop_stride: int,
    ) -> None:
        """rows: four numbers each: slot, loop, and the position from start to stop. table: the place of each position
        of a slot. loop_stride: how far the set of the next loop lies behind this loop's, in places."""
        numbers = array("q", rows)
        self._kept_alive = numbers, table, rope
        self.args = RowsArgs(
            numbers.buffer_info()[0], table.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(),
            len(numbers) // 4, table.shape[1], loop_stride, torch.get_num_threads(),
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
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        takes = {
            "core": [pointer] * 3,
            "layer": [pointer] * 6,
            "attend": [pointer] * 8,
            "linear": [*[pointer] * 3, *[number] * 4, pointer],
            "best": [pointer, number, number, pointer],
            "norm": [pointer, pointer, ctypes.c_double, number, number, pointer],
        }
        functions = {part: getattr(kernels, f"{part}_{name}") for part in takes}
        for part, function in functions.items():
            function.argtypes, function.restype = takes[part], None
        self._core, self._layer, self._attend = (functions[part] for part in ("core", "layer", "attend"))
        self._linear, self._best, self._norm = (functions[part] for part in ("linear", "best", "norm"))

    def core(self, model: PassArgs, rows: Rows, tokens: Sequence[int]) -> None:
        """The core, final norm and gate for single positions. tokens: -1 for rows that go on from their states."""
        ids = array("q", tokens)
        self._core(ctypes.addressof(model), ctypes.addressof(rows.args), ids.buffer_info()[0])

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

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer for a few rows, x (N, I), on the weight as it is."""
        x, columns = x.contiguous(), weight.shape[0]
        out = x.new_empty(len(x), columns)
        self._linear(
            weight.data_ptr(), address(bias), x.data_ptr(), len(x), x.shape[1], columns, torch.get_num_threads(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def best(self, logits: Tensor) -> list[int]:
        """The first of the largest logits of every row, (N, V); -1 where one of them is not finite."""
        logits, out = logits.contiguous(), (ctypes.c_int64 * len(logits))()
        self._best(logits.data_ptr(), *logits.shape, ctypes.addressof(out))
        return list(out)

    def norm(self, x: Tensor, scale: nn.Parameter | None, eps: float) -> Tensor:
        """RMSNorm over the last dimension."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), address(scale), eps, x.numel() // size, size, out.data_ptr())
        return out


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
