"""GGUF files: the header's refusals, and a small file of each family read through transformers."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from looplm.conversion.checked import convert_checkpoint
from looplm.conversion.dense_source import any_tokenizer
from looplm.conversion.dense_to_looped import Looping
from looplm.conversion.gguf_header import expected_tensors, read_gguf_header
from looplm.errors import UserError

LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
NAMES = ["token_embd.weight", "output_norm.weight", *(f"blk.0.{name}.weight" for name in LAYER)]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(architecture: str = "llama", types: dict[str, int] | None = None, version: int = 3, **keys: str) -> bytes:
    """The beginning of a GGUF file with one layer."""
    types = dict.fromkeys(NAMES, 0) if types is None else types
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    pairs += [text(f"{architecture}.block_count") + struct.pack("<II", 4, 1)]
    pairs += [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")]
    pairs += [text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5)]
    pairs += [text(key.replace("__", ".")) + struct.pack("<I", 8) + text(value) for key, value in keys.items()]
    infos = [text(name) + struct.pack("<IQQIQ", 2, 16, 16, kind, 0) for name, kind in types.items()]
    return b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs + infos)


def test_a_header_is_read(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(header(general__name="tiny"))
    found = read_gguf_header(file)
    assert found.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "tokenizer.ggml.tokens": 2,
        "tokenizer.ggml.scores": 2,
        "general.name": "tiny",
    }
    assert found.tensor_types == dict.fromkeys(NAMES, 0)
    assert sorted(expected_tensors(found)) == sorted(NAMES)


WITHOUT = {name: 0 for name in NAMES if name not in ("output_norm.weight", "blk.0.ffn_up.weight")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("mamba"), 'architecture "mamba", which cannot be converted'),
        (header(types=dict.fromkeys(NAMES, 0) | {"blk.0.attn_q.weight": 250}), r"1 tensors \(blk.0.attn_q.*type 250"),
        (header(types=WITHOUT), "lacks the tensors output_norm.weight, blk.0.ffn_up.weight;"),
        (header("qwen2"), "lacks the tensors blk.0.attn_q.bias, blk.0.attn_k.bias, blk.0.attn_v.bias;"),
        (header("qwen3"), "lacks the tensors blk.0.attn_q_norm.weight, blk.0.attn_k_norm.weight;"),
        (header(llama__rope__scaling__type="yarn"), "scales its rotary positions"),
        (header(types=dict.fromkeys([*NAMES, "rope_freqs.weight"], 0)), "scales its rotary positions"),
        (header(version=1), "GGUF version 1"),
        (header()[:-9], "cut short"),
        (header()[:60], "cut short"),
        (b"GGUF", "cut short"),
        (b"PK\x03\x04 and more", "no GGUF file"),
        (b"", "cannot be read"),
    ],
    ids=range(13),
)
def test_what_is_refused_before_anything_is_read(tmp_path, content, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        convert_checkpoint(file, tmp_path / "looped", Looping())
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


# --- A whole file ---------------------------------------------------------------------------------------------------


def write_gguf(file: Path, architecture: str, quantisation: Any) -> None:
    """A tiny model with random weights, as llama.cpp would store it."""
    hidden, wide, heads, keys, layers, vocab = 64, 96, 4, 2, 2, 40
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(vocab)
    # transformers takes the head size of every Qwen3 file to be 128, as in all that were released.
    head, rng = (128 if architecture == "qwen3" else hidden // heads), np.random.default_rng(0)
    matrices = {"attn_q": (heads * head, hidden), "attn_k": (keys * head, hidden), "attn_v": (keys * head, hidden)}
    matrices |= {"attn_output": (hidden, heads * head), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
    matrices |= {"ffn_down": (hidden, wide)}
    vectors = {"attn_norm.weight": hidden, "ffn_norm.weight": hidden}
    if architecture == "qwen2":
        vectors |= {"attn_q.bias": hidden, "attn_k.bias": keys * head, "attn_v.bias": keys * head}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm.weight": head, "attn_k_norm.weight": head}

    def add(name: str, shape: tuple[int, ...]) -> None:
        values = rng.normal(size=shape).astype(np.float32) * (0.2 if len(shape) > 1 else 1)
        if len(shape) > 1:
            writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, 1 + 0.1 * values)

    add("token_embd.weight", (vocab, hidden))
    for i in range(layers):
        for name, shape in matrices.items():
            add(f"blk.{i}.{name}.weight", shape)
        for name, size in vectors.items():
            add(f"blk.{i}.{name}", (size,))
    add("output_norm.weight", (hidden,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "F16")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, in the package gguf
def test_a_file_of_each_family(tmp_path, architecture, kind):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, architecture, gguf.GGMLQuantizationType[kind])
    report = convert_checkpoint(file, tmp_path / "looped", Looping())
    assert report.comparison.first_parting is None
    assert not report.on_text  # the file has no tokenizer
    assert report.comparison.logits[0].largest < 1e-4
    config = report.config
    assert (config.tie_word_embeddings, config.qk_norm, config.attention_bias) == (
        True,
        architecture == "qwen3",
        architecture == "qwen2",
    )
    assert report.dtype == torch.float32


def test_a_tokenizer_is_looked_for_in_a_file(tmp_path):
    (tmp_path / "no.gguf").write_bytes(header().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.absent"))
    with pytest.raises(UserError, match="no.gguf holds no tokenizer"):
        any_tokenizer(str(tmp_path / "no.gguf"))
