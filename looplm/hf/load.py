"""`looplm.load`: a checkpoint directory or hub name to a model, with no remote code and no pickle."""

from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from looplm.errors import UserError
from looplm.hf.checkpoint import (
    CONFIG,
    StoredTensor,
    check_tensors,
    find_checkpoint,
    read_config,
    read_json,
    read_tensors,
)
from looplm.hf.config import OuroConfig
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM
from looplm.hf.register import register

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these a checkpoint with a tokenizer has."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Names a dtype may be given by."""


def load(
    source: str | Path, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> LoopLMForCausalLM:
    """Loads a LoopLM or Ouro checkpoint for evaluation.

    source: a directory, or a hub name such as "ByteDance/Ouro-1.4B".
    dtype: of the weights, as a torch dtype or its name ("bfloat16"); None keeps that of the file.
    device: "cuda", "cuda:1" ...; None is the CPU.

    Raises UserError when the checkpoint cannot be found, read or understood; tensors that are missing,
    unexpected or mis-shaped are all named, and nothing is ever filled in.
    """
    register()
    wanted, place = check_dtype(dtype), check_device(device)
    directory = find_checkpoint(source)
    config = read_config(directory / CONFIG)
    stored = read_tensors(directory)
    check_tensors(config.to_model_config(), stored, directory)
    kept = wanted or stored_dtype(stored)
    config.dtype, config.name_or_path = kept, str(source)
    model_class = OuroForCausalLM if isinstance(config, OuroConfig) else LoopLMForCausalLM
    with torch.device("meta"):
        model = model_class(config)
    weights = read_weights(stored, kept, place)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if (directory / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig(**read_json(directory / GENERATION_CONFIG))
    return model.eval()


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype from its name. Raises UserError for any other."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return found


def check_device(device: torch.device | str | None) -> torch.device:
    """A device that can be used on this machine. Raises UserError for any other."""
    try:
        found = torch.device(device or "cpu")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The device {str(device)!r} cannot be used here: {reason}") from None
    if found.type == "meta":
        raise UserError("The device 'meta' cannot be used here: it holds shapes and no numbers. Use cpu or cuda.")
    return found


def stored_dtype(stored: dict[str, StoredTensor]) -> torch.dtype:
    """The dtype of a checkpoint, the widest if it mixes them. Raises UserError for anything but plain floats."""
    names = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    other = sorted({tensor.dtype for tensor in stored.values()} - names.keys())
    if other:
        raise UserError(f"The weights are stored as {', '.join(other)}; looplm reads F64, F32, BF16 and F16.")
    return reduce(torch.promote_types, {names[tensor.dtype] for tensor in stored.values()})


def read_weights(stored: dict[str, StoredTensor], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All tensors in one dtype on one device. Raises UserError when a file turns out to be damaged."""
    weights: dict[str, Tensor] = {}
    for file in {tensor.file for tensor in stored.values()}:
        try:
            with safe_open(file, framework="pt") as opened:
                # A copy, since the file stays mapped otherwise and may be replaced while the model lives.
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    weights[name] = opened.get_tensor(name).to(device, dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read as safetensors ({error}).") from None
    return weights


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory or hub name. Raises UserError when it has none."""
    register()  # or transformers warns of a model type it does not know
    directory = find_checkpoint(source)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{source} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}. Copy the tokenizer's files into it, or "
            "give token ids instead of text."
        )
    if (directory / TOKENIZER_CONFIG).is_file():
        read_json(directory / TOKENIZER_CONFIG)  # transformers takes it for an object without looking
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing narrower for a file that contradicts itself
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"The tokenizer of {source} cannot be read ({reason}). Copy tokenizer.json and tokenizer_config.json into "
            "it anew, or give token ids instead of text."
        ) from None
