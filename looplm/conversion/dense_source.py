"""A dense checkpoint: found, understood or refused, and its weights read, from a directory, a hub name or a GGUF file.

Llama (SmolLM2, TinyLlama), Qwen2, Qwen2.5 and Qwen3 name their tensors as a looped checkpoint does, so that a
dense model is a :class:`~looplm.model.config.LoopedConfig` of one loop and no gate.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from looplm.conversion.gguf_header import check_gguf, read_gguf_header
from looplm.errors import UserError
from looplm.hf.checkpoint import (
    CONFIG,
    StoredTensor,
    find_checkpoint,
    local_path,
    read_json,
    read_tensors,
    tensor_mismatch,
)
from looplm.hf.config import build_model_config
from looplm.hf.load import TOKENIZER_FILES, load_tokenizer, read_weights, stored_dtype
from looplm.hf.save import quiet_transformers
from looplm.model.config import LoopedConfig
from looplm.model.flops import parameter_shapes

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the dense models that can be converted."""

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
)


@dataclass(frozen=True)
class DenseSource:
    """A dense checkpoint whose config has been read and found convertible."""

    name: str
    """As the user gave it."""
    path: Path
    """Its directory, or its GGUF file."""
    config: PretrainedConfig
    """transformers' own."""
    shape: LoopedConfig
    """The same model as one loop: pre-norm, no injection."""
    model: PreTrainedModel | None = None
    """transformers' model, where the source was given as one or is a GGUF file."""


# --- Finding and understanding --------------------------------------------------------------------------------------


def open_dense(source: "str | Path | PreTrainedModel | DenseSource") -> DenseSource:
    """Finds a dense model and reads its config. A GGUF file is read whole, by transformers; a directory is not yet.

    Raises UserError for a source that is not there, an architecture other than FAMILIES (by its name), a setting
    looplm does not compute (sliding window, dynamic rotary scaling ...), pickled or quantised weights.
    """
    if isinstance(source, DenseSource):
        return source
    if isinstance(source, PreTrainedModel):
        check_family(source.config.model_type, "The model")
        return DenseSource("the model given", Path(), source.config, dense_shape(source.config), source)
    path = local_path(source)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(str(source), path)
    directory = find_checkpoint(source)
    check_family(read_json(directory / CONFIG).get("model_type"), str(directory / CONFIG))
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / CONFIG} holds a value that cannot be read: {reason}") from None
    if config.to_dict().get("quantization_config"):
        raise UserError(f"The weights in {directory} are quantised; convert the model they were quantised from.")
    read_tensors(directory)  # weights that are pickled or incomplete are said before anything else is done
    return DenseSource(str(source), directory, config, dense_shape(config))


def check_family(kind: Any, where: str) -> None:
    """Raises UserError unless `kind` is the model_type of a dense family that converts."""
    if kind in ("looplm", "ouro"):
        raise UserError(
            f'{where} is looped already ("{kind}"). looplm upcycle adds layers to it, looplm train trains it on.'
        )
    if kind not in FAMILIES:
        raise UserError(
            f'{where} has the architecture "{kind}", which cannot be converted. looplm converts '
            f"{', '.join(FAMILIES)}: Llama 2 and 3, SmolLM2, TinyLlama, Qwen2, Qwen2.5, Qwen3."
        )


def dense_shape(config: PretrainedConfig) -> LoopedConfig:
    """A dense config as a LoopedConfig of one loop. Raises UserError for settings that looplm does not compute."""
    fields = config.to_dict()
    kind, rope = config.model_type, dict(fields.get("rope_parameters") or {})
    refused = {
        "hidden_act": fields.get("hidden_act") != "silu",
        "attention_dropout": bool(fields.get("attention_dropout")),
        "use_sliding_window": bool(fields.get("use_sliding_window")),
        "layer_types": any(name != "full_attention" for name in fields.get("layer_types") or []),
        "rope_parameters": rope.get("rope_type") not in ("default", "linear", "llama3", "yarn")
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    found = [f"{name} = {fields[name]!r}" for name, is_refused in refused.items() if is_refused]
    if found:
        raise UserError(
            f"The dense model asks for {'; '.join(found)}, which looplm does not compute: it has SiLU, full attention "
            "without dropout, and plain, linear, llama3 or yarn rotary positions over the whole head. Nothing was "
            "converted."
        )
    heads = fields["num_attention_heads"]
    return build_model_config(
        {name: fields[name] for name in _SAME_NAME}
        | {
            "num_key_value_heads": fields.get("num_key_value_heads") or heads,
            "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
            "num_loops": 1,
            "norm_placement": "pre",
            "attention_bias": kind == "qwen2" or bool(fields.get("attention_bias")),
            "attention_output_bias": bool(fields.get("attention_bias")),
            "mlp_bias": bool(fields.get("mlp_bias")),
            "qk_norm": kind == "qwen3",
            "tie_word_embeddings": bool(fields.get("tie_word_embeddings")),
            "rope_theta": float(rope["rope_theta"]),
            "position_scaling": position_scaling(rope, fields["max_position_embeddings"]),
        }
    )


def position_scaling(rope: dict[str, Any], context: int) -> dict[str, Any] | None:
    """transformers' `rope_parameters` as the fields of RopeScaling, with what they leave out worked out as it does."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings") or context
    factor = float(rope.get("factor") or context / original)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = original
    if kind == "llama3":
        return scaling | {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    scaling |= {name: float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    scaling["truncate"] = bool(rope.get("truncate", True))
    attention = rope.get("attention_factor")
    if attention is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        both = bool(over and under)
        attention = _yarn_mscale(factor, over if both else 1) / (_yarn_mscale(factor, under) if both else 1.0)
    return scaling | {"attention_factor": float(attention)}


def _yarn_mscale(factor: float, mscale: Any) -> float:
    """Scale of cosine and sine (2309.00071, eq. 22), with DeepSeek's weight."""
    return 1.0 if factor <= 1 else 0.1 * float(mscale) * math.log(factor) + 1.0


# --- GGUF -----------------------------------------------------------------------------------------------------------


def _open_gguf(name: str, file: Path) -> DenseSource:
    header = read_gguf_header(file)
    check_family(header.architecture, str(file))
    check_gguf(header, file)
    try:
        with quiet_transformers():
            # float32 is what transformers makes of the blocks, whatever their quantisation.
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
            )
    except ImportError:
        raise UserError(f"Reading {file} needs the package gguf: pip install 'looplm[gguf]'.") from None
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} cannot be read ({reason}). The file is damaged, or of a kind that is new.") from None
    check_family(model.config.model_type, str(file))  # "llama" may have turned out to be Mistral
    return DenseSource(name, file, model.config, dense_shape(model.config), model.eval())


