"""Records of a run in a JSON lines file, appended as they come, so that a run that was interrupted goes on."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from looplm.errors import UserError


class KeptLines:
    """What `path` holds, by the values of the fields `key`; a later record replaces an earlier one.

    A last line that was cut short is taken out. Raises UserError for lines that are not such records, and when the
    file cannot be read or written.
    """

    def __init__(self, path: Path, key: tuple[str, ...]) -> None:
        self.path, self.key = path, key
        self.records: dict[tuple[Any, ...], dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole, newline, rest = content.rpartition(b"\n")
            for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
                self._read(number, line)
            if rest:
                with path.open("r+b") as file:
                    file.truncate(len(whole + newline))
        except OSError as error:
            raise UserError(f"{path} cannot be used to keep results in: {error.strerror}.") from None

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            self.records[tuple(record[name] for name in self.key)] = record
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.path}, line {number}: is no record with {', '.join(self.key)}. Move the file away, or choose "
                "another place for the results."
            ) from None

    def add(self, record: dict[str, Any]) -> None:
        """Keeps one more record, on disk before this returns."""
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            with self.path.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}. What is there is kept.") from None
        self.records[tuple(record[name] for name in self.key)] = record


def check_plan(directory: Path, plan: Mapping[str, Any]) -> None:
    """Writes down what a directory's results are of. Raises UserError where they are of something else."""
    path = directory / "plan.json"
    mine = json.loads(json.dumps(plan))
    if path.is_file():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(f"{path} is damaged; choose another --out.") from None
        if held != mine:
            changed = [name for name in mine | held if held.get(name) != mine.get(name)]
            raise UserError(
                f"{directory} holds results of another run ({', '.join(changed)} differ); choose another --out."
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}.") from None


def file_digest(path: Path) -> str:
    """What tells one file from another in a plan. Raises UserError when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def model_digest(*parts: nn.Module) -> str:
    """What tells weights from others in a plan, where a path does not: a checkpoint may be trained again."""
    digest = hashlib.sha256()
    for part in parts:
        for name, tensor in part.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
