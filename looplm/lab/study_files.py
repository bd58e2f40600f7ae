"""What a study keeps on disk: written whole, read back or called damaged, and by one process at a time."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from looplm.errors import UserError

LOCK = ".looplm-study-lock"
"""Held by the process that works here. Left behind, it says that the directory is a study's."""

FOUND = "found.json"
"""The figures of a finished cell, in its directory."""

_EVERY_CELL_HAS = ("num_layers", "num_loops", "num_parameters", "core_parameters", "scaling")


def write_whole(path: Path, text: str) -> None:
    """Writes beside `path`, then renames, so that what is there stays until all is written."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file


def read_object(path: Path, keys: Sequence[str]) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file. Raises UserError where it does not hold `keys`."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError):
        found = None
    if not isinstance(found, dict) or not set(keys) <= set(found):
        raise UserError(f"{path} is damaged. Delete it; the same command then goes on, and writes it anew.")
    return found


def read_found(directory: Path) -> dict[str, Any] | None:
    """The figures of a finished cell; None where it has none yet, or they are damaged."""
    try:
        found = read_object(directory / FOUND, _EVERY_CELL_HAS)
    except UserError:
        return None
    return found if found is None or isinstance(found["scaling"], list) else None


@contextmanager
def locked(directory: Path, busy: str, patience: float = 0) -> Iterator[None]:
    """Keeps other processes out. Raises UserError with the text `busy` where one is in, and stays for `patience`
    seconds."""
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise UserError(busy) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Makes a UserError of what the file system refuses: a full disk, a place that is read-only or no directory."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"{error.filename or directory} cannot be read or written: {error.strerror}. What the study's cells have "
            "done is kept: make room, or make it writable, and run the same command again; or choose another "
            "directory with --out."
        ) from error
