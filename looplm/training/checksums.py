"""Digests of a checkpoint's files: each rank takes those of what it wrote, and on resume they are taken again.

    checksums-<rank>.json       BLAKE2b of each file that this rank wrote
    checksums-progress.json     and of progress.json, which rank 0 writes last

A checkpoint of an older version has none and is resumed as it is.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from looplm.training.distributed import Ranks

METADATA_FILE = ".metadata"
"""Of the whole checkpoint, as PyTorch's distributed checkpoints name it; rank 0 writes it."""


def write_checksums(directory: Path, rank: int) -> None:
    """Digests of what this rank has written, on disk when it returns. Raises OSError on a full one."""
    own = sorted(directory.glob(f"__{rank}_*.distcp")) + ([directory / METADATA_FILE] if rank == 0 else [])
    write_digests(directory, str(rank), own)


def write_digests(directory: Path, label: str, paths: Sequence[Path]) -> None:
    """Digests of `paths` as checksums-<label>.json, on disk when it returns. Raises OSError on a full one."""
    with (directory / f"checksums-{label}.json").open("w", encoding="utf-8") as file:
        json.dump({path.name: _digest(path) for path in paths}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, ranks: Ranks) -> str | None:
    """What differs from what was written, on all ranks alike, or None; each of them reads its share of the files."""
    found = _find_own_damage(directory, ranks)
    if ranks.world_size == 1:
        return found
    everywhere: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(everywhere, found)
    return next((damage for damage in everywhere if damage is not None), None)


def _find_own_damage(directory: Path, ranks: Ranks) -> str | None:
    try:
        written: dict[str, str] = {}
        for path in sorted(directory.glob("checksums-*.json")):
            written |= json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(written)[ranks.rank :: ranks.world_size]:
            if _digest(directory / name) != written[name]:
                return f"{name} is not what was written (its checksum differs)"
    except OSError as error:
        return str(error)
    except (ValueError, TypeError) as error:
        return f"its checksums cannot be read ({error})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