# --- What is in it --------------------------------------------------------------------------------------------------


def source_dtype(source: DenseSource) -> torch.dtype:
    """The dtype of the weights; float32 for a GGUF file."""
    return source.model.dtype if source.model is not None else stored_dtype(read_tensors(source.path))


def check_weights(source: DenseSource) -> None:
    """Raises UserError that names every tensor missing, unexpected or of another shape, from the headers alone."""
    expected = _expected_shapes(source)
    if source.model is not None:
        found = {name: tuple(weight.shape) for name, weight in source.model.state_dict().items()}
    else:
        found = {name: tensor.shape for name, tensor in _stored_weights(source).items()}
    if source.shape.tie_word_embeddings and "lm_head.weight" in found:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    if mismatch := tensor_mismatch(expected, found):
        raise UserError(f"The weights of {source.name} do not belong to its config. Tensors {mismatch}.")


def _expected_shapes(source: DenseSource) -> dict[str, tuple[int, ...]]:
    """The tensors of the dense model: those of a looped one without its gate."""
    shapes = parameter_shapes(source.shape)
    return {name: shape for name, shape in shapes.items() if not name.startswith("model.early_exit_gate.")}


def _stored_weights(source: DenseSource) -> dict[str, StoredTensor]:
    """What lies in the files, less the rotary frequencies that older ones keep: they follow from the config."""
    stored = read_tensors(source.path)
    return {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}


def read_dense_weights(source: DenseSource, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All weights under a looped checkpoint's names, copied, in one dtype; a tied head is left out.

    Raises UserError as :func:`check_weights`, and for a head that the config calls tied and that differs from the
    embedding.
    """
    check_weights(source)
    if source.model is not None:
        held = source.model.state_dict()
        weights = {name: weight.detach().to(device, dtype, copy=True) for name, weight in held.items()}
    else:
        weights = read_weights(_stored_weights(source), dtype, device)
    if source.shape.tie_word_embeddings:
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights["model.embed_tokens.weight"]):
            raise UserError(
                f"{source.name} says tie_word_embeddings and holds an lm_head.weight that is not the embedding. One "
                "of the two is wrong: correct config.json, or take lm_head.weight out."
            )
    return {name: weights[name] for name in _expected_shapes(source)}


def reference_model(source: DenseSource, dtype: torch.dtype, computed: torch.dtype) -> PreTrainedModel:
    """transformers' own implementation of the dense model, for evaluation, in the dtype `computed`.

    Its weights are rounded to `dtype` first. A model given in memory is left as it is.
    """
    if source.model is not None:
        if source.model.dtype == dtype == computed:
            return source.model
        return copy.deepcopy(source.model).to(dtype=dtype).to(dtype=computed)  # pyright: ignore[reportCallIssue]
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    return model.to(dtype=computed).eval()  # pyright: ignore[reportCallIssue]


def dense_tokenizer(source: DenseSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies with the weights; None where there is none, and for a model given in memory.

    Raises UserError for one that cannot be read.
    """
    if source.path.is_file():
        return gguf_tokenizer(source.path)
    if source.model is not None or not any((source.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(source.path)


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a GGUF file, whose weights are left alone; None where it has none.

    Raises UserError for a file or tokenizer that cannot be read.
    """
    if "tokenizer.ggml.tokens" not in read_gguf_header(file).metadata:
        return None
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"The tokenizer in {file} cannot be read: {error}") from None


def any_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory, a hub name or a GGUF file. Raises UserError where there is none."""
    path = local_path(source)
    if not (path.is_file() and path.suffix == ".gguf"):
        return load_tokenizer(source)
    tokenizer = gguf_tokenizer(path)
    if tokenizer is None:
        raise UserError(f"{source} holds no tokenizer.")
    return tokenizer
