"""Writing a checkpoint directory so that a crash or a full disk never costs the one that was there."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from looplm.errors import UserError
from looplm.hf.checkpoint import CONFIG, INDEX, leftovers, local_path, recover
from looplm.hf.modeling import LoopLMForCausalLM


def save_checkpoint(
    model: LoopLMForCausalLM,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: str | int | None = None,
) -> Path:
    """Writes config, weights and tokenizer; an Ouro model as an Ouro directory, ours as ours. Returns the path.

    Everything goes to a hidden directory beside the target first, which then takes the target's name. A
    checkpoint that stood there is replaced only then; other plain files in it are kept. After a kill between
    the two renames, loading and the next save put the old one back; a save that is done removes what killed ones
    left. `state_dict` is for a sharded model whose caller has gathered the weights. `max_shard_size`, "5GB" or a
    number of bytes, splits the weights into files of at most that size; None leaves it to transformers.

    Raises UserError when the target is no checkpoint but holds something, cannot be written, or the disk is
    full; nothing is left behind then, and what was there is untouched.
    """
    target = local_path(directory).resolve()
    recover(target)
    kept = files_to_keep(target)
    with writing(target) as partial:
        write_model(partial, model, tokenizer, state_dict, max_shard_size)
        for file in kept:
            if not (partial / file.name).exists():
                shutil.copy2(file, partial / file.name)
    return target


def write_model(
    directory: Path,
    model: LoopLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: str | int | None = None,
) -> None:
    """Config, weights and tokenizer into a directory, as they come. Raises UserError for an impossible shard size."""
    sharding: dict[str, Any] = {}
    if max_shard_size is not None:
        sharding["max_shard_size"] = check_shard_size(max_shard_size)
    with quiet_transformers():
        model.save_pretrained(directory, state_dict=state_dict, **sharding)
        if tokenizer is not None:
            save_tokenizer(tokenizer, directory)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Writes the tokenizer's files.

    Raises OSError for a full disk, as all else does here; the tokenizers library has a plain Exception for it, with
    the system's number in its text.
    """
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(directory)) from error


def check_shard_size(size: str | int) -> str | int:
    """Returns the size of a shard. Raises UserError unless it is a positive number of bytes, or one with its unit."""
    number = re.fullmatch(r"(\d+)([KMGT]I?B)?", str(size).upper())
    if number is None or int(number[1]) == 0:
        raise UserError(
            f"max_shard_size is {size!r}; give a number of bytes, or one with its unit such as 5GB or 500MB."
        )
    return size if number[2] else int(number[1])


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A hidden directory beside `target`, which takes the target's name when the block has ended well.

    When it has not, nothing is left behind and what stood at the target is untouched; a failure to write becomes a
    UserError.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        put_in_place(partial, target)
    except (OSError, SafetensorError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"The checkpoint could not be written to {target}: {reason}. Nothing was changed there."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # not empty: the checkpoint is there
                parent.rmdir()


def new_target(directory: str | Path) -> Path:
    """The path of a directory that is to be made. Raises UserError when a file, or a directory in use, is there."""
    target = local_path(directory).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty directory. Give a new one; nothing is overwritten.")
    return target


def check_writable(target: Path) -> None:
    """Makes sure, before long work, that the directory `target` can be made. Raises UserError where it cannot."""
    place = next(parent for parent in target.parents if parent.exists())
    try:
        with TemporaryDirectory(prefix=".looplm-", dir=place):
            pass
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}. Give another directory.") from error


def files_to_keep(target: Path) -> list[Path]:
    """Files of an existing checkpoint directory that a new save may carry over: all but the weights.

    Raises UserError when the target is a file, or a directory that holds something and is no checkpoint.
    """
    if not target.exists():
        return []
    if not target.is_dir():
        raise UserError(f"{target} is a file; a checkpoint needs a directory of its own.")
    entries = sorted(target.iterdir())
    folders = [path.name for path in entries if path.is_dir()]
    if folders or (entries and not (target / CONFIG).is_file()):
        holds = f"the folders {', '.join(folders)}" if folders else f"files, but no {CONFIG}"
        raise UserError(
            f"{target} exists and is not a checkpoint that could be replaced: it holds {holds}. Give a new directory."
        )
    return [path for path in entries if path.suffix != ".safetensors" and path.name != INDEX]


def put_in_place(partial: Path, target: Path) -> None:
    """Gives a finished directory its final name; what stood there, or was left by a kill, is removed after that."""
    old = target.with_name(partial.name.removesuffix(".partial") + ".old")
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if had_one and not target.exists():
            old.rename(target)
        raise
    for leftover in [*leftovers(target, "old"), *leftovers(target, "partial")]:
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar for a file that takes a second to write."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
