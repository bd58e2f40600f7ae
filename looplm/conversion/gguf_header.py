"""The header of a GGUF file, read without any library: what the model is, and how its tensors are stored.

Reading the weights is transformers' work (it needs the package `gguf`). The header is looked at first, because
transformers fills a missing tensor with random numbers and passes over scaled rotary positions without a word.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplm.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

QUANTISATIONS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
}
"""Number of a tensor's type in the file -> its name, of those that can be turned back into floats."""


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    """Scalars and strings by key; of an array, its length."""
    tensor_types: dict[str, int]
    """Name -> number of the type, see QUANTISATIONS."""

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model's family."""
        return str(self.metadata.get("general.architecture", "unknown"))


def read_gguf_header(file: Path) -> GgufHeader:
    """The header of `file`. Raises UserError when it is no GGUF file, is cut short or of a version unknown here."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content, file).header()
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError):
        raise UserError(f"{file} is damaged or was cut short: its GGUF header cannot be read to the end.") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read: {error}.") from None


def check_gguf(header: GgufHeader, file: Path) -> None:
    """Raises UserError unless the dense model in `file` can be read whole and means what transformers will make of it.

    Said are a quantisation that cannot be turned back into floats, all tensors that are missing, and rotary scaling,
    which GGUF keeps where transformers does not look.
    """
    kinds = sorted({kind for kind in header.tensor_types.values() if kind not in QUANTISATIONS})
    if kinds:
        names = [name for name, kind in header.tensor_types.items() if kind in kinds]
        raise UserError(
            f"{file} stores {len(names)} tensors ({', '.join(names[:3])} ...) in a quantisation that cannot be read "
            f"(GGML type {', '.join(map(str, kinds))}). Readable are {', '.join(QUANTISATIONS.values())}; give a file "
            "in one of these, or the model's own safetensors directory."
        )
    missing = [name for name in expected_tensors(header) if name not in header.tensor_types]
    if missing:
        raise UserError(f"{file} lacks the tensors {', '.join(missing)}; a dense model is not whole without them.")
    scaled = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none") != "none"
    if scaled or "rope_freqs.weight" in header.tensor_types:
        raise UserError(
            f"{file} scales its rotary positions, and the scaling of a GGUF file is not read. Give the model's own "
            "safetensors directory, whose config.json says how."
        )


def expected_tensors(header: GgufHeader) -> list[str]:
    """Names of the tensors that a dense model of this architecture and number of layers has; the head may be tied."""
    attention, ffn = ("norm", "q", "k", "v", "output"), ("norm", "gate", "up", "down")
    layer = [*(f"attn_{name}.weight" for name in attention), *(f"ffn_{name}.weight" for name in ffn)]
    if header.architecture == "qwen2":
        layer += ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
    if header.architecture == "qwen3":
        layer += ["attn_q_norm.weight", "attn_k_norm.weight"]
    num_layers = header.metadata.get(f"{header.architecture}.block_count", 0)
    return [
        "token_embd.weight",
        "output_norm.weight",
        *(f"blk.{i}.{name}" for i in range(num_layers) for name in layer),
    ]


class _Reader:
    """Goes through the header from front to back."""

    def __init__(self, content: mmap.mmap, file: Path) -> None:
        self.content, self.file, self.at = content, file, 0

    def header(self) -> GgufHeader:
        if self.content[:4] != b"GGUF":
            raise UserError(f"{self.file} is no GGUF file: it does not begin with GGUF.")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise UserError(f"{self.file} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata = {self.string(): self.value(self.scalar("<I")) for _ in range(num_keys)}
        types: dict[str, int] = {}
        for _ in range(num_tensors):
            name = self.string()
            num_dimensions = self.scalar("<I")
            self.at += 8 * num_dimensions
            types[name] = self.scalar("<I")
            self.at += 8  # where it lies
        return GgufHeader(metadata, types)

    def scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > len(self.content) - self.at:
            raise struct.error
        self.at += length
        return self.content[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise struct.error
            return self.scalar(_SCALARS[kind])
        inner, length = self.scalar("<I"), self.scalar("<Q")
        if inner in _SCALARS:
            self.at += length * struct.calcsize(_SCALARS[inner])
        else:
            for _ in range(length):
                self.value(inner)
        return length
