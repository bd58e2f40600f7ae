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
    everything but code and pickles. A directory whose replacement was killed half-way is put back first, see
    :func:`recover`. Raises UserError when there is no such directory or repository, or no network to ask.
    """
    path = local_path(source)
    recover(path)
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


def local_path(source: str | Path) -> Path:
    """`source` as a path on this machine, "~" expanded. Raises UserError when it cannot be one."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise UserError(f"{source!r} names no checkpoint. Give a checkpoint's directory or a hub name (owner/model).")
    try:
        path = Path(source).expanduser()
        path.exists()  # raises for a name that is too long, or a folder that may not be read
        path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(
            f"{str(source)[:100]} cannot be looked up: {reason}. Give a checkpoint's directory or a hub name."
        ) from None
    return path


def leftovers(target: Path, ending: str) -> list[Path]:
    """What saves that were killed left beside `target`: "old", set aside, or "partial", unfinished."""
    target = target.resolve()
    if not target.parent.is_dir():
        return []
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{ending}")
    try:
        return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    except PermissionError:  # a folder that may be passed through, and not listed; we have written nothing there
        return []


def recover(target: Path) -> None:
    """Gives a checkpoint its name back when a save was killed after setting it aside and before replacing it.

    Does nothing while something stands at `target`. Raises UserError when the one set aside cannot be renamed.
    """
    if target.exists():
        return
    complete = [path for path in leftovers(target, "old") if (path / CONFIG).is_file()]
    try:
        if complete:
            max(complete, key=lambda path: path.stat().st_mtime).rename(target.resolve())
    except OSError as error:
        if target.exists():  # another process was faster
            return
        raise UserError(
            f"{target} was set aside by a save that was killed, as a hidden directory beside it whose name ends in "
            f".old, and cannot be put back: {error.strerror}. Make its parent directory writable, or rename it."
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
    for known in (LoopLMConfig, OuroConfig):
        if kind == known.model_type:
            try:
                return known(**fields)
            except UserError:
                raise
            except (TypeError, ValueError, AttributeError, KeyError) as error:  # a field that only transformers reads
                raise UserError(f"{path} holds a value that cannot be read: {error}") from None
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
    found = tensor_mismatch(parameter_shapes(config), {name: tensor.shape for name, tensor in tensors.items()})
    if found:
        raise UserError(f"The weights in {directory} do not belong to its {CONFIG}. Tensors {found}.")


def tensor_mismatch(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Every tensor that is missing, unexpected or mis-shaped, in words; empty where names and shapes agree."""
    kinds = {
        "missing": [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found],
        "unexpected": [f"{name} {list(shape)}" for name, shape in found.items() if name not in expected],
        "of another shape": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
