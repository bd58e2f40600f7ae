"""What lies in a checkpoint directory, read and checked before any model is built: config, tensor names, shapes.

Everything that is wrong with a checkpoint is found here and said in one UserError.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.model.config import LoopedConfig
from looplm.model.flops import parameter_shapes

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
"""Files fetched from a hub: configs, weights, tokenizer. Never code, never pickled weights."""

SHIPPED = ("stdlib-small",)
"""Checkpoints that come with the package, under `looplm/checkpoints`. A directory of the same name goes first."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "phi3", "olmo2", "gpt2")


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name, "BF16"."""


def find_checkpoint(source: str | Path, *, files: list[str] | None = None) -> Path:
    """The local directory of a checkpoint that is given as a directory, a hub name, or the name of one that ships.

    A hub name is looked up in the local cache and downloaded if need be: `files`, patterns, by default
    everything but code and pickles. Raises UserError when there is no such directory or repository, or no
    network to ask.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if str(source) in SHIPPED:
        return Path(str(resources.files("looplm"))) / "checkpoints" / str(source)
    if path.exists():
        raise UserError(f"{source} is a file; give the checkpoint's directory, which holds {CONFIG} and the weights.")
    if not _HUB_NAME.fullmatch(str(source)) or str(source).startswith("."):
        raise UserError(f"There is no directory {source}. Give a checkpoint's directory or a hub name (owner/model).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(source), allow_patterns=files or DOWNLOADED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"There is no directory {source}, and the hub could not provide a model of that name ({reason}). Check "
            "the spelling; without a network, download the model beforehand and give its directory."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError when it is missing, unreadable or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{path} is not valid JSON: {error}. The file is damaged or was cut short.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; it must be a JSON object.")
    return content


def read_config(path: Path) -> LoopLMConfig | OuroConfig:
    """The config in a `config.json`, by its `model_type`.

    Raises UserError when the file is missing or broken, when the architecture is not one of ours (a dense
    model, or a looped one that would compute something else if it were run as ours), or when a value is
    impossible.
    """
    fields = read_json(path)
    kind = fields.pop("model_type", None)
    if kind == LoopLMConfig.model_type:
        return LoopLMConfig(**fields)
    if kind == OuroConfig.model_type:
        return OuroConfig(**fields)
    if kind is None:
        raise UserError(
            f'{path} has no "model_type", so its architecture is unknown. looplm reads "looplm" and "ouro".'
        )
    if kind in _DENSE:
        raise UserError(
            f'{path} describes a dense model ("{kind}"), which has no loops to run. looplm runs looped checkpoints, '
            'of the model_type "looplm" or "ouro".'
        )
    raise UserError(
        f'{path} has the model_type "{kind}", an architecture looplm does not know. It reads "looplm" and "ouro"; '
        "running another looped model as if it were one of these, or as a dense one, would give wrong text."
    )


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of all stored tensors, single or sharded, from the file headers alone.

    Raises UserError when there are no safetensors weights, a shard is missing, or a file is damaged.
    """
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{directory / INDEX} has no weight_map: the index is damaged.")
        names = sorted({str(name) for name in weight_map.values()})
        # A shard lies beside its index: a path would let a checkpoint reach for files of its own choosing.
        absent = [name for name in names if name != Path(name).name or not (directory / name).is_file()]
        if absent:
            raise UserError(f"{directory} lacks the weight files {', '.join(absent)}, which its index lists.")
    elif (directory / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        raise UserError(_no_weights(directory))
    return {name: tensor for file in names for name, tensor in read_header(directory / file).items()}


def _no_weights(directory: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(pattern))
    if pickled:
        return (
            f"{directory} holds its weights as {', '.join(pickled)}. looplm reads safetensors only, since a pickle "
            "can run code when it is opened; convert the file with a tool you trust."
        )
    return f"{directory} holds no weights: neither {WEIGHTS} nor {INDEX}."


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises UserError when it is truncated or damaged."""
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {name: StoredTensor(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({error}). The file is damaged or was cut short; copy or download "
            "it again."
        ) from None


def check_tensors(config: LoopedConfig, tensors: Mapping[str, StoredTensor], directory: Path) -> None:
    """Raises UserError naming every tensor that is missing, unexpected or mis-shaped for `config`."""
    expected = parameter_shapes(config)
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    unexpected = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in expected]
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    found = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if names
    ]
    if found:
        raise UserError(f"The weights in {directory} do not belong to its {CONFIG}. Tensors {'; '.join(found)}.")
